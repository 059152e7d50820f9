"""The cost of collectives between workers, on an idle machine, in microseconds.

    aiodist run -n 2 tests/benchmarks/workers.py              sums beside MPI's own, stalls of the loop, waiting
    aiodist run -n 2 tests/benchmarks/workers.py terms        the terms of the cost model; also with other numbers

docs/benchmarks/workers.md says what the first prints. Terms are minima over the rounds, as the first worker measures
them: `barrier` is a step with nothing but its record; 128 B travel in the record, larger values behind it.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from aiodist import MultiWorkerMirroredStrategy, get_replica_context
from tests.benchmarks.timing import in_units, least

ROUNDS = 9
WAYS = ["blocking", "by hand", "all_reduce", "ordered"]

Rows: TypeAlias = dict[int, dict[str, list[float]]]
Stalls: TypeAlias = dict[str, tuple[float, float, float]]


def repeats_of(nbytes: int) -> int:
    """Return how many times to reduce a value in a round."""
    return max(4, min(200, (1 << 23) // nbytes))


# Sums, stalls, waiting.


async def sums(rows: Rows, way: str) -> None:
    from mpi4py import MPI

    ctx, world = get_replica_context(), MPI.COMM_WORLD
    for size in (1, 1 << 14, 1 << 18, 1 << 21):
        value, out = np.ones(size, np.float32), np.empty(size, np.float32)

        async def blocking(value: Any = value, out: Any = out) -> None:
            world.Allreduce(value, out)

        async def by_hand(value: Any = value, out: Any = out) -> None:
            request = world.Iallreduce(value, out)
            while not request.Test():  # noqa: ASYNC110  (what a program would write)
                await asyncio.sleep(0)

        async def checked(value: Any = value) -> None:
            await ctx.all_reduce("SUM", value)

        baselines = {"blocking": blocking, "by hand": by_hand} if way == "all_reduce" else {}
        for shown, fn in {**baselines, way: checked}.items():
            for _ in range(2):
                await checked()
            took = await least(fn, repeats_of(value.nbytes), rounds=1)
            rows.setdefault(value.nbytes, {}).setdefault(shown, []).append(took)


async def stalls() -> tuple[Stalls, dict[str, float]]:
    """Return each collective's stall, and the seconds of mpi4py's own operation."""
    from mpi4py import MPI

    ctx, world = get_replica_context(), MPI.COMM_WORLD
    value = np.ones(1 << 24, np.float32)
    out, whole = np.empty_like(value), np.empty((world.size, *value.shape), value.dtype)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], object] | None]] = {
        "all_reduce": (lambda: ctx.all_reduce("SUM", value), lambda: world.Allreduce(value, out)),
        "mean": (lambda: ctx.all_reduce("MEAN", value), None),
        "max": (lambda: ctx.all_reduce("MAX", value), None),
        "all_gather": (lambda: ctx.all_gather(value, 0), lambda: world.Allgather(value, whole)),
        "broadcast": (lambda: ctx.broadcast(value, 0), lambda: world.Bcast(out, 0)),
        "all_to_all": (lambda: ctx.all_to_all(value), lambda: world.Alltoall(value, out)),
    }
    alone = {}
    for name, (_, bare) in calls.items():
        if bare is not None:
            took = []
            for _ in range(4):
                world.Barrier()
                begun = time.perf_counter()
                bare()
                took.append(time.perf_counter() - begun)
            alone[name] = min(took[1:])
    return {name: await stall(call) for name, (call, _) in calls.items()}, alone


async def stall(call: Callable[[], Awaitable[Any]]) -> tuple[float, float, float]:
    """Return a collective's seconds, and the longest time between two turns of the loop in wall-clock and thread time.

    It is the quicker of two measurements.
    """
    turns: list[tuple[float, float]] = []

    async def tick() -> None:
        while True:
            turns.append((time.perf_counter(), time.thread_time()))
            await asyncio.sleep(0)

    found = []
    for _ in range(2):
        await get_replica_context().barrier()
        turns.clear()
        ticking = asyncio.create_task(tick())
        turns.append((time.perf_counter(), time.thread_time()))
        await call()
        turns.append((time.perf_counter(), time.thread_time()))
        ticking.cancel()
        found.append((turns[-1][0] - turns[0][0], *np.diff(turns, axis=0).max(axis=0)))
    return min(found)


async def wait_for_the_other() -> float:
    """Return the share of a core that the first worker uses while it waits for the second."""
    ctx = get_replica_context()
    await ctx.barrier()
    if ctx.replica_id_in_sync_group:
        await asyncio.sleep(2)
    cpu, wall = time.process_time(), time.perf_counter()
    await ctx.barrier()
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def beside_mpi() -> None:
    """Print sums, stalls, and the cost of waiting."""
    rows: Rows = {}
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"])
    ordered = MultiWorkerMirroredStrategy(devices=["CPU:0"], reduction="ordered")
    for _ in range(ROUNDS):
        asyncio.run(strategy.run(sums, (rows, "all_reduce")))
        asyncio.run(ordered.run(sums, (rows, "ordered")))
    longest, alone = asyncio.run(strategy.run(stalls))
    longest["ordered"] = asyncio.run(ordered.run(stalls))[0]["all_reduce"]
    share = asyncio.run(strategy.run(wait_for_the_other))
    if strategy.cluster_resolver.task_id:
        return
    print(" " * 8 + "".join(f"{way:>16}" for way in WAYS))
    for nbytes, found in rows.items():
        cells = [f"{min(found[way]):.0f}, {median(found[way]):.0f}" for way in WAYS]
        print(f"{in_units(nbytes):8}" + "".join(f"{cell:>16}" for cell in cells))
    print(f"{'64 MiB':14}{'ms':>8}{'stall':>8}{'of it own':>11}{'blocking':>10}")
    for name, seconds in longest.items():
        took, longest_turn, own = (1e3 * one for one in seconds)
        blocking = f"{1e3 * alone[name]:.1f}" if name in alone else "-"
        print(f"{name:14}{took:8.1f}{longest_turn:8.1f}{own:11.1f}{blocking:>10}")
    print(f"waiting takes {share:.0%} of a core")


# The terms of the cost model.


async def steps() -> dict[str, float]:
    ctx = get_replica_context()
    found = {"barrier": await least(ctx.barrier, 100)}
    for size in (16, 1 << 13, 1 << 17, 1 << 20):
        value = np.ones(size)

        async def reduce(value: Any = value) -> None:
            await ctx.all_reduce("SUM", value)

        found[in_units(value.nbytes)] = await least(reduce, repeats_of(value.nbytes))
    return found


async def mpi_alone() -> dict[str, float]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    record, records = np.zeros(512, np.uint8), np.zeros(512 * world.size, np.uint8)
    small, large, out = np.zeros(12), np.ones(1 << 17), np.ones(1 << 17)

    async def call(operation: Callable[..., object], *args: object) -> None:
        operation(*args)

    return {
        "MPI Allgather 512 B": await least(lambda: call(world.Allgather, record, records), 200),
        "MPI Allreduce 96 B": await least(lambda: call(world.Allreduce, small, small.copy()), 200),
        "MPI Allreduce 1 MiB": await least(lambda: call(world.Allreduce, large, out), 5),
    }


def terms() -> None:
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"])
    found, workers = asyncio.run(strategy.run(steps)), strategy.num_replicas_in_sync
    bare = asyncio.run(mpi_alone()) if workers > 1 else {}
    if strategy.cluster_resolver.task_id == 0:
        print(f"{workers} workers")
        for name, micros in {**bare, **found}.items():
            print(f"  {name:22}{micros:12.1f}")


if __name__ == "__main__":
    gc.disable()
    {"terms": terms}.get("".join(sys.argv[1:]), beside_mpi)()
