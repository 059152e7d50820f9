"""The order of sets and dicts decides the order of calls."""

from __future__ import annotations

import numpy as np

from aiodist import Reason, ReplicaContext
from tests.faults.case import SUM, correct, mismatch, odd

SHAPES = {"bias": 2, "scale": 3, "weight": 4}


def order_of(ctx: ReplicaContext) -> list[str]:
    """Return the keys as a set of strings gives them in processes whose hashes differ."""
    names = list(SHAPES)
    return names[1:] + names[:1] if odd(ctx) else names


@mismatch(Reason.SHAPE, 1, peers=True)
async def iterates_over_a_set(ctx: ReplicaContext) -> None:
    for name in order_of(ctx):
        await ctx.all_reduce(SUM, np.zeros(SHAPES[name]))  # named


@mismatch(Reason.NAME, 1)
async def iterates_over_a_set_of_equal_shapes(ctx: ReplicaContext) -> None:
    for name in order_of(ctx):
        await ctx.all_reduce(SUM, np.zeros(2), name=name)  # named


@mismatch(Reason.SHAPE, 1, peers=True)
async def gradients_in_order_of_arrival(ctx: ReplicaContext) -> None:
    gradients = {name: np.zeros(SHAPES[name]) for name in order_of(ctx)}
    pending = [ctx.all_reduce(SUM, gradient) for gradient in gradients.values()]  # named
    for handle in pending:
        await handle


@correct(peers=True)
async def iterates_over_sorted_names(ctx: ReplicaContext) -> None:
    for name in sorted(order_of(ctx)):
        await ctx.all_reduce(SUM, np.zeros(SHAPES[name]))


@correct()
async def reduces_one_dict(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(SUM, {name: np.zeros(SHAPES[name]) for name in order_of(ctx)})
