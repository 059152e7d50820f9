"""What the terms of the cost model are here: `aiodist run -n P tests/benchmarks/cost_model.py`, for each P.

Each line is one measurement on P workers with one replica each, as the first worker sees it, in microseconds; minima
over the rounds. `barrier` is a step with nothing but its record; `128 B` travels in the record; the larger ones follow.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from aiodist import MultiWorkerMirroredStrategy, get_replica_context

SIZES = {"128 B": 16, "64 KiB": 1 << 13, "1 MiB": 1 << 17, "8 MiB": 1 << 20}
ROUNDS = 5


async def best(fn: Callable[[], Awaitable[Any]], repeats: int) -> float:
    """Return the microseconds of one call: the least mean over the rounds."""
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(repeats):
            await fn()
        found.append((time.perf_counter() - begun) / repeats)
    return min(found) * 1e6


async def replica() -> dict[str, float]:
    """Measure the steps of one worker."""
    ctx = get_replica_context()
    found = {"barrier": await best(ctx.barrier, 100)}
    for name, size in SIZES.items():
        value = np.ones(size)

        async def reduce(value: Any = value) -> None:
            await ctx.all_reduce("SUM", value)

        found[name] = await best(reduce, max(3, min(100, (1 << 21) // value.nbytes)))
    return found


def engine_alone(size: int) -> dict[str, float]:
    """Return the microseconds of MPI's own blocking operations."""
    if size == 1:
        return {}
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    record, records = np.zeros(512, np.uint8), np.zeros(512 * size, np.uint8)
    small, large, out = np.zeros(12), np.ones(1 << 17), np.ones(1 << 17)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "MPI Allgather 512 B": (lambda: world.Allgather(record, records), 200),
        "MPI Allreduce 96 B": (lambda: world.Allreduce(small, small.copy()), 200),
        "MPI Allreduce 1 MiB": (lambda: world.Allreduce(large, out), 5),
    }
    found = {}
    for name, (call, repeats) in calls.items():
        rounds = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for _ in range(repeats):
                call()
            rounds.append((time.perf_counter() - begun) / repeats)
        found[name] = min(rounds) * 1e6
    return found


def main() -> None:
    """Print the lines."""
    gc.disable()
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"])
    steps = asyncio.run(strategy.run(replica))
    bare = engine_alone(strategy.num_replicas_in_sync)
    if strategy.cluster_resolver.task_id == 0:
        print(f"{strategy.num_replicas_in_sync} workers")
        for name, micros in {**bare, **steps}.items():
            print(f"  {name:22}{micros:12.1f}")


if __name__ == "__main__":
    main()
