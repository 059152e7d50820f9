"""Locks, events, queues and tasks between replicas: what is awaited beside the collectives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np

from aiodist import ReduceOp, ReplicaContext
from tests.faults.case import correct

SUM = ReduceOp.SUM
LOSS = np.array([1.0, 2.0], np.float32)


def events() -> list[anyio.Event]:
    return [anyio.Event() for _ in range(4)]


def streams() -> list[Any]:
    return [anyio.create_memory_object_stream[int](4) for _ in range(4)]


@correct(shared=lambda: SimpleNamespace(lock=anyio.Lock(), total=0))
async def lock_released_before_the_sum(ctx: ReplicaContext, shared: Any) -> None:
    async with shared.lock:
        total = shared.total
        await anyio.lowlevel.checkpoint()
        shared.total = total + 1
    await ctx.all_reduce(SUM, LOSS)
    assert shared.total == 4


@correct(shared=events)
async def one_wakes_the_next(ctx: ReplicaContext, events: list[anyio.Event]) -> None:
    i = ctx.replica_id_in_sync_group
    if i:
        await events[i - 1].wait()
    events[i].set()
    await ctx.all_reduce(SUM, LOSS)


@correct(shared=streams)
async def ring_that_sends_first(ctx: ReplicaContext, streams: list[Any]) -> None:
    i = ctx.replica_id_in_sync_group
    send, receive = streams[(i + 1) % 4][0], streams[i][1]
    with send, receive:
        await send.send(i)
        assert await receive.receive() == (i - 1) % 4
        await ctx.all_reduce(SUM, LOSS)


@correct(shared=anyio.Event)
async def woken_between_two_collectives(ctx: ReplicaContext, event: anyio.Event) -> None:
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == 3:
        event.set()
    await event.wait()
    await ctx.barrier()
