"""What collectives between workers cost: `aiodist run -n 2 tests/benchmarks/workers.py`, on an idle machine.

Each size is reduced in four ways, one after the other and again: by mpi4py's Allreduce, which blocks (blocking); by its
Iallreduce, asked at every turn of the event loop (by hand); by `ctx.all_reduce`; and by that with
``reduction="ordered"``. Minimum and median of the rounds are shown, in microseconds. Then, for values of 64 MiB: how
long the event loop stood still, at most, between two of its turns, by the clock and by the processor time that its
thread took meanwhile (the rest was other processes'), beside how long mpi4py takes for the same, blocking; and the
share of a core that waiting takes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from aiodist import MultiWorkerMirroredStrategy, get_replica_context

SIZES = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "8 MiB": 1 << 21}
ROUNDS = 9
WAYS = ["blocking", "by hand", "all_reduce", "ordered"]

Rows: TypeAlias = dict[str, dict[str, list[float]]]
Stalls: TypeAlias = dict[str, tuple[float, float, float]]


async def mean(fn: Callable[[], Awaitable[Any]], repeats: int) -> float:
    """Return the seconds of one call."""
    begun = time.perf_counter()
    for _ in range(repeats):
        await fn()
    return (time.perf_counter() - begun) / repeats


async def replica(rows: Rows, way: str) -> None:
    """Measure the sums of one worker, once."""
    ctx, world = get_replica_context(), MPI.COMM_WORLD
    for name, size in SIZES.items():
        value, out = np.ones(size, np.float32), np.empty(size, np.float32)

        async def blocking(value: Any = value, out: Any = out) -> None:
            world.Allreduce(value, out)

        async def by_hand(value: Any = value, out: Any = out) -> None:
            request = world.Iallreduce(value, out)
            while not request.Test():  # noqa: ASYNC110  (what a program would write)
                await asyncio.sleep(0)

        async def checked(value: Any = value) -> None:
            await ctx.all_reduce("SUM", value)

        ways: dict[str, Callable[[], Awaitable[Any]]] = {way: checked}
        if way == "all_reduce":
            ways = {"blocking": blocking, "by hand": by_hand, way: checked}
        for shown, fn in ways.items():
            for _ in range(2):
                await checked()
            repeats = max(4, min(200, (1 << 23) // (4 * size)))
            rows.setdefault(name, {}).setdefault(shown, []).append(await mean(fn, repeats))


def blocking(value: Any) -> dict[str, float]:
    """Return, by collective, the seconds that mpi4py takes, blocking; the least of three."""
    world = MPI.COMM_WORLD
    out, whole = np.empty_like(value), np.empty((world.size, *value.shape), value.dtype)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: world.Allreduce(value, out),
        "all_gather": lambda: world.Allgather(value, whole),
        "broadcast": lambda: world.Bcast(out, 0),
        "all_to_all": lambda: world.Alltoall(value, out),
    }
    found = {}
    for name, call in calls.items():
        took = []
        for _ in range(4):
            world.Barrier()
            begun = time.perf_counter()
            call()
            took.append(time.perf_counter() - begun)
        found[name] = min(took[1:])
    return found


async def stalls() -> tuple[Stalls, dict[str, float]]:
    """Return, by collective, its seconds, and the most between two turns of the loop, by the clock and the thread's.

    And the seconds of mpi4py alone.
    """
    ctx = get_replica_context()
    value = np.ones(1 << 24, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: ctx.all_reduce("SUM", value),
        "mean": lambda: ctx.all_reduce("MEAN", value),
        "max": lambda: ctx.all_reduce("MAX", value),
        "all_gather": lambda: ctx.all_gather(value, 0),
        "broadcast": lambda: ctx.broadcast(value, 0),
        "all_to_all": lambda: ctx.all_to_all(value),
    }
    alone = blocking(value)
    return {name: await stall(call) for name, call in calls.items()}, alone


async def stall(call: Callable[[], Awaitable[Any]]) -> tuple[float, float, float]:
    """Return the least of two measurements of a collective."""
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
        took = turns[-1][0] - turns[0][0]
        ticking.cancel()
        found.append((took, *np.diff(turns, axis=0).max(axis=0)))
    return min(found)


async def wait_for_the_other() -> float:
    """Return the share of a core that the first worker takes while it waits for the second."""
    ctx = get_replica_context()
    await ctx.barrier()
    if ctx.replica_id_in_sync_group:
        await asyncio.sleep(2)
    cpu, wall = time.process_time(), time.perf_counter()
    await ctx.barrier()
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def text(seconds: list[float] | None) -> str:
    """Return minimum and median in microseconds."""
    return f"{min(seconds) * 1e6:.0f}, {median(seconds) * 1e6:.0f}" if seconds else "-"


def main() -> None:
    """Print the tables."""
    gc.disable()
    rows: Rows = {}
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"])
    ordered = MultiWorkerMirroredStrategy(devices=["CPU:0"], reduction="ordered")
    for _ in range(ROUNDS):
        asyncio.run(strategy.run(replica, (rows, "all_reduce")))
        asyncio.run(ordered.run(replica, (rows, "ordered")))
    longest, alone = asyncio.run(strategy.run(stalls))
    longest["ordered"] = asyncio.run(ordered.run(stalls))[0]["all_reduce"]
    share = asyncio.run(strategy.run(wait_for_the_other))
    if strategy.cluster_resolver.task_id == 0:
        print(" " * 8 + "".join(f"{way:>16}" for way in WAYS))
        for name, found in rows.items():
            print(f"{name:8}" + "".join(f"{text(found.get(way)):>16}" for way in WAYS))
        print(f"{'64 MiB':14}{'ms':>8}{'stall':>8}{'of it own':>11}{'blocking':>10}")
        for name, seconds in longest.items():
            shown = "".join(f"{1e3 * s:{width}.1f}" for s, width in zip(seconds, (8, 8, 11), strict=True))
            print(f"{name:14}{shown}" + (f"{1e3 * alone[name]:10.1f}" if name in alone else f"{'-':>10}"))
        print(f"waiting takes {share:.0%} of a core")


if __name__ == "__main__":
    main()
