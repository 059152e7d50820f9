"""Loops of unequal length."""

from __future__ import annotations

import numpy as np

from aiodist import Reason, ReplicaContext
from tests.faults.case import LOSS, MEAN, SUM, correct, incomplete, me, mismatch, odd


@incomplete(Reason.EXITED, 1, peers=True)
async def one_loop_is_shorter(ctx: ReplicaContext) -> None:
    for _ in range(6 if odd(ctx) else 7):
        await ctx.all_reduce(SUM, LOSS)  # named


@incomplete(Reason.EXITED, 3, peers=True)
async def one_loop_is_longer(ctx: ReplicaContext) -> None:
    for _ in range(5 if me(ctx) == 3 else 4):
        await ctx.all_reduce(SUM, LOSS)  # named


@mismatch(Reason.CALL_SITE, 0, peers=True)
async def batches_missing_in_every_epoch(ctx: ReplicaContext) -> None:
    for _ in range(3):
        for _ in range(2 if me(ctx) == 0 else 3):
            await ctx.all_reduce(MEAN, LOSS)  # named
        await ctx.all_reduce(MEAN, LOSS)  # named


@incomplete(Reason.EXITED, 2, peers=True)
async def breaks_at_an_empty_batch(ctx: ReplicaContext) -> None:
    for step in range(5):
        batch = LOSS[:0] if (me(ctx), step) == (2, 4) else LOSS
        if not batch.size:
            break
        await ctx.all_reduce(MEAN, batch)  # named


@mismatch(Reason.KIND, 3, peers=True)
async def continues_past_a_bad_batch(ctx: ReplicaContext) -> None:
    for step in range(4):
        if (me(ctx), step) == (3, 1):
            continue
        await ctx.all_reduce(MEAN, LOSS)  # named
    await ctx.barrier()  # named


@correct(peers=True)
async def loops_of_the_agreed_length(ctx: ReplicaContext) -> None:
    own = 5 + me(ctx)
    steps: int = await ctx.all_reduce("min", own)
    for _ in range(steps):
        await ctx.all_reduce(SUM, LOSS)


@correct(peers=True)
async def stops_when_all_have_run_out(ctx: ReplicaContext) -> None:
    left = 3 + me(ctx)
    while await ctx.all_reduce("max", left):
        await ctx.all_reduce(SUM, LOSS if left else np.zeros_like(LOSS))
        left = max(left - 1, 0)


@incomplete(Reason.EXITED, 0)
async def one_does_not_join(ctx: ReplicaContext) -> None:
    for _ in range(2 + me(ctx)):
        await ctx.all_reduce(SUM, LOSS)  # named
    if me(ctx):
        await ctx.join()


@correct()
async def joins_when_it_has_run_out(ctx: ReplicaContext) -> None:
    for step in range(2 + me(ctx)):
        mean: np.ndarray = await ctx.all_reduce(MEAN, LOSS * step)
        assert mean.tolist() == (LOSS * step).tolist()
    assert await ctx.join() == 3
