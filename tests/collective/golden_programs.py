"""Programs in which replicas part, one for each text under golden/. Lines stand in those texts: add at the end."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np

from aiodist import ReduceOp, ReplicaContext


async def other_kind(ctx: ReplicaContext) -> None:
    for step in range(4):
        grads = {"w": np.zeros((64, 128), np.float32), "b": np.zeros(128, np.float32)}
        if step == 3:
            if ctx.replica_id_in_sync_group == 2:
                await ctx.barrier()
            await ctx.all_reduce(ReduceOp.SUM, grads)
        await ctx.all_reduce(ReduceOp.MEAN, np.zeros((), np.float32))


async def other_reduce_op(ctx: ReplicaContext) -> None:
    op = ReduceOp.MEAN if ctx.replica_id_in_sync_group == 0 else ReduceOp.SUM
    await ctx.all_reduce(op, np.zeros(3, np.float32))


async def other_axis(ctx: ReplicaContext) -> None:
    await ctx.all_gather(np.zeros((2, 2)), int(ctx.replica_id_in_sync_group == 1))


async def other_source(ctx: ReplicaContext) -> None:
    await ctx.broadcast(np.zeros(3), ctx.replica_id_in_sync_group)


async def other_key(ctx: ReplicaContext) -> None:
    name = "bias" if ctx.replica_id_in_sync_group == 1 else "weights"
    await ctx.all_reduce(ReduceOp.SUM, {"layer": [{name: np.zeros(3)}]})


async def other_shape(ctx: ReplicaContext) -> None:
    rows = 17 if ctx.replica_id_in_sync_group == 2 else 32
    await ctx.all_reduce(ReduceOp.SUM, {"x": np.zeros((rows, 8), np.float32), "y": np.zeros(8)})


async def other_dtype(ctx: ReplicaContext) -> None:
    scale = np.ones(8, np.float64 if ctx.replica_id_in_sync_group == 1 else np.float32)
    await ctx.all_reduce(ReduceOp.SUM, (np.zeros(3), [scale]))


async def other_array_type(ctx: ReplicaContext) -> None:
    loss = np.float32(0.5)
    await ctx.all_reduce(ReduceOp.SUM, {"loss": loss if ctx.replica_id_in_sync_group else np.array(loss)})


async def other_name(ctx: ReplicaContext) -> None:
    await ctx.barrier(name=f"epoch {ctx.replica_id_in_sync_group // 2}")


def merge_one(strategy: Any) -> None:
    pass


def merge_two(strategy: Any) -> None:
    pass


async def other_merge_function(ctx: ReplicaContext) -> None:
    await ctx.merge_call(merge_two if ctx.replica_id_in_sync_group == 1 else merge_one)


async def other_call_site(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 1:
        await ctx.all_reduce(ReduceOp.SUM, np.zeros(3))
        return
    await ctx.all_reduce(ReduceOp.SUM, np.zeros(3))


async def other_order(ctx: ReplicaContext) -> None:
    names = {"weights", "bias"}
    for name in sorted(names, reverse=ctx.replica_id_in_sync_group == 1):
        if name == "bias":
            await ctx.all_reduce(ReduceOp.SUM, np.zeros(3))
        else:
            await ctx.all_reduce(ReduceOp.SUM, np.zeros(3))


async def tie(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group % 2:
        await ctx.barrier()
    await ctx.all_reduce(ReduceOp.SUM, 1.0)


async def early_return(ctx: ReplicaContext) -> str:
    for step in range(5):
        loss = await ctx.all_reduce(ReduceOp.MEAN, float(step))
        if loss > 1 and ctx.replica_id_in_sync_group == 1:
            return "converged"
    return "finished"


async def uneven_loops(ctx: ReplicaContext) -> None:
    for _ in range(7 if ctx.replica_id_in_sync_group == 0 else 6):
        await ctx.all_reduce(ReduceOp.SUM, np.zeros(3))


async def abandoned(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 1:
        with anyio.move_on_after(0):
            await ctx.all_reduce(ReduceOp.SUM, 1)
        await ctx.barrier()
        return
    for _ in range(2):
        await anyio.lowlevel.checkpoint()
    await ctx.all_reduce(ReduceOp.SUM, 1)


async def stuck_elsewhere(ctx: ReplicaContext) -> None:
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == 2:
        await wait_for_data()
    await ctx.all_reduce(ReduceOp.SUM, 1)


async def wait_for_data() -> None:
    ready = anyio.Event()
    await ready.wait()


async def merge_hangs(ctx: ReplicaContext) -> None:
    await ctx.merge_call(merge_slowly)


async def merge_slowly(strategy: Any) -> None:
    await wait_for_data()


async def outlier_among_many(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 300:
        await ctx.barrier()
    await ctx.all_reduce(ReduceOp.SUM, np.zeros(128, np.float32))


async def all_different(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(ReduceOp.SUM, np.zeros(ctx.replica_id_in_sync_group))


async def many_left(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group % 3:
        await ctx.barrier()


async def parted_in_sequence(ctx: ReplicaContext) -> None:
    odd = ctx.replica_id_in_sync_group == 1
    if odd:
        await ctx.barrier()
    if not odd:
        await ctx.all_reduce(ReduceOp.SUM, 1)


async def group_disagrees(ctx: ReplicaContext) -> None:
    experts = ctx.new_group([2, 0, 1], name="experts")
    for step in range(3):
        odd = ctx.replica_id_in_sync_group == 1 and step == 2
        await experts.all_reduce("MAX" if odd else "SUM", 1.0)


async def group_is_left(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group:
        pair = ctx.new_group([1, 2])
        for _ in range(ctx.replica_id_in_sync_group):
            await pair.barrier()


async def group_made_elsewhere(ctx: ReplicaContext) -> None:
    first = ctx.new_group(range(3)) if ctx.replica_id_in_sync_group == 0 else None
    group = first or ctx.new_group(range(3))
    await group.barrier()


async def groups_crossed(ctx: ReplicaContext) -> None:
    pairs = [pair for pair in ((0, 1), (1, 2), (0, 2)) if ctx.replica_id_in_sync_group in pair]
    groups = [ctx.new_group(pair, name=f"edge {pair[0]}-{pair[1]}") for pair in pairs]
    for group in reversed(groups) if ctx.replica_id_in_sync_group == 0 else groups:
        await group.all_reduce(ReduceOp.SUM, 1)


async def one_never_joins(ctx: ReplicaContext) -> None:
    for _ in range(2 + ctx.replica_id_in_sync_group):
        await ctx.all_reduce(ReduceOp.SUM, 1)
    if ctx.replica_id_in_sync_group != 2:
        await ctx.join()


async def parted_while_one_has_joined(ctx: ReplicaContext) -> None:
    await ctx.barrier()
    if ctx.replica_id_in_sync_group == 0:
        await ctx.join()
    await ctx.all_reduce("SUM" if ctx.replica_id_in_sync_group == 1 else "MEAN", 1)
