"""Child tasks of one replica that issue collectives side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from aiodist import Reason, ReduceOp, ReplicaContext
from tests.faults.case import MAX, SUM, correct, race

EVERYONE = range(4)


async def load(batch: int) -> np.ndarray:
    """Return a batch, after as many turns of the loop as it takes."""
    await asyncio.sleep(0)
    return np.array([batch, 1.0], np.float32)


@race(Reason.CALL_SITE)
async def two_tasks_race_to_reduce(ctx: ReplicaContext) -> None:
    async def loss() -> None:
        await ctx.all_reduce(SUM, await load(1))

    async def gradient() -> None:
        await ctx.all_reduce(SUM, await load(2))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(loss())
        tasks.create_task(gradient())


@race(Reason.REDUCE_OP)
async def gathered_coroutines_race(ctx: ReplicaContext) -> None:
    async def reduce(op: ReduceOp) -> None:
        await ctx.all_reduce(op, await load(1))

    await asyncio.gather(reduce(SUM), reduce(MAX))


@race(Reason.NAME)
async def workers_take_names_from_a_queue(ctx: ReplicaContext) -> None:
    names: asyncio.Queue[str] = asyncio.Queue()
    for name in "abcd":
        names.put_nowait(name)

    async def worker() -> None:
        while not names.empty():
            name = names.get_nowait()
            await ctx.all_reduce(SUM, await load(1), name=name)

    await asyncio.gather(worker(), worker())


@race(Reason.SHAPE)
async def reduces_in_order_of_completion(ctx: ReplicaContext) -> None:
    async def compute(size: int) -> np.ndarray:
        await asyncio.sleep(0)
        return np.zeros(size)

    for done in asyncio.as_completed([compute(2), compute(3)]):
        await ctx.all_reduce(SUM, await done)


@race(Reason.KIND, says="its own task")
async def logs_beside_the_step(ctx: ReplicaContext) -> None:
    async def log() -> None:
        await asyncio.sleep(0)
        await ctx.all_gather(np.zeros(1), 0)

    logging = asyncio.create_task(log())
    await asyncio.sleep(0)
    await ctx.all_reduce(SUM, np.zeros(1))
    await logging


@correct(anyio=False)
async def tasks_with_a_group_each(ctx: ReplicaContext) -> None:
    groups = [ctx.new_group(EVERYONE, name=name) for name in ("loss", "gradient")]

    async def reduce(group: ReplicaContext) -> None:
        for batch in range(3):
            await group.all_reduce(SUM, await load(batch))

    await asyncio.gather(*map(reduce, groups))


@correct(anyio=False)
async def tasks_one_after_the_other(ctx: ReplicaContext) -> None:
    async def reduce(batch: int) -> None:
        await ctx.all_reduce(SUM, await load(batch))

    for batch in range(3):
        await asyncio.create_task(reduce(batch))


@correct(anyio=False)
async def only_one_task_issues_collectives(ctx: ReplicaContext) -> None:
    async def compute() -> None:
        for batch in range(5):
            await load(batch)

    computing = asyncio.create_task(compute())
    for batch in range(3):
        await ctx.all_reduce(SUM, await load(batch))
    await computing


@correct(anyio=False)
async def issued_in_order_and_awaited_in_tasks(ctx: ReplicaContext) -> None:
    async def result_of(handle: Awaitable[object]) -> object:
        await asyncio.sleep(0)
        return await handle

    issue: list[Callable[[], Awaitable[object]]] = [
        lambda: ctx.all_reduce(SUM, np.zeros(2)),
        lambda: ctx.all_gather(np.zeros(1), 0),
    ]
    await asyncio.gather(*(result_of(call()) for call in issue))
