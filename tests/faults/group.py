"""Groups of some replicas: orders across groups, members that are missing, the wrong group."""

from __future__ import annotations

import asyncio

from aiodist import Reason, ReplicaContext
from tests.faults.case import LOSS, SUM, correct, cycle, incomplete, me, mismatch, raises


@mismatch(Reason.CALL_SITE, 2)
async def swapped_within_a_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group([1, 2, 3]) if me(ctx) else None
    if group is not None and me(ctx) == 2:
        await group.all_reduce(SUM, LOSS)  # named
        await group.all_reduce(SUM, LOSS * 2)
    elif group is not None:
        await group.all_reduce(SUM, LOSS * 2)  # named
        await group.all_reduce(SUM, LOSS)
    await ctx.barrier()


@incomplete(Reason.EXITED, 3)
async def member_leaves_its_group(ctx: ReplicaContext) -> None:
    i = me(ctx)
    group = ctx.new_group([1, 2, 3] if i else [0])
    if i == 3:
        return
    await group.all_reduce(SUM, LOSS)  # named


@raises(ValueError)
async def group_of_others(ctx: ReplicaContext) -> None:
    group = ctx.new_group([0, 1])
    await group.barrier()


@correct()
async def disjoint_groups_of_unequal_length(ctx: ReplicaContext) -> None:
    i = me(ctx)
    group = ctx.new_group([0, 1] if i < 2 else [2, 3])
    for _ in range(3 if i < 2 else 5):
        await group.all_reduce(SUM, LOSS)
    await ctx.barrier()


@correct()
async def overlapping_groups_in_one_order(ctx: ReplicaContext) -> None:
    i = me(ctx)
    for members in ([0, 1, 2], [1, 2, 3], [0, 3]):
        if i in members:
            await ctx.new_group(members).all_reduce(SUM, LOSS)
    await ctx.barrier()


@correct(anyio=False)
async def opposite_orders_in_flight_together(ctx: ReplicaContext) -> None:
    """Both are issued before either is awaited, so neither replica waits for the other's next call."""
    first, second = (ctx.new_group(range(4), name=name) for name in ("first", "second"))
    order = (first, second) if me(ctx) % 2 else (second, first)
    await asyncio.gather(*(group.all_reduce(SUM, LOSS, name="loss") for group in order))


@cycle(0, 1)
async def opposite_orders_across_groups(ctx: ReplicaContext) -> None:
    i = me(ctx)
    if i < 2:
        first, second = (ctx.new_group([0, 1], name=name) for name in ("first", "second"))
        if i:
            await first.all_reduce(SUM, LOSS)  # named
            await second.all_reduce(SUM, LOSS)
        else:
            await second.all_reduce(SUM, LOSS)  # named
            await first.all_reduce(SUM, LOSS)


@cycle(0, 1, 2)
async def ring_of_groups(ctx: ReplicaContext) -> None:
    i = me(ctx)
    if i == 3:
        return
    left, right = (ctx.new_group(sorted({k, (k + 1) % 3})) for k in ((i - 1) % 3, i))
    await right.barrier()  # named
    await left.barrier()


@cycle(0, 1)
async def group_against_the_whole_run(ctx: ReplicaContext) -> None:
    i = me(ctx)
    group = ctx.new_group([0, 1] if i < 2 else [2, 3])
    if i == 0:
        await ctx.barrier(name="end")  # named
        await group.barrier()
    else:
        await group.barrier()  # named
        await ctx.barrier(name="end")
