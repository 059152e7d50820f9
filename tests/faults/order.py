"""Calls swapped, skipped, added."""

from __future__ import annotations

import numpy as np

from aiodist import Reason, ReplicaContext
from tests.faults.case import EVERYONE, GRADIENT, LOSS, MAX, SUM, correct, incomplete, me, mismatch, odd


@mismatch(Reason.CALL_SITE, 2, peers=True)
async def swapped_sums_of_equal_shape(ctx: ReplicaContext) -> None:
    if me(ctx) == 2:
        await ctx.all_reduce(SUM, GRADIENT)  # named
        await ctx.all_reduce(SUM, LOSS)
    else:
        await ctx.all_reduce(SUM, LOSS)  # named
        await ctx.all_reduce(SUM, GRADIENT)


@mismatch(Reason.CALL_SITE, *EVERYONE, peers=True)
async def swapped_by_one_half(ctx: ReplicaContext) -> None:
    if me(ctx) < ctx.num_replicas_in_sync // 2:
        await ctx.all_reduce(SUM, GRADIENT)  # named
        await ctx.all_reduce(SUM, LOSS)
    else:
        await ctx.all_reduce(SUM, LOSS)  # named
        await ctx.all_reduce(SUM, GRADIENT)


@mismatch(Reason.KIND, 1, peers=True)
async def swapped_kinds(ctx: ReplicaContext) -> None:
    if odd(ctx):
        await ctx.barrier()  # named
        await ctx.all_reduce(SUM, LOSS)
    else:
        await ctx.all_reduce(SUM, LOSS)  # named
        await ctx.barrier()


@mismatch(Reason.CALL_SITE, 3, peers=True)
async def skipped_one_of_three(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(SUM, LOSS)
    if me(ctx) != 3:
        await ctx.all_reduce(SUM, GRADIENT)  # named
    await ctx.all_reduce(SUM, LOSS)  # named


@incomplete(Reason.EXITED, 0, peers=True)
async def skipped_the_last(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(SUM, LOSS)
    if me(ctx):
        await ctx.all_reduce(SUM, GRADIENT)  # named


@mismatch(Reason.CALL_SITE, 0, peers=True)
async def added_one_before(ctx: ReplicaContext) -> None:
    if me(ctx) == 0:
        await ctx.all_reduce(SUM, LOSS)  # named
    await ctx.all_reduce(SUM, LOSS)  # named
    await ctx.all_reduce(SUM, GRADIENT)


@incomplete(Reason.EXITED, 1, peers=True)
async def added_one_after(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(SUM, LOSS)
    if odd(ctx):
        await ctx.all_reduce(SUM, LOSS)  # named


@mismatch(Reason.CALL_SITE, 2, peers=True, never="left the loop")
async def repeated_by_a_retry(ctx: ReplicaContext) -> None:
    for _ in range(2 if me(ctx) == 2 else 1):
        await ctx.all_reduce(SUM, LOSS)  # named
    await ctx.all_reduce(SUM, GRADIENT)  # named


@mismatch(Reason.CALL_SITE, 1, peers=True)
async def swapped_in_the_pending_list(ctx: ReplicaContext) -> None:
    if odd(ctx):
        pending = [ctx.all_reduce(SUM, GRADIENT), ctx.all_reduce(SUM, LOSS)]  # named
    else:
        pending = [
            ctx.all_reduce(SUM, LOSS),  # named
            ctx.all_reduce(SUM, GRADIENT),
        ]
    for handle in pending:
        await handle


@mismatch(Reason.REDUCE_OP, 3, peers=True)
async def skipped_before_another_op(ctx: ReplicaContext) -> None:
    if me(ctx) != 3:
        await ctx.all_reduce(MAX, LOSS)  # named
    await ctx.all_reduce(SUM, LOSS)  # named


@correct(peers=True)
async def swapped_where_names_meet(ctx: ReplicaContext) -> None:
    if me(ctx) == 2:
        await ctx.all_reduce(SUM, GRADIENT, name="gradient")
    else:
        await ctx.all_reduce(SUM, GRADIENT, name="gradient")


@correct(peers=True)
async def awaited_in_another_order_than_issued(ctx: ReplicaContext) -> None:
    loss, gradient = ctx.all_reduce(SUM, LOSS), ctx.all_reduce(SUM, GRADIENT)
    first, second = (gradient, loss) if me(ctx) % 2 else (loss, gradient)
    await first
    await second
    total: np.ndarray = await loss
    assert total.tolist() == [4.0, 8.0]


@correct(peers=True)
async def many_equal_calls_of_one_line(ctx: ReplicaContext) -> None:
    for _ in range(20):
        await ctx.all_reduce(SUM, LOSS)
