"""What collectives between workers cost: `aiodist run -n 2 tests/benchmarks/workers.py`, on an idle machine.

Each size is reduced in four ways, one after the other and again: by the engine, blocking; by the engine through
the event loop, without a record (unverified); by `ctx.all_reduce` (verified); and so with ``reduction="ordered"``.
Minima over the repeats are shown, in microseconds. Then, for values of 64 MiB: how long the event loop stood still, at
most, between two of its turns, by the clock and by the processor time that its thread took meanwhile (the rest was
other processes'); and the share of a core that waiting takes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, ReduceOp, get_replica_context
from aiodist.replica.awaiting import Bell, complete
from aiodist.replica.hands import Hands
from aiodist.workers.communicator import Communicator
from aiodist.workers.gloo import GlooCommunicator
from aiodist.workers.leaves import Leaf
from aiodist.workers.mpi import load_mpi
from aiodist.workers.reduction import Folding, Reduction
from aiodist_kernels.rules import rule_for

SIZES = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "8 MiB": 1 << 21}
ROUNDS = 7


def allreduce_of(engine: Communicator) -> Callable[[Any, Any], object]:
    """Return the engine's own sum of arrays, which blocks."""
    if isinstance(engine, GlooCommunicator):

        def wait(value: Any, out: Any) -> None:
            request: Any = engine.iallreduce(ReduceOp.SUM, value, out)
            request._works[0].wait()

        return wait
    reduce_blocking: Callable[[Any, Any], object] = load_mpi().COMM_WORLD.Allreduce
    return reduce_blocking


async def best(fn: Callable[[], Awaitable[Any]], repeats: int) -> float:
    """Return the seconds of one call: the least mean over the rounds."""
    found = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(repeats):
            await fn()
        found.append((time.perf_counter() - begun) / repeats)
    return min(found)


async def replica(rows: dict[str, list[float]], *, ordered: bool) -> None:
    """Measure the collectives of one worker."""
    ctx = get_replica_context()
    bell = Bell(asyncio.get_running_loop().call_soon_threadsafe, for_values=True)
    hands = Hands()
    engine = ctx.strategy._team._lanes[0].communicator
    reduce_blocking = allreduce_of(engine)
    for name, size in SIZES.items():
        value, out = np.ones(size, np.float32), np.empty(size, np.float32)
        repeats = max(3, min(300, (1 << 22) // (4 * size)))

        async def blocking(value: Any = value, out: Any = out) -> None:
            reduce_blocking(value, out)

        async def unverified(value: Any = value) -> None:
            leaf = Leaf(rule_for(ReduceOp.SUM, value.dtype), [value], scalar=False)
            folding = Folding(engine.rank, [1] * engine.size)
            await complete(Reduction(ReduceOp.SUM, [leaf], engine.size, folding).carry_out(engine, None, hands), bell)

        async def verified(value: Any = value) -> None:
            await ctx.all_reduce(ReduceOp.SUM, value)

        for fn in (verified,) if ordered else (blocking, unverified, verified):
            await ctx.barrier()
            rows.setdefault(name, []).append(await best(fn, repeats))
    bell.close()


async def stalls() -> dict[str, tuple[float, float, float]]:
    """Return, by collective, its seconds, and the most between two turns of the loop, by the clock and the thread's."""
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
    return {name: await stall(call) for name, call in calls.items()}


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
        begun = time.perf_counter()
        await call()
        took = time.perf_counter() - begun
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


def main() -> None:
    """Print the tables."""
    gc.disable()
    rows: dict[str, list[float]] = {}
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"])
    ordered = MultiWorkerMirroredStrategy(
        devices=["CPU:0"], communication_options=CommunicationOptions(reduction="ordered")
    )
    asyncio.run(strategy.run(replica, (rows,), {"ordered": False}))
    asyncio.run(ordered.run(replica, (rows,), {"ordered": True}))
    longest = asyncio.run(strategy.run(stalls))
    longest["ordered"] = asyncio.run(ordered.run(stalls))["all_reduce"]
    share = asyncio.run(strategy.run(wait_for_the_other))
    if strategy.cluster_resolver.task_id == 0:
        print(f"{'':8}{'blocking':>10}{'unverified':>12}{'verified':>10}{'more':>8}{'ordered':>10}")
        for name, (plain, bare, checked, tree) in rows.items():
            shown = "".join(
                f"{seconds * 1e6:{width}.0f}" for seconds, width in ((plain, 10), (bare, 12), (checked, 10))
            )
            print(f"{name:8}{shown}{checked / bare - 1:8.0%}{tree * 1e6:10.0f}")
        print(f"{'64 MiB':14}{'ms':>8}{'stall':>8}{'of it own':>11}")
        for name, seconds in longest.items():
            print(f"{name:14}" + "".join(f"{1e3 * s:{width}.1f}" for s, width in zip(seconds, (8, 8, 11), strict=True)))
        print(f"waiting takes {share:.0%} of a core")


if __name__ == "__main__":
    main()
