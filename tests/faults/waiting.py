"""Cancelled waits, timeouts, slow replicas, threads, timers: what a replica does while the others wait."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel

from aiodist import CommunicationOptions, Reason, ReplicaContext
from tests.faults.case import LOSS, SUM, correct, incomplete, me, odd


@incomplete(Reason.ABANDONED, 1, shared=anyio.Event)
async def timeout_around_one_collective(ctx: ReplicaContext, over: anyio.Event) -> None:
    if me(ctx) == 0:
        await over.wait()
    with anyio.move_on_after(0.01 if odd(ctx) else 60):
        await ctx.all_reduce(SUM, LOSS)  # named
    over.set()
    await ctx.barrier()


@incomplete(Reason.ABANDONED, 2, anyio=False, shared=anyio.Event)
async def cancelled_child_task(ctx: ReplicaContext, cancelled: anyio.Event) -> None:
    issued = anyio.Event()

    async def reduce() -> None:
        handle = ctx.all_reduce(SUM, LOSS)  # named
        issued.set()
        await handle

    if me(ctx) == 0:
        await cancelled.wait()
    task = asyncio.create_task(reduce())
    if me(ctx) == 2:
        await issued.wait()
        task.cancel()
        cancelled.set()
    await asyncio.gather(task, return_exceptions=True)
    await ctx.barrier()


@incomplete(Reason.TIMEOUT, 3, shared=anyio.Event)
async def never_comes(ctx: ReplicaContext, never: anyio.Event) -> None:
    if me(ctx) == 3:
        await never.wait()  # named
    await ctx.all_reduce(SUM, LOSS, CommunicationOptions(timeout_seconds=0.05))  # named


@correct(peers=True)
async def slow_replica(ctx: ReplicaContext) -> None:
    for _ in range(3):
        for _ in range(10 * me(ctx)):
            await anyio.lowlevel.checkpoint()
        await ctx.all_reduce(SUM, LOSS)


@correct()
async def computes_in_a_thread(ctx: ReplicaContext) -> None:
    for step in range(3):
        if me(ctx) == step:
            await ctx.run_sync(sum, range(10_000))
        await ctx.all_reduce(SUM, LOSS)


@correct()
async def timeout_that_does_not_fire(ctx: ReplicaContext) -> None:
    with anyio.fail_after(60):
        await ctx.all_reduce(SUM, LOSS)
    await ctx.barrier()


@correct()
async def timeout_away_from_collectives(ctx: ReplicaContext) -> None:
    with anyio.move_on_after(0.001 * me(ctx)):
        await anyio.sleep_forever()
    await ctx.all_reduce(SUM, LOSS)


@correct(shared=anyio.Event, anyio=False)
async def woken_by_a_timer(ctx: ReplicaContext, event: anyio.Event) -> None:
    if odd(ctx):
        asyncio.get_running_loop().call_later(0.005, event.set)
        await event.wait()
    await ctx.all_reduce(SUM, LOSS)


@correct(anyio=False)
async def woken_by_a_thread(ctx: ReplicaContext) -> None:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    if me(ctx) == 2:
        wake = loop.run_in_executor(None, lambda: loop.call_soon_threadsafe(future.set_result, None))
        await future
        await wake
    await ctx.all_reduce(SUM, LOSS)
