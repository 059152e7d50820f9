"""What enqueueing a reduction of device arrays costs Python, on a driver that does nothing; needs no GPU.

    python -m tests.benchmarks.cuda_enqueue

prints microseconds for one leaf and 160, of four replicas on one GPU: where all lies where it lay in an earlier
collective, and where it does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import numpy as np

from aiodist import ReduceOp
from aiodist.gpu.execute import Executor
from aiodist.gpu.plan import Job, Place
from aiodist.gpu.scheme import Batch, symbol
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.rules import rule_for

REPLICAS = 4
SETS = 100
REPEATS = 15
STREAMS = [0, 1, 2, 3, 4]


class Memory:
    """Memory that is nowhere."""

    address = 1 << 12


class IdleDriver:
    """A driver that does nothing, at once."""

    def using(self) -> nullcontext[None]:
        return nullcontext()

    def stream(self, device: int) -> int:
        return device

    def replica_stream(self, name: str, device: int) -> int:
        return device

    def used_stream(self, name: str) -> None:
        return None

    def foreign_stream(self, device: int, handle: int) -> int:
        return handle

    def record(self, stream: int) -> None:
        return None

    def release(self, event: None) -> None: ...

    def wait(self, stream: int, event: None) -> None: ...

    def is_done(self, event: None) -> bool:
        return True

    def wait_for(self, event: None) -> None: ...

    def allocate(self, device: int, nbytes: int) -> Memory:
        return Memory()

    def host_memory(self, nbytes: int) -> Memory:
        return Memory()

    def upload(self, device: int, words: np.ndarray) -> Memory:
        return Memory()

    def copy(self, device: int, target: int, source_device: int, source: int, nbytes: int) -> None: ...

    def copy_out(self, device: int, target_device: int, target: int, source: int, nbytes: int) -> None: ...

    def copy_rows(
        self, device: int, target: int, target_pitch: int, source: int, source_pitch: int, width: int, count: int
    ) -> None: ...

    def handle(self, device: int) -> int:
        return device

    def is_loaded(self, device: int, form: Form) -> bool:
        return True

    def load(self, device: int, form: Form) -> None: ...

    def launcher(self, device: int, form: Form, work: int, arguments: Sequence[int]) -> Callable[[], object]:
        return int

    def reaches(self, device: int, other: int) -> bool:
        return True


def batch(leaves: int) -> Batch:
    """Return reductions: each leaf's four arrays, and their four results, have numbers in a row."""
    jobs = []
    for leaf in range(leaves):
        places = [Place(0, symbol(2 * REPLICAS * leaf + k)) for k in range(2 * REPLICAS)]
        jobs.append(Job(tuple(places[:REPLICAS]), tuple(places[REPLICAS:]), 1000 + leaf, 4, 4))
    return Batch(rule_for(ReduceOp.SUM, np.dtype(np.float32)), jobs)


def begins(leaves: int, shift: int) -> tuple[int, ...]:
    """Return where arrays begin that lie ``shift`` bytes further than they might."""
    return tuple([(1 << 40) + shift + (k << 20) for k in range(2 * REPLICAS * leaves)])


def microseconds(call: Callable[[], Any], times: int) -> float:
    """Return how long a call takes, as the least of some means."""

    def once() -> float:
        start = perf_counter()
        for _ in range(times):
            call()
        return (perf_counter() - start) / times

    return 1e6 * min(once() for _ in range(REPEATS))


def main() -> None:
    """Measure, and print."""
    for leaves, times in ((1, 500), (160, 20)):
        for text, shift in (("where others lay", 0), ("elsewhere", 16)):
            executor = Executor(IdleDriver())
            scheme = executor.scheme([batch(leaves)], arrays=2 * REPLICAS * leaves)
            turns = itertools.cycle([begins(leaves, shift * k) for k in range(SETS)])
            took = microseconds(lambda e=executor, s=scheme, t=turns: e.run(s, STREAMS, [], next(t)), times)  # type: ignore[misc]
            print(f"{leaves:4} leaves, {text}: {took:.1f} µs")


if __name__ == "__main__":
    main()
