"""Locks, events, queues and tasks between replicas: what is awaited beside the collectives."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import anyio

from aiodist import ReplicaContext
from tests.faults.case import EVERYONE, LOSS, SUM, correct, deadlock, me, odd


def events() -> list[anyio.Event]:
    return [anyio.Event() for _ in range(4)]


def streams() -> list[Any]:
    return [anyio.create_memory_object_stream[int](4) for _ in range(4)]


def queues() -> list[asyncio.Queue[int]]:
    return [asyncio.Queue() for _ in range(4)]


@deadlock(1, 2, 3, shared=asyncio.Lock)
async def lock_held_across_a_sum(ctx: ReplicaContext, lock: asyncio.Lock) -> None:
    if me(ctx) == 0:
        await lock.acquire()
    await ctx.barrier()
    if me(ctx):
        await lock.acquire()  # named
    await ctx.all_reduce(SUM, LOSS)  # named
    lock.release()


@deadlock(3, shared=asyncio.Event)
async def event_that_nobody_sets(ctx: ReplicaContext, event: asyncio.Event) -> None:
    if me(ctx) == 3:
        await event.wait()  # named
    await ctx.all_reduce(SUM, LOSS)  # named


@deadlock(2, shared=asyncio.Queue)
async def queue_that_nobody_fills(ctx: ReplicaContext, queue: asyncio.Queue[int]) -> None:
    if me(ctx) == 2:
        await queue.get()  # named
    await ctx.all_reduce(SUM, LOSS)  # named


@deadlock(0, shared=lambda: asyncio.Queue(1))
async def queue_that_nobody_empties(ctx: ReplicaContext, queue: asyncio.Queue[int]) -> None:
    if me(ctx) == 0:
        for item in range(2):
            await queue.put(item)  # named
    await ctx.barrier()  # named
    if odd(ctx):
        await queue.get()


@deadlock(*EVERYONE, shared=queues)
async def ring_that_receives_first(ctx: ReplicaContext, ring: list[asyncio.Queue[int]]) -> None:
    i = me(ctx)
    await ring[i].get()  # named
    await ring[(i + 1) % 4].put(i)
    await ctx.barrier()


@deadlock(2, 3, shared=lambda: asyncio.Semaphore(2))
async def semaphore_held_across_a_barrier(ctx: ReplicaContext, slots: asyncio.Semaphore) -> None:
    if me(ctx) > 1:
        await ctx.new_group([2, 3]).barrier()
        await asyncio.sleep(1)
    async with slots:  # named
        await ctx.barrier()  # named


@deadlock(3, shared=asyncio.Condition)
async def condition_that_nobody_notifies(ctx: ReplicaContext, condition: asyncio.Condition) -> None:
    if me(ctx) == 3:
        async with condition:
            await condition.wait()  # named
    await ctx.all_reduce(SUM, LOSS)  # named


@deadlock(0, shared=dict)
async def awaits_the_task_of_another(ctx: ReplicaContext, tasks: dict[str, asyncio.Task[Any]]) -> None:
    async def reduce() -> None:
        await ctx.all_reduce(SUM, LOSS, name="reduce")  # named

    if odd(ctx):
        tasks["reduce"] = asyncio.create_task(reduce())
        await tasks["reduce"]  # named
    elif me(ctx) == 0:
        await asyncio.sleep(1)
        await asyncio.shield(tasks["reduce"])  # named
        await ctx.all_reduce(SUM, LOSS, name="reduce")
    else:
        await ctx.all_reduce(SUM, LOSS, name="reduce")  # named


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
    i = me(ctx)
    if i:
        await events[i - 1].wait()
    events[i].set()
    await ctx.all_reduce(SUM, LOSS)


@correct(shared=streams)
async def ring_that_sends_first(ctx: ReplicaContext, streams: list[Any]) -> None:
    i = me(ctx)
    send, receive = streams[(i + 1) % 4][0], streams[i][1]
    with send, receive:
        await send.send(i)
        assert await receive.receive() == (i - 1) % 4
        await ctx.all_reduce(SUM, LOSS)


@correct(shared=anyio.Event)
async def woken_between_two_collectives(ctx: ReplicaContext, event: anyio.Event) -> None:
    await ctx.barrier()
    if me(ctx) == 3:
        event.set()
    await event.wait()
    await ctx.barrier()
