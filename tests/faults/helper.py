"""Calls that stand in a helper which several callers share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from aiodist import Reason, ReplicaContext
from tests.faults.case import EVERYONE, SUM, correct, me, mismatch, odd

ONES, TWOS, THREES = (np.full(3, value, np.float32) for value in (1, 2, 3))
Step = Callable[[ReplicaContext], Awaitable[Any]]


async def total(ctx: ReplicaContext, value: Any, **more: Any) -> Any:
    return await ctx.all_reduce(SUM, value, **more)  # in every helper's report


async def total_and_meet(ctx: ReplicaContext, value: Any) -> None:
    await ctx.all_reduce(SUM, value)
    await ctx.barrier()


async def in_order(ctx: ReplicaContext, steps: Sequence[Step], odd: Sequence[int]) -> None:
    """Make the steps in the order that is given, a replica in another one."""
    for step in [steps[i] for i in odd] if me(ctx) == 2 else steps:
        await step(ctx)


@mismatch(Reason.CALL_SITE, 2)
async def swapped_through_a_helper(ctx: ReplicaContext) -> None:
    async def loss(ctx: ReplicaContext) -> None:
        await total(ctx, ONES)  # named

    async def gradient(ctx: ReplicaContext) -> None:
        await total(ctx, TWOS)  # named

    await in_order(ctx, [loss, gradient], (1, 0))


@mismatch(Reason.CALL_SITE, *EVERYONE)
async def swapped_through_a_helper_by_one_half(ctx: ReplicaContext) -> None:
    for name in ("loss", "gradient") if me(ctx) < 2 else ("gradient", "loss"):
        if name == "loss":
            await total(ctx, ONES)  # named
        else:
            await total(ctx, TWOS)  # named


@mismatch(Reason.CALL_SITE, 2)
async def rotated_through_a_helper(ctx: ReplicaContext) -> None:
    async def first(ctx: ReplicaContext) -> None:
        await total_and_meet(ctx, ONES)  # named

    async def second(ctx: ReplicaContext) -> None:
        await total_and_meet(ctx, TWOS)  # named

    async def third(ctx: ReplicaContext) -> None:
        await total_and_meet(ctx, THREES)  # named

    await in_order(ctx, [first, second, third], (1, 2, 0))


@mismatch(Reason.CALL_SITE, 2)
async def swapped_through_a_helper_of_a_group(ctx: ReplicaContext) -> None:
    if me(ctx):
        group = ctx.new_group([1, 2, 3], name="experts")
        for step in (1, 0) if me(ctx) == 2 else (0, 1):
            if step:
                await total(group, ONES)  # named
            else:
                await total(group, TWOS)  # named
    await ctx.barrier()


@mismatch(Reason.CALL_SITE, 2)
async def issued_through_a_helper_in_another_order(ctx: ReplicaContext) -> None:
    def issue(value: Any) -> Any:
        return ctx.all_reduce(SUM, value)

    pending = []
    for step in (1, 0) if me(ctx) == 2 else (0, 1):
        if step:
            pending.append(issue(ONES))  # named
        else:
            pending.append(issue(TWOS))  # named
    for handle in pending:
        await handle


@mismatch(Reason.SHAPE, 2)
async def another_shape_through_a_helper(ctx: ReplicaContext) -> None:
    if me(ctx) == 2:
        await total(ctx, np.zeros(4, np.float32))  # named
    else:
        await total(ctx, ONES)  # named


@correct()
async def callers_that_merely_differ(ctx: ReplicaContext) -> None:
    for _ in range(5):
        if me(ctx) == 2:
            await total(ctx, ONES)
        else:
            await total(ctx, TWOS)
    await total(ctx, ONES)


@correct()
async def callers_that_differ_once(ctx: ReplicaContext) -> None:
    for step in range(6):
        if step == 3 and odd(ctx):
            await total(ctx, ONES)
        elif step % 2:
            await total(ctx, TWOS)
        else:
            await total(ctx, THREES)


@correct()
async def swapped_through_a_helper_by_name(ctx: ReplicaContext) -> None:
    for step in (1, 0) if me(ctx) == 2 else (0, 1):
        if step:
            await total(ctx, ONES, name="loss")
        else:
            await total(ctx, ONES, name="loss")
