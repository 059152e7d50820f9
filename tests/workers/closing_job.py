"""A program for real workers that make strategies one after the other, and what becomes of the communicators.

python closing_job.py [WAY...]

Each line is a way to leave strategies, with how many communicators and open files the worker has after three of them,
after six, and after nine.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from aiodist import (
    CollectiveError,
    CommunicationOptions,
    MultiWorkerMirroredStrategy,
    WorkerLostError,
    get_replica_context,
)
from aiodist.workers import holdings
from tests.workers.job import say

ROUNDS = 3
Way = Callable[[int], Awaitable[None]]


def make(communicator: Any = None, **options: Any) -> MultiWorkerMirroredStrategy:
    """Return a further strategy."""
    given = CommunicationOptions(**options)
    return MultiWorkerMirroredStrategy(communicator, ["CPU:0"], communication_options=given)


def have() -> int:
    """Return how many communicators this worker has."""
    return sum(len(one.made) for one in holdings.known)


async def replica(size: int = 1) -> Any:
    """Meet the others."""
    return (await get_replica_context().all_reduce("SUM", np.ones(size)))[0]


async def check(strategy: MultiWorkerMirroredStrategy, size: int = 1) -> None:
    """Use a strategy."""
    assert await strategy.run(replica, (size,)) == strategy.num_replicas_in_sync


async def closed(_: int) -> None:
    """Close it."""
    strategy = make()
    await check(strategy)
    strategy.close()


async def kept(_: int, those: list[Any] = []) -> None:  # noqa: B006  (to keep them)
    """Close it, and keep it."""
    strategy = make()
    await check(strategy)
    strategy.close()
    those.append(strategy)


async def dropped(_: int) -> None:
    """Leave it to be collected."""
    strategy = make()
    await check(strategy)
    del strategy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def alongside(_: int) -> None:
    """Let values move together with their records, where they have a communicator of their own."""
    strategy = make(verify="alongside")
    for _ in range(3):
        await check(strategy, 10_000)
    strategy.close()


async def at_a_time(_: int) -> None:
    """Have several runs at a time, a lane each."""
    strategy = make()
    await asyncio.gather(*(check(strategy) for _ in range(4)))
    strategy.close()


async def grouped(_: int) -> None:
    """Have groups of replicas, across workers."""

    async def program() -> Any:
        ctx = get_replica_context()
        for _ in range(2):
            group = ctx.new_group([0, 1]) if ctx.replica_id_in_sync_group < 2 else None
            if group is not None:
                assert await group.all_reduce("SUM", 1) == 2
        await ctx.barrier()

    strategy = make()
    await strategy.run(program)
    strategy.close()


async def grouped_in_any_order(_: int) -> None:
    """Have groups across workers in two strategies at a time, which every other worker uses the other way round."""

    async def program() -> Any:
        ctx = get_replica_context()
        if ctx.replica_id_in_sync_group < 2:
            assert await ctx.new_group([0, 1]).all_reduce("SUM", 1) == 2
        await ctx.barrier()

    both = [make() for _ in range(2)]
    await asyncio.gather(*(one.run(program) for one in both[:: -1 if both[0]._communicator.rank % 2 else 1]))
    for one in both:
        one.close()


async def disagreeing(_: int) -> None:
    """Raise that the replicas do not mean the same, and go on."""

    async def program() -> Any:
        ctx = get_replica_context()
        await (ctx.barrier() if ctx.replica_id_in_sync_group else ctx.all_reduce("SUM", 1))

    strategy = make()
    with suppress(CollectiveError):
        await strategy.run(program)
    await check(strategy)
    strategy.close()


async def late(_: int, those: list[Any] = []) -> None:  # noqa: B006  (to keep them)
    """Close it on one worker only, and on the others when the next is made."""
    strategy = make()
    await check(strategy)
    for before in those:
        before.close()
    those[:] = []
    if strategy._communicator.rank:
        those.append(strategy)
    else:
        strategy.close()


async def of_its_own(number: int) -> None:
    """Make it of a communicator of the program's, which is freed before."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for given in (MPI.COMM_SELF, world.Split(world.rank % 2 if number % 2 else world.rank // 2)):
        strategy = make(given)
        await check(strategy)
        if given != MPI.COMM_SELF:
            given.Free()
        strategy.close()
    make().close()


async def used(_: int) -> None:
    """Close it while a run waits, which ends by that, and make another one before the run has heard of it."""

    async def program() -> Any:
        ctx = get_replica_context()
        await ctx.barrier()
        begun.set()
        await ctx.barrier()
        if not ctx.replica_id_in_sync_group:
            await going_on.wait()
        await ctx.barrier()

    begun, going_on = asyncio.Event(), asyncio.Event()
    strategy = make()
    run = asyncio.ensure_future(strategy.run(program))
    await begun.wait()
    strategy.close()
    further = make()
    going_on.set()
    await check(further)
    try:
        await run
    except WorkerLostError:
        further.close()
    else:
        raise AssertionError


WAYS: list[Way] = [closed, kept, dropped, alongside, at_a_time, grouped, grouped_in_any_order, disagreeing, late, used]


def descriptors() -> int:
    """Return how many files this process has open; 0 where the system does not tell."""
    with suppress(OSError):
        return len(list(Path("/proc/self/fd").iterdir()))
    return 0


async def main(names: Sequence[str]) -> None:
    """Go some ways; none: all."""
    for way in [*WAYS, of_its_own]:
        if names and way.__name__ not in names:
            continue
        counts, files = [], []
        for number in range(3 * ROUNDS):
            await way(number)
            if number % 3 == 2:
                counts.append(have())
                files.append(descriptors())
        say(f"worker: {way.__name__} has {counts} and {files}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
