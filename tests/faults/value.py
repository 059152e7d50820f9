"""The same call with other arguments: shapes, dtypes, structures, axes, sources, merge functions, names."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiodist import Reason, ReplicaContext, ReplicaContextError
from tests.faults.case import EVERYONE, MEAN, SUM, correct, me, mismatch, odd, raises


@mismatch(Reason.SHAPE, 1, peers=True)
async def last_smaller_batch(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(MEAN, np.zeros(5 if odd(ctx) else 8, np.float32))  # named


@mismatch(Reason.DTYPE, 1, peers=True)
async def float64_by_default(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(MEAN, np.zeros(8) if odd(ctx) else np.zeros(8, np.float32))  # named


@mismatch(Reason.STRUCTURE, 1)
async def gradient_is_none(ctx: ReplicaContext) -> None:
    bias = None if odd(ctx) else np.zeros(2)
    await ctx.all_reduce(SUM, {"bias": bias, "weight": np.zeros(3)})  # named


@mismatch(Reason.SHAPE, 1)
async def shape_inside_a_nest(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(SUM, {"layers": [np.zeros(3), np.zeros(4 if odd(ctx) else 5)]})  # named


@mismatch(Reason.SOURCE, *EVERYONE, peers=True)
async def source_is_its_own_id(ctx: ReplicaContext) -> None:
    await ctx.broadcast(np.zeros(3), me(ctx))  # named


@mismatch(Reason.AXIS, 1)
async def another_axis(ctx: ReplicaContext) -> None:
    await ctx.all_gather(np.zeros((2, 2)), 1 if odd(ctx) else 0)  # named


@mismatch(Reason.DEVICE, 1)
async def number_among_arrays(ctx: ReplicaContext) -> None:
    loss = np.float64(0.5)
    await ctx.all_reduce(SUM, np.array(loss) if odd(ctx) else loss)  # named


@mismatch(Reason.NAME, 1)
async def another_name(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(SUM, np.zeros(3), name="weight" if odd(ctx) else "bias")  # named


@mismatch(Reason.MERGE_FN, 1)
async def another_merge_function(ctx: ReplicaContext) -> None:
    def log(strategy: Any) -> None:
        """Do nothing."""

    def save(strategy: Any) -> None:
        """Do nothing, elsewhere."""

    await ctx.merge_call(save if odd(ctx) else log)  # named


@raises(ReplicaContextError)
async def collective_in_a_merge_function(ctx: ReplicaContext) -> None:
    def merge(strategy: Any) -> None:
        ctx.all_reduce(SUM, 1.0)

    await ctx.merge_call(merge)


@raises(TypeError)
async def bad_argument_on_one_replica(ctx: ReplicaContext) -> None:
    value: Any = "three" if odd(ctx) else np.zeros(3)
    await ctx.all_reduce(SUM, value)


@correct(peers=True)
async def equal_shapes_by_other_ways(ctx: ReplicaContext) -> None:
    value = np.zeros((2, 3), np.float32).T if odd(ctx) else np.zeros((3, 2), np.float32)
    await ctx.all_reduce(SUM, value)


@correct()
async def keys_inserted_in_another_order(ctx: ReplicaContext) -> None:
    items = [("bias", np.zeros(2)), ("weight", np.zeros(3))]
    await ctx.all_reduce(SUM, dict(items[::-1] if odd(ctx) else items))


@correct()
async def ragged_gather(ctx: ReplicaContext) -> None:
    whole: np.ndarray = await ctx.all_gather(np.zeros(me(ctx)), 0)
    assert whole.shape == (6,)


@correct()
async def axis_counted_from_the_end(ctx: ReplicaContext) -> None:
    await ctx.all_gather(np.zeros((2, 2)), -1 if odd(ctx) else 1)


@correct()
async def merge_function_that_captures(ctx: ReplicaContext) -> None:
    def log(strategy: Any, loss: Any) -> int:
        return ctx.num_replicas_in_sync

    assert await ctx.merge_call(log, args=(float(me(ctx)),)) == 4
