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
from aiodist.gpu.execute import Batch, Executor
from aiodist.gpu.plan import Job, Place
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

    def foreign_stream(self, device: int, handle: int) -> int:
        return handle

    def record(self, stream: int) -> None:
        return None

    def wait(self, stream: int, event: None) -> None: ...

    def is_done(self, event: None) -> bool:
        return True

    def wait_for(self, event: None) -> None: ...

    def allocate(self, device: int, nbytes: int) -> Memory:
        return Memory()

    def upload(self, device: int, words: np.ndarray) -> Memory:
        return Memory()

    def copy(self, device: int, target: int, source_device: int, source: int, nbytes: int) -> None: ...

    def copy_out(self, device: int, target_device: int, target: int, source: int, nbytes: int) -> None: ...

    def copy_rows(
        self, device: int, target: int, target_pitch: int, source: int, source_pitch: int, width: int, count: int
    ) -> None: ...

    def is_loaded(self, device: int, form: Form) -> bool:
        return True

    def load(self, device: int, form: Form) -> None: ...

    def launch(self, device: int, form: Form, work: int, arguments: Sequence[int]) -> None: ...

    def reaches(self, device: int, other: int) -> bool:
        return True


def batch(leaves: int, shift: int) -> Batch:
    """Return reductions whose results lie ``shift`` bytes further than they might."""
    dtype = np.dtype(np.float32)

    def places(base: int, leaf: int) -> tuple[Place, ...]:
        return tuple([Place(0, base + ((replica * leaves + leaf) << 20)) for replica in range(REPLICAS)])

    jobs = [Job(places(1 << 40, leaf), places((1 << 44) + shift, leaf), 1000 + leaf, 4, 4) for leaf in range(leaves)]
    return Batch(rule_for(ReduceOp.SUM, dtype), jobs)


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
            turns = itertools.cycle([batch(leaves, shift * k) for k in range(SETS)])
            took = microseconds(lambda e=executor, t=turns: e.run([next(t)], STREAMS, []), times)  # type: ignore[misc]
            print(f"{leaves:4} leaves, {text}: {took:.1f} µs")


if __name__ == "__main__":
    main()
