"""Programs in which replicas part, one for each text under golden/. --update-golden writes the lines in them anew."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np

from aiodist import CommunicationOptions, ReduceOp, ReplicaContext


async def other_kind(ctx: ReplicaContext) -> None:
    for step in range(4):
        grads = {"w": np.zeros((64, 128), np.float32), "b": np.zeros(128, np.float32)}
        if step == 3:
            if ctx.replica_id_in_sync_group == 2:
                await ctx.barrier()
            await ctx.all_reduce(ReduceOp.SUM, grads)
        await ctx.all_reduce(ReduceOp.MEAN, np.zeros((), np.float32))


async def tie(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group % 2:
        await ctx.barrier()
    await ctx.all_reduce(ReduceOp.SUM, 1.0)


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


async def swapped_buckets(ctx: ReplicaContext) -> None:
    buckets = {"w": np.zeros((2, 3)), "b": np.zeros(3)}
    names = ["w", "b"] if ctx.replica_id_in_sync_group != 1 else ["b", "w"]
    for pending in issue_sums(ctx, buckets, names):
        await pending


async def skipped_in_a_round(ctx: ReplicaContext) -> None:
    for step in range(4):
        await ctx.all_reduce(ReduceOp.SUM, np.zeros(3))
        if step < 3 or ctx.replica_id_in_sync_group != 2:
            await ctx.all_reduce(ReduceOp.MAX, float(step))
        await ctx.barrier()


async def many_left_the_round(ctx: ReplicaContext) -> None:
    for step in range(4):
        await ctx.all_reduce(ReduceOp.SUM, np.zeros(3))
        if step == 3 and ctx.replica_id_in_sync_group != 0:
            await ctx.all_reduce(ReduceOp.SUM, np.ones(3))
        await ctx.barrier()


async def added_equal_signature(ctx: ReplicaContext) -> None:
    pending = []
    if ctx.replica_id_in_sync_group == 0:
        pending.append(ctx.all_reduce(ReduceOp.SUM, 1.0))
    pending.append(ctx.all_reduce(ReduceOp.SUM, 2.0))
    pending.append(ctx.all_reduce(ReduceOp.SUM, 3.0))
    for one in pending:
        await one


async def racing_tasks(ctx: ReplicaContext) -> None:
    async def losses() -> None:
        await ctx.all_reduce(ReduceOp.MEAN, 0.5)

    async def metrics() -> None:
        await ctx.all_reduce(ReduceOp.MAX, np.zeros(2))

    order = [losses, metrics] if ctx.replica_id_in_sync_group else [metrics, losses]
    async with anyio.create_task_group() as tasks:
        for task in order:
            tasks.start_soon(task)
            await anyio.lowlevel.checkpoint()


async def lock_across_a_collective(ctx: ReplicaContext) -> None:
    lock = await ctx.merge_call(lambda _: anyio.Lock())
    async with lock:
        await ctx.barrier()


async def group_made_elsewhere(ctx: ReplicaContext) -> None:
    first = ctx.new_group(range(3)) if ctx.replica_id_in_sync_group == 0 else None
    group = first or ctx.new_group(range(3))
    await group.barrier()


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


def issue_sums(ctx: ReplicaContext, buckets: dict[str, Any], names: list[str]) -> list[Any]:
    pending = []
    for name in names:  # not a comprehension: from Python 3.12 on that has no function of its own
        pending.append(ctx.all_reduce(ReduceOp.SUM, buckets[name]))  # noqa: PERF401
    return pending


async def group_of_one_that_makes_it(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 0:
        ctx.new_group([0, 1], "experts")


async def cycle_of_a_merge_call(ctx: ReplicaContext) -> None:
    group = ctx.new_group([1, 0]) if ctx.replica_id_in_sync_group < 2 else ctx
    if ctx.replica_id_in_sync_group == 0:
        await group.merge_call(print)
    await (ctx.join() if ctx.replica_id_in_sync_group == 2 else ctx.all_reduce("SUM", 1.0))


async def cycle_of_a_late_await(ctx: ReplicaContext) -> None:
    first, second = ctx.new_group(range(3), "first"), ctx.new_group(range(3), "second")
    handle = (first if ctx.replica_id_in_sync_group == 0 else second).barrier(name="x")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.lowlevel.checkpoint)
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    await handle
    await (second if ctx.replica_id_in_sync_group == 0 else first).barrier(name="x")


async def left_out_of_a_join(ctx: ReplicaContext) -> None:
    with anyio.CancelScope() as scope:
        if ctx.replica_id_in_sync_group == 0:
            scope.cancel()
            await ctx.join()
    while True:
        await anyio.lowlevel.checkpoint()


async def abandoned_for_good(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 1:
        with anyio.move_on_after(0.01):
            await in_a_helper(ctx)
    if ctx.replica_id_in_sync_group:
        await anyio.sleep_forever()
    await in_a_helper(ctx)


async def in_a_helper(context: ReplicaContext) -> None:
    await context.barrier()


async def held_up_by_an_earlier_one(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 2:
        await anyio.sleep_forever()
    first = ctx.all_reduce("SUM", 1)
    if ctx.replica_id_in_sync_group == 1:
        await first
    await ctx.all_reduce("SUM", 2, CommunicationOptions(timeout_seconds=0.25))


async def cycle_of_a_group_that_one_makes_late(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 0:
        await ctx.barrier()
    await ctx.new_group(range(3), "all").barrier()
    await ctx.barrier()
