"""Exceptions: raised, swallowed, and what `finally` does after them."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from aiodist import CollectiveError, Reason, ReplicaContext
from tests.faults.case import LOSS, SUM, correct, incomplete, me, mismatch, odd, raises


def parse(ctx: ReplicaContext, bad: int) -> np.ndarray:
    """Return a batch; that replica's is broken."""
    if me(ctx) == bad:
        raise ValueError("broken batch")
    return LOSS


@raises(ValueError, peers=True)
async def one_replica_raises(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(SUM, parse(ctx, 1))


@mismatch(Reason.KIND, 1, peers=True)
async def swallows_its_own_exception(ctx: ReplicaContext) -> None:
    with suppress(ValueError):
        await ctx.all_reduce(SUM, parse(ctx, 1))  # named
    await ctx.barrier()  # named


@mismatch(Reason.CALL_SITE, 2, peers=True)
async def handler_reduces_elsewhere(ctx: ReplicaContext) -> None:
    try:
        await ctx.all_reduce(SUM, parse(ctx, 2))  # named
    except ValueError:
        await ctx.all_reduce(SUM, np.zeros_like(LOSS))  # named


@incomplete(Reason.EXITED, 3)
async def swallows_the_collective_error(ctx: ReplicaContext) -> None:
    if me(ctx) == 3:
        return
    with suppress(CollectiveError):
        await ctx.all_reduce(SUM, LOSS)  # named


@mismatch(Reason.KIND, 0, peers=True)
async def barrier_in_finally(ctx: ReplicaContext) -> None:
    try:
        await ctx.all_reduce(SUM, parse(ctx, 0))  # named
    finally:
        await ctx.barrier()  # named


@raises(ExceptionGroup)
async def replicas_fail_in_two_ways(ctx: ReplicaContext) -> None:
    try:
        await ctx.barrier()
        if odd(ctx):
            raise ValueError("broken batch")
        await ctx.barrier()
    finally:
        if me(ctx) != 1:
            raise KeyError("while cleaning up")


@correct(peers=True)
async def exception_kept_within_the_replica(ctx: ReplicaContext) -> None:
    try:
        batch = parse(ctx, 1)
    except ValueError:
        batch = np.zeros_like(LOSS)
    await ctx.all_reduce(SUM, batch)


@correct(peers=True)
async def finally_without_an_exception(ctx: ReplicaContext) -> None:
    try:
        await ctx.all_reduce(SUM, LOSS)
    finally:
        await ctx.barrier()
