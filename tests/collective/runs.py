"""What tests of collectives share: strategies of n replicas, the error of a program, turns, and a check of recovery."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import CollectiveError, CommunicationOptions, MirroredStrategy, ReduceOp, ReplicaContext

Program = Callable[[ReplicaContext], Awaitable[Any]]


def mirrored(replicas: int, order_check: str = "call_site", timeout: float | None = None) -> MirroredStrategy:
    return MirroredStrategy(
        [f"CPU:{i}" for i in range(replicas)],
        order_check=order_check,
        communication_options=CommunicationOptions(timeout_seconds=timeout),
    )


async def run(
    strategy: aiodist.Strategy, program: Program, options: CommunicationOptions | None = None
) -> tuple[Any, ...]:
    """Run a program that takes its context; return the local results."""

    def replica() -> Any:
        return program(aiodist.get_replica_context())

    with anyio.fail_after(20):
        return strategy.experimental_local_results(await strategy.run(replica, options=options))


async def error_of(program: Program, replicas: int = 3, **options: Any) -> CollectiveError:
    """Return the collective error that comes out of a run; the same strategy must work afterwards."""
    strategy = mirrored(replicas, **options)
    with pytest.raises(CollectiveError) as caught:
        await run(strategy, program)
    await check_that_it_works(strategy)
    return caught.value


async def check_that_it_works(strategy: aiodist.Strategy) -> None:
    async def program(ctx: ReplicaContext) -> int:
        total = await ctx.all_reduce(ReduceOp.SUM, np.array([ctx.replica_id_in_sync_group]))
        await ctx.barrier()
        return int(total[0])

    n = strategy.num_replicas_in_sync
    assert await run(strategy, program, CommunicationOptions(timeout_seconds=20)) == (n * (n - 1) // 2,) * n


class Turns:
    """Replicas act one after the other, in a given order: who has acted passes the turn on.

    Used as ``await turns.mine(ctx)``, then the act, then ``turns.next(ctx)``, with nothing awaited between.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._position = {replica_id: position for position, replica_id in enumerate(order)}
        self._events = [anyio.Event() for _ in range(len(order) + 1)]
        self._events[0].set()

    async def mine(self, ctx: ReplicaContext) -> None:
        await self._events[self._position[ctx.replica_id_in_sync_group]].wait()

    def next(self, ctx: ReplicaContext) -> None:
        self._events[self._position[ctx.replica_id_in_sync_group] + 1].set()
