"""Collectives under a condition that is not the same on every replica."""

from __future__ import annotations

import numpy as np

from aiodist import Reason, ReplicaContext
from tests.faults.case import MAX, MEAN, SUM, correct, incomplete, me, mismatch, odd


def own_loss(ctx: ReplicaContext, step: int = 0) -> np.ndarray:
    """Return a loss that falls; replica 2's falls fastest."""
    return np.array([1.0 / (1 + step * (2 if me(ctx) == 2 else 1))], np.float32)


@mismatch(Reason.REDUCE_OP, 3, peers=True)
async def clips_where_its_own_gradient_is_large(ctx: ReplicaContext) -> None:
    gradient = np.array([1.0 if me(ctx) < 3 else 9.0], np.float32)
    if gradient[0] > 5:
        await ctx.all_reduce(MAX, gradient)  # named
    await ctx.all_reduce(MEAN, gradient)  # named


@incomplete(Reason.EXITED, 2, peers=True)
async def returns_when_its_own_loss_is_small(ctx: ReplicaContext) -> str:
    for step in range(10):
        if own_loss(ctx, step)[0] < 0.2:
            return "converged"
        await ctx.all_reduce(MEAN, own_loss(ctx, step))  # named
    return "out of steps"


@mismatch(Reason.KIND, 0, peers=True)
async def only_the_first_replica_gathers(ctx: ReplicaContext) -> None:
    if me(ctx) == 0:
        await ctx.all_gather(own_loss(ctx), 0)  # named
    await ctx.barrier()  # named


@mismatch(Reason.CALL_SITE, 2, peers=True)
async def while_its_own_loss_is_large(ctx: ReplicaContext) -> None:
    step = 1
    while own_loss(ctx, step)[0] > 0.2:
        await ctx.all_reduce(MEAN, own_loss(ctx, step))  # named
        step += 1
    await ctx.all_reduce(MEAN, own_loss(ctx, step))  # named


@mismatch(Reason.REDUCE_OP, 1, peers=True)
async def op_chosen_on_one_line(ctx: ReplicaContext) -> None:
    op = MAX if odd(ctx) else SUM
    await ctx.all_reduce(op, own_loss(ctx))  # named


@mismatch(Reason.CALL_SITE, 3, peers=True)
async def match_on_its_own_batch(ctx: ReplicaContext) -> None:
    kind = "image" if me(ctx) == 3 else "text"
    match kind:
        case "text":
            await ctx.all_reduce(SUM, own_loss(ctx))  # named
        case _:
            await ctx.all_reduce(SUM, own_loss(ctx))  # named


@mismatch(Reason.KIND, 1, peers=True)
async def short_circuits(ctx: ReplicaContext) -> None:
    cached = odd(ctx)
    _ = cached or (await ctx.all_reduce(MAX, own_loss(ctx)))  # named
    await ctx.barrier()  # named


@mismatch(Reason.CALL_SITE, 0, peers=True)
async def logs_a_loss_on_the_first_replica(ctx: ReplicaContext) -> None:
    for step in range(4):
        await ctx.all_reduce(MEAN, own_loss(ctx, step))  # named
        if me(ctx) == 0 and step == 2:
            await ctx.all_reduce(MEAN, own_loss(ctx, step))  # named


@correct(peers=True)
async def decides_on_a_reduced_condition(ctx: ReplicaContext) -> None:
    for step in range(10):
        loss: np.ndarray = await ctx.all_reduce(MAX, own_loss(ctx, step))
        if loss[0] < 0.2:
            break
    await ctx.barrier()


@correct(peers=True)
async def branches_without_collectives(ctx: ReplicaContext) -> None:
    value = own_loss(ctx)
    if odd(ctx):
        value = value * 0
    await ctx.all_reduce(SUM, value)


@correct(peers=True)
async def branches_that_meet_by_name(ctx: ReplicaContext) -> None:
    if me(ctx) == 2:
        await ctx.all_reduce(SUM, own_loss(ctx), name="loss")
    else:
        await ctx.all_reduce(SUM, own_loss(ctx) * 2, name="loss")
    await ctx.barrier()
