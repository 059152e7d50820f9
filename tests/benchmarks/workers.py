"""What collectives between workers cost: `aiodist run -n 2 tests/benchmarks/workers.py`, on an idle machine.

Each size is reduced in five ways, one after the other and again: by the engine, blocking; by the same data collective
as aiodist makes, awaited, without a replica context (unverified); by `ctx.all_reduce` without the exchange of records
(no record), which `without_records` leaves out and which nobody can ask for; by `ctx.all_reduce` as it is (ahead); and
with ``reduction="ordered"``. Minimum and median of the rounds are shown, in
microseconds. Then, for values of 64 MiB: how long the event loop stood still, at most, between two of its turns, by the
clock and by the processor time that its thread took meanwhile (the rest was other processes'), beside how long the
engine takes for the same, blocking; and the share of a core that waiting takes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, ReduceOp, get_replica_context
from aiodist.replica.awaiting import Bell, complete
from aiodist.replica.hands import Hands
from aiodist.workers.communicator import Communicator
from aiodist.workers.crossing import Plan
from aiodist.workers.gloo import GlooCommunicator
from aiodist.workers.lane import Agreed, Lane
from aiodist.workers.leaves import Leaf
from aiodist.workers.mpi import load_mpi
from aiodist.workers.record import PAYLOAD
from aiodist.workers.reduction import Reduction, in_order_of
from aiodist.workers.transfers import Steps
from aiodist_kernels.rules import rule_for

SIZES = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "8 MiB": 1 << 21}
ROUNDS = 9
WAYS = ["blocking", "unverified", "no record", "ahead", "ordered"]


def allreduce_of(engine: Communicator) -> Callable[[Any, Any], object]:
    """Return the engine's own sum of arrays, which blocks."""
    if isinstance(engine, GlooCommunicator):

        def wait(value: Any, out: Any) -> None:
            request: Any = engine.iallreduce(ReduceOp.SUM, value, out)
            request._works[0].wait()

        return wait
    reduce_blocking: Callable[[Any, Any], object] = load_mpi().COMM_WORLD.Allreduce
    return reduce_blocking


@contextmanager
def without_records() -> Iterator[None]:
    """Let all workers take it that the others mean the same; nothing else of a step changes."""

    def take_it(lane: Lane, digest: bytes, plan: Plan, *_: object) -> Steps[Agreed]:
        return Agreed(plan, lane.opening, plain=True)
        yield

    agree = Lane.agree
    Lane.agree = take_it  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Lane.agree = agree  # type: ignore[method-assign]


async def mean(fn: Callable[[], Awaitable[Any]], repeats: int) -> float:
    """Return the seconds of one call."""
    begun = time.perf_counter()
    for _ in range(repeats):
        await fn()
    return (time.perf_counter() - begun) / repeats


Rows: TypeAlias = dict[str, dict[str, list[float]]]


async def replica(rows: Rows, way: str) -> None:
    """Measure the collectives of one worker, once."""
    ctx = get_replica_context()
    bell = Bell(asyncio.get_running_loop().call_soon_threadsafe, for_values=True)
    hands = Hands()
    team = ctx.strategy._team
    engine = team._lanes[0].communicator
    reduce_blocking = allreduce_of(engine)
    for name, size in SIZES.items():
        value, out = np.ones(size, np.float32), np.empty(size, np.float32)
        rule, layout = rule_for(ReduceOp.SUM, value.dtype), team.span.layout
        repeats = max(4, min(200, (1 << 23) // (4 * size)))

        async def blocking(value: Any = value, out: Any = out) -> None:
            reduce_blocking(value, out)

        async def unverified(value: Any = value, rule: Any = rule, layout: Any = layout) -> None:
            leaves = [Leaf(rule, [value], scalar=False)]
            reduction = Reduction(ReduceOp.SUM, leaves, layout.replicas, in_order_of(layout))
            await complete(reduction.carry_out(engine, None, hands), bell)

        async def verified(value: Any = value) -> None:
            await ctx.all_reduce(ReduceOp.SUM, value)

        found = rows.setdefault(name, {})
        ways: dict[str, Callable[[], Awaitable[Any]]] = {way: verified}
        if way == "ahead":
            ways = {"blocking": blocking, "unverified": unverified, way: verified}
        for shown, fn in ways.items():
            for _ in range(2):
                await verified()
            found.setdefault(shown, []).append(await mean(fn, repeats))
        if way == "ahead" and value.nbytes > PAYLOAD:  # else the record has the values
            await verified()
            with without_records():
                found.setdefault("no record", []).append(await mean(verified, repeats))
    bell.close()


def blocking(value: Any, engine: Communicator) -> dict[str, float]:
    """Return, by collective, the seconds that the engine itself takes, blocking; the least of three."""
    if isinstance(engine, GlooCommunicator):
        return {}
    world = load_mpi().COMM_WORLD
    out, whole = np.empty_like(value), np.empty((engine.size, *value.shape), value.dtype)
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


Stalls: TypeAlias = dict[str, tuple[float, float, float]]


async def stalls() -> tuple[Stalls, dict[str, float]]:
    """Return, by collective, its seconds, and the most between two turns of the loop, by the clock and the thread's.

    And the seconds of the engine itself.
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
    alone = blocking(value, ctx.strategy._team._lanes[0].communicator)
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
    strategies = {
        way: MultiWorkerMirroredStrategy(devices=["CPU:0"], communication_options=options)
        for way, options in {
            "ahead": CommunicationOptions(),
            "ordered": CommunicationOptions(reduction="ordered"),
        }.items()
    }
    strategy = strategies["ahead"]
    for _ in range(ROUNDS):
        for way, each in strategies.items():
            asyncio.run(each.run(replica, (rows, way)))
    longest, alone = asyncio.run(strategy.run(stalls))
    longest["ordered"] = asyncio.run(strategies["ordered"].run(stalls))[0]["all_reduce"]
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
