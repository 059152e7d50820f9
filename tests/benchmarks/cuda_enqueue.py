"""What enqueueing a reduction of device arrays costs Python, on a driver that does nothing; needs no GPU.

    python -m tests.benchmarks.cuda_enqueue

prints microseconds of processor time for one leaf and 160, of four replicas on one GPU: where all lies where it lay in
an earlier collective, and where it does not. First what is enqueued alone, then the whole way through
``ctx.all_reduce``, from four replicas' calls to their results, with a framework whose arrays are an address, a shape
and a dtype.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from aiodist import MirroredStrategy, ReduceOp, get_replica_context
from aiodist._arrays import device as frameworks
from aiodist._arrays import devices
from aiodist._arrays.device import DeviceArray, DeviceType, Spec
from aiodist._gpu import enqueue
from aiodist._gpu.enqueue import Batch, Queue, symbol
from aiodist._gpu.steps import Job, Place
from aiodist_kernels.rules import rule_for
from tests.benchmarks.timing import best

REPLICAS = 4
SETS = 100
REPEATS = 15
STREAMS = [0, 1, 2, 3, 4]


def idle_driver() -> Any:
    """Return a driver that does nothing, at once."""
    nothing, memory = nullcontext(), SimpleNamespace(address=1 << 12)
    methods = {
        **dict.fromkeys(("stream", "foreign_stream"), lambda device, *_: device),
        **dict.fromkeys(("used_stream", "record", "release", "wait", "copy"), lambda *_: None),
        **dict.fromkeys(("is_done", "is_loaded", "reaches"), lambda *_: True),
        "using": lambda: nothing,
        "upload": lambda *_: memory,
        "launcher": lambda *_: lambda *_: None,
    }
    return SimpleNamespace(**methods)


def batch(leaves: int) -> Batch:
    """Return reductions: each leaf's four arrays, and their four results, have numbers in a row."""
    jobs = []
    for leaf in range(leaves):
        places = [Place(0, symbol(2 * REPLICAS * leaf + k)) for k in range(2 * REPLICAS)]
        jobs.append(Job(tuple(places[:REPLICAS]), tuple(places[REPLICAS:]), 1000 + leaf))
    return Batch(rule_for(ReduceOp.SUM, np.dtype(np.float32)), jobs)


def begins(leaves: int, shift: int) -> tuple[int, ...]:
    """Return where arrays begin that lie ``shift`` bytes further than they might."""
    return tuple([(1 << 40) + shift + (k << 20) for k in range(2 * REPLICAS * leaves)])


class Quick:
    """An array of a framework that takes no time."""

    __slots__ = ("__weakref__", "address", "dtype", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.address, self.shape, self.dtype = address, shape, dtype


class Quickly(DeviceType):
    """The framework. Its new arrays lie where those of the last collective lay, or further on for ever."""

    name = "quick"

    def __init__(self, *, elsewhere: bool) -> None:
        self.elsewhere = elsewhere
        self.places = itertools.count(1 << 41, 1 << 22)

    def is_on_gpu(self, leaf: Any) -> bool:
        return True

    def view(self, leaf: Any) -> DeviceArray:
        return DeviceArray(leaf.address, leaf.shape, leaf.dtype, 0, 1, leaf)

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: object) -> list[tuple[Any, int]]:
        places = self.places if self.elsewhere else itertools.count(1 << 41, 1 << 22)
        return [(Quick(place, shape, dtype), place) for (shape, dtype), place in zip(specs, places, strict=False)]

    def stream(self, ordinal: int) -> int:
        return 1


def whole_way(leaves: int, times: int, *, elsewhere: bool) -> float:
    """Return the microseconds of an ``all_reduce`` of four replicas, as the least of some means."""
    queue, logical = Queue(idle_driver()), devices.LogicalGpus()
    logical.split[0] = REPLICAS
    found = devices.Found((devices.Gpu(0, "idle", (9, 0)),), "13.0")
    find = itertools.repeat(found).__next__  # a mock would take its time
    took: list[float] = []

    async def replica() -> None:
        ctx = get_replica_context()
        first = (1 << 40) + (ctx.replica_id_in_sync_group << 32)
        value = [Quick(first + (leaf << 22), (1000 + leaf,), np.dtype(np.float32)) for leaf in range(leaves)]
        for _ in range(REPEATS):
            start = process_time()
            for _ in range(times):
                await ctx.all_reduce(ReduceOp.SUM, value if leaves > 1 else value[0])
            took.append((process_time() - start) / times)

    with (
        mock.patch.object(devices, "find_gpus", find),
        mock.patch.object(devices, "logical", logical),
        mock.patch.object(enqueue, "queue", itertools.repeat(queue).__next__),
        mock.patch.dict(frameworks.TYPES, {Quick.__module__.partition(".")[0]: Quickly(elsewhere=elsewhere)}),
    ):
        asyncio.run(MirroredStrategy([f"GPU:{k}" for k in range(REPLICAS)]).run(replica))
    return 1e6 * min(took)


def main() -> None:
    """Measure, and print."""
    for leaves, times in ((1, 500), (160, 20)):
        for text, shift in (("where others lay", 0), ("elsewhere", 16)):
            queue = Queue(idle_driver())
            schedule = queue.schedule([batch(leaves)], arrays=2 * REPLICAS * leaves)
            turns = itertools.cycle([begins(leaves, shift * k) for k in range(SETS)])
            took = best({"run": lambda e=queue, s=schedule, t=turns: e.run(s, STREAMS, [], next(t))})["run"]  # type: ignore[misc]
            whole = whole_way(leaves, times, elsewhere=bool(shift))
            print(f"{leaves:4} leaves, {text}: {took:.1f} µs, the whole way {whole:.0f} µs")


if __name__ == "__main__":
    main()
