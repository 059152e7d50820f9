"""Groups of some replicas: orders across groups, members that are missing, the wrong group."""

from __future__ import annotations

import asyncio

from aiodist import Reason, ReplicaContext
from tests.faults.case import (
    LOSS,
    SIZES,
    SUM,
    correct,
    cycle,
    everyone,
    family,
    incomplete,
    me,
    mismatch,
    odd,
    raises,
)  # fmt: skip

family("group")


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


@cycle(1, sizes=SIZES, says="name")
async def group_of_another_name(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx), name="expert" if odd(ctx) else "experts")
    await group.all_reduce(SUM, LOSS)  # named


@cycle(1, sizes=(3, 7), says="members")
async def group_of_other_members(ctx: ReplicaContext) -> None:
    members = [0, 1] if odd(ctx) else everyone(ctx)
    await ctx.new_group(members, name="experts").all_reduce(SUM, LOSS)  # named


@cycle(1, sizes=SIZES, says="order")
async def group_of_members_in_another_order(ctx: ReplicaContext) -> None:
    members = everyone(ctx)[::-1] if odd(ctx) else everyone(ctx)
    await ctx.new_group(members).all_reduce(SUM, LOSS)  # named


@cycle(1, sizes=SIZES, says="context")
async def context_of_the_run_instead_of_the_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx), name="experts")
    await (ctx if odd(ctx) else group).all_reduce(SUM, LOSS)  # named


@cycle(1, sizes=SIZES, says="#1 of group 'experts'")
async def one_call_more_in_the_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx), name="experts")
    for _ in range(2 if odd(ctx) else 1):
        await group.all_reduce(SUM, LOSS)  # named
    await ctx.barrier()  # named


@incomplete(Reason.EXITED, 1, sizes=SIZES, says="has not made group 'experts'", never="out of data")
async def member_does_not_make_the_group(ctx: ReplicaContext) -> None:
    if not odd(ctx):
        await ctx.new_group(everyone(ctx), name="experts").all_reduce(SUM, LOSS)  # named


@mismatch(Reason.KIND, 1, sizes=SIZES, says="group 'experts'")
async def another_kind_in_the_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx), name="experts")
    await ctx.barrier()
    if odd(ctx):
        await group.barrier()  # named
    else:
        await group.all_reduce(SUM, LOSS)  # named


@cycle(1, sizes=SIZES)
async def groups_of_all_in_another_order(ctx: ReplicaContext) -> None:
    rows, columns = (ctx.new_group(everyone(ctx), name=name) for name in ("rows", "columns"))
    if odd(ctx):
        await columns.all_reduce(SUM, LOSS)  # named
        await rows.all_reduce(SUM, LOSS)
    else:
        await rows.all_reduce(SUM, LOSS)  # named
        await columns.all_reduce(SUM, LOSS)


@correct(sizes=SIZES)
async def group_of_members_in_one_other_order(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx)[::-1])
    assert me(group) == ctx.num_replicas_in_sync - 1 - me(ctx)
    await group.barrier()
