"""Loops of unequal length."""

from __future__ import annotations

import numpy as np

from aiodist import Reason, ReduceOp, ReplicaContext
from tests.faults.case import correct, incomplete, mismatch

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
BATCH = np.array([1.0, 2.0], np.float32)


@incomplete(Reason.EXITED, 1, peers=True)
async def one_loop_is_shorter(ctx: ReplicaContext) -> None:
    for _ in range(6 if ctx.replica_id_in_sync_group == 1 else 7):
        await ctx.all_reduce(SUM, BATCH)  # named


@incomplete(Reason.EXITED, 3, peers=True)
async def one_loop_is_longer(ctx: ReplicaContext) -> None:
    for _ in range(5 if ctx.replica_id_in_sync_group == 3 else 4):
        await ctx.all_reduce(SUM, BATCH)  # named


@mismatch(Reason.CALL_SITE, 0, peers=True)
async def batches_missing_in_every_epoch(ctx: ReplicaContext) -> None:
    for _ in range(3):
        for _ in range(2 if ctx.replica_id_in_sync_group == 0 else 3):
            await ctx.all_reduce(MEAN, BATCH)  # named
        await ctx.all_reduce(MEAN, BATCH)  # named


@incomplete(Reason.EXITED, 2, peers=True)
async def breaks_at_an_empty_batch(ctx: ReplicaContext) -> None:
    for step in range(5):
        batch = BATCH[:0] if (ctx.replica_id_in_sync_group, step) == (2, 4) else BATCH
        if not batch.size:
            break
        await ctx.all_reduce(MEAN, batch)  # named


@mismatch(Reason.KIND, 3, peers=True)
async def continues_past_a_bad_batch(ctx: ReplicaContext) -> None:
    for step in range(4):
        if (ctx.replica_id_in_sync_group, step) == (3, 1):
            continue
        await ctx.all_reduce(MEAN, BATCH)  # named
    await ctx.barrier()  # named


@correct(peers=True)
async def loops_of_the_agreed_length(ctx: ReplicaContext) -> None:
    own = 5 + ctx.replica_id_in_sync_group
    steps: int = await ctx.all_reduce("min", own)
    for _ in range(steps):
        await ctx.all_reduce(SUM, BATCH)


@correct(peers=True)
async def stops_when_all_have_run_out(ctx: ReplicaContext) -> None:
    left = 3 + ctx.replica_id_in_sync_group
    while await ctx.all_reduce("max", left):
        await ctx.all_reduce(SUM, BATCH if left else np.zeros_like(BATCH))
        left = max(left - 1, 0)


@incomplete(Reason.EXITED, 0)
async def one_does_not_join(ctx: ReplicaContext) -> None:
    for _ in range(2 + ctx.replica_id_in_sync_group):
        await ctx.all_reduce(SUM, BATCH)  # named
    if ctx.replica_id_in_sync_group:
        await ctx.join()


@correct()
async def joins_when_it_has_run_out(ctx: ReplicaContext) -> None:
    for step in range(2 + ctx.replica_id_in_sync_group):
        mean: np.ndarray = await ctx.all_reduce(MEAN, BATCH * step)
        assert mean.tolist() == (BATCH * step).tolist()
    assert await ctx.join() == 3
