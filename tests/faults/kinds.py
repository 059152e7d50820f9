"""Small faults of many kinds, on few and many replicas; replica 1 is the odd one, where there is one.

With each stands what the report says of its cause, and what it must not advise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import numpy as np

from aiodist import Reason, ReplicaContext
from tests.faults import trainer
from tests.faults.case import (
    LOSS,
    MAX,
    MEAN,
    SUM,
    correct,
    cycle,
    deadlock,
    everyone,
    incomplete,
    me,
    mismatch,
    odd,
    raises,
)
from tests.faults.trainer import Trainer

SIZES = (2, 5)


# Groups.


@asynccontextmanager
async def replica_0_comes_late(ctx: ReplicaContext, over: Any) -> AsyncIterator[None]:
    """Let the others wait for replica 0 until one has given up; then they are to meet."""
    if me(ctx) == 0:
        await over.wait()
    yield
    over.set()
    await ctx.barrier()


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


@cycle(1, sizes=SIZES, says="context")
async def context_of_the_group_instead_of_the_run(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx), name="experts")
    await (group if odd(ctx) else ctx).all_reduce(SUM, LOSS)  # named


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


@correct(sizes=SIZES)
async def groups_that_others_do_not_make(ctx: ReplicaContext) -> None:
    if me(ctx) < 2:
        await ctx.new_group([0, 1], name="pair").all_reduce(SUM, LOSS)
    await ctx.all_reduce(SUM, LOSS)


# Helpers in another file, trainers.


@mismatch(Reason.CALL_SITE, 1, sizes=SIZES, says="in the opposite order")
async def swapped_through_a_helper_of_another_file(ctx: ReplicaContext) -> None:
    for name in ("loss", "norm") if odd(ctx) else ("norm", "loss"):
        if name == "loss":
            await trainer.average(ctx, LOSS)  # named
        else:
            await trainer.average(ctx, LOSS * 2)  # named


@mismatch(Reason.KIND, 1, sizes=SIZES, says="after_epoch")
async def saves_after_an_epoch(ctx: ReplicaContext) -> None:
    async def save(epoch: int) -> None:
        if odd(ctx) and epoch == 1:
            await ctx.barrier()  # named

    await Trainer(ctx).fit(3, after_epoch=save)


@mismatch(Reason.KIND, 1, sizes=SIZES, says="left the loop")
async def skips_a_step_of_the_trainer(ctx: ReplicaContext) -> None:
    async def bad(step: int) -> bool:
        return odd(ctx) and step == 1

    await Trainer(ctx).fit(1, before_step=bad)


@incomplete(Reason.EXITED, 1, sizes=SIZES, says="trainer.py:36", never="drop the remainder")
async def raises_out_of_the_trainer_and_returns(ctx: ReplicaContext) -> None:
    async def stop(step: int) -> bool:
        if odd(ctx) and step == 1:
            raise StopAsyncIteration
        return False

    with suppress(StopAsyncIteration):
        await Trainer(ctx).fit(2, before_step=stop)


@mismatch(Reason.REDUCE_OP, 1, sizes=SIZES)
async def another_helper(ctx: ReplicaContext) -> None:
    if odd(ctx):
        await trainer.sum_and_max(ctx, LOSS)  # named
    else:
        await trainer.average(ctx, LOSS)  # named


@mismatch(Reason.CALL_SITE, 1, sizes=SIZES)
async def swapped_through_a_helper_of_two_collectives(ctx: ReplicaContext) -> None:
    for step in (1, 0) if odd(ctx) else (0, 1):
        if step:
            await trainer.sum_and_max(ctx, LOSS)  # named
        else:
            await trainer.sum_and_max(ctx, LOSS * 2)  # named


@mismatch(Reason.KIND, 1, sizes=SIZES)
async def early_out_of_a_helper(ctx: ReplicaContext) -> None:
    values = [LOSS] * (1 if odd(ctx) else 2)
    await trainer.average_all(ctx, values)
    await ctx.barrier()  # named


@mismatch(Reason.CALL_SITE, 1, sizes=SIZES)
async def deeper_recursion(ctx: ReplicaContext) -> None:
    await trainer.spread(ctx, 3 if odd(ctx) else 2)
    await ctx.all_reduce(SUM, LOSS)  # named


@mismatch(Reason.SHAPE, 1, sizes=SIZES)
async def another_shape_through_a_decorated_function(ctx: ReplicaContext) -> None:
    @trainer.logged
    async def reduce(size: int) -> None:
        await ctx.all_reduce(SUM, np.zeros(size))  # named

    await reduce(2 if odd(ctx) else 3)


@mismatch(Reason.KIND, 1, sizes=SIZES)
async def leaves_a_fence(ctx: ReplicaContext) -> None:
    async with trainer.fenced(ctx):
        if not odd(ctx):
            await ctx.all_reduce(SUM, LOSS)  # named


@mismatch(Reason.KIND, 1, sizes=SIZES, anyio=False)
async def fewer_batches_of_a_generator(ctx: ReplicaContext) -> None:
    async for batch in trainer.batches(2 if odd(ctx) else 3):
        await ctx.all_reduce(SUM, batch)  # named
    await ctx.barrier()  # named


@correct(sizes=SIZES)
async def trainer_with_hooks(ctx: ReplicaContext) -> None:
    async def save(epoch: int) -> None:
        await ctx.all_gather(LOSS, 0)

    await Trainer(ctx).fit(3, after_epoch=save)


@correct(sizes=SIZES)
async def helper_of_two_callers_in_turn(ctx: ReplicaContext) -> None:
    for step in range(4):
        if step % 2:
            await trainer.sum_and_max(ctx, LOSS)
        else:
            await trainer.sum_and_max(ctx, LOSS * 2)


@correct(sizes=SIZES)
async def recursion_of_one_depth(ctx: ReplicaContext) -> None:
    await trainer.spread(ctx, 3)
    async with trainer.fenced(ctx):
        await trainer.average_all(ctx, [LOSS, LOSS])


# How replicas part in loops and under conditions.


@incomplete(Reason.EXITED, 1, sizes=SIZES, says="continue")
async def continues_under_a_condition(ctx: ReplicaContext) -> None:
    for step in range(4):
        if odd(ctx) and step == 2:
            continue
        await ctx.all_reduce(MEAN, LOSS)  # named
        await ctx.barrier()  # named


@mismatch(Reason.KIND, 0, sizes=SIZES, says="eplica 0 ma", never="left the loop")
async def first_replica_saves_after_an_epoch(ctx: ReplicaContext) -> None:
    for _ in range(3):
        for _ in range(2):
            await ctx.all_reduce(MEAN, LOSS)  # named
        if me(ctx) == 0:
            await ctx.barrier()  # named


@mismatch(Reason.KIND, 1, sizes=SIZES, says="left the loop")
async def stops_early_by_its_own_loss(ctx: ReplicaContext) -> None:
    for step in range(5):
        if odd(ctx) and step == 3:
            break
        await ctx.all_reduce(MEAN, LOSS)  # named
    await ctx.barrier()  # named


@mismatch(Reason.CALL_SITE, 1, sizes=SIZES)
async def another_arm_of_a_chain(ctx: ReplicaContext) -> None:
    kind = "a" if odd(ctx) else "c"
    if kind == "a":
        await ctx.all_reduce(SUM, LOSS)  # named
    elif kind == "b":
        await ctx.barrier()
    else:
        await ctx.all_reduce(SUM, LOSS)  # named


@mismatch(Reason.KIND, 1, sizes=SIZES)
async def one_line_of_two_calls(ctx: ReplicaContext) -> None:
    await (ctx.barrier() if odd(ctx) else ctx.all_reduce(SUM, LOSS))  # named


@incomplete(Reason.EXITED, 1, sizes=SIZES)
async def returns_inside_two_loops(ctx: ReplicaContext) -> None:
    for epoch in range(2):
        for step in range(3):
            if odd(ctx) and (epoch, step) == (1, 1):
                return  # named
            await ctx.all_reduce(MEAN, LOSS)  # named


@correct(sizes=SIZES, anyio=False)
async def each_goes_through_its_own_branch_to_one_call(ctx: ReplicaContext) -> None:
    for step in range(3):
        value = LOSS * step if odd(ctx) else LOSS
        if odd(ctx) and step == 1:
            await asyncio.sleep(0)
        await ctx.all_reduce(MEAN, value)


@correct(sizes=SIZES)
async def leaves_a_loop_together(ctx: ReplicaContext) -> None:
    for step in range(9):
        if await ctx.all_reduce(MAX, float(odd(ctx) and step == 2)):
            break
    await ctx.barrier()


# Exceptions and cancellation.


async def fail() -> None:
    raise ValueError("broken batch")  # raised


@incomplete(Reason.ABANDONED, 1, sizes=SIZES, anyio=False, says="ValueError", shared=asyncio.Event)
async def sibling_task_fails(ctx: ReplicaContext, over: asyncio.Event) -> None:
    async with replica_0_comes_late(ctx, over):

        async def reduce() -> None:
            await ctx.all_reduce(SUM, LOSS)  # named

        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(reduce())
                if odd(ctx):
                    await asyncio.sleep(0.01)
                    tasks.create_task(fail())


@incomplete(Reason.ABANDONED, 1, sizes=SIZES, anyio=False, says="wait_for", shared=asyncio.Event)
async def wait_for_one_collective(ctx: ReplicaContext, over: asyncio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        with suppress(TimeoutError):
            await asyncio.wait_for(ctx.all_reduce(SUM, LOSS), 0.05 if odd(ctx) else 60)  # named


@incomplete(Reason.ABANDONED, 1, sizes=SIZES, anyio=False, says="asyncio.timeout(", shared=asyncio.Event)
async def timeout_around_a_helper(ctx: ReplicaContext, over: asyncio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05 if odd(ctx) else 60):
                await trainer.average(ctx, LOSS)


@incomplete(Reason.ABANDONED, 1, sizes=SIZES, anyio=False, says="was cancelled out of", shared=asyncio.Event)
async def task_cancelled_by_its_own_replica(ctx: ReplicaContext, over: asyncio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        task = asyncio.create_task(trainer.average(ctx, LOSS))
        if odd(ctx):
            await asyncio.sleep(0.01)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@incomplete(Reason.ABANDONED, 1, sizes=SIZES, says="its sibling", shared=anyio.Event)
async def sibling_fails_in_a_task_group_of_anyio(ctx: ReplicaContext, over: anyio.Event) -> None:
    async with replica_0_comes_late(ctx, over):
        with suppress(ExceptionGroup):
            async with anyio.create_task_group() as tasks:
                if odd(ctx):
                    tasks.start_soon(fail)
                await ctx.all_reduce(SUM, LOSS)  # named


@incomplete(Reason.ABANDONED, 1, sizes=SIZES, says="cancelled its scope", shared=anyio.Event)
async def scope_cancelled_by_a_sibling(ctx: ReplicaContext, over: anyio.Event) -> None:
    async with replica_0_comes_late(ctx, over), anyio.create_task_group() as tasks:
        if odd(ctx):
            tasks.start_soon(lambda: _cancel(tasks))
        await ctx.all_reduce(SUM, LOSS)  # named


async def _cancel(tasks: Any) -> None:
    tasks.cancel_scope.cancel()


@incomplete(Reason.ABANDONED, 1, sizes=SIZES, anyio=False, never="time limit around")
async def one_is_late_and_the_others_time_out(ctx: ReplicaContext) -> None:
    if odd(ctx):
        await asyncio.sleep(9)  # named
    with suppress(TimeoutError):
        await asyncio.wait_for(ctx.all_reduce(SUM, LOSS), 0.1)  # named
    await ctx.barrier()


@incomplete(Reason.ABANDONED, 1, sizes=SIZES, anyio=False, shared=asyncio.Event)
async def times_out_and_returns(ctx: ReplicaContext, over: asyncio.Event) -> None:
    if me(ctx) == 0:
        await over.wait()
    try:
        async with asyncio.timeout(0.05 if odd(ctx) else 60):
            await ctx.all_reduce(SUM, LOSS)  # named
    except TimeoutError:
        over.set()
        return


@mismatch(Reason.KIND, 1, sizes=SIZES, never="drop the remainder")
async def leaves_the_loop_by_an_exception(ctx: ReplicaContext) -> None:
    with suppress(ValueError):
        for step in range(3):
            if odd(ctx) and step == 1:
                await fail()
            await ctx.all_reduce(MEAN, LOSS)  # named
    await ctx.barrier()  # named


@incomplete(Reason.EXITED, 1, sizes=SIZES, never="drop the remainder")
async def swallows_and_returns(ctx: ReplicaContext) -> None:
    for step in range(3):
        try:
            if odd(ctx) and step == 1:
                await fail()
        except ValueError:
            return  # named
        await ctx.all_reduce(MEAN, LOSS)  # named


@raises(ValueError, sizes=SIZES)
async def fails_while_the_others_wait(ctx: ReplicaContext) -> None:
    await ctx.barrier()
    if odd(ctx):
        await fail()
    await ctx.all_reduce(SUM, LOSS)


@correct(sizes=SIZES, anyio=False)
async def sibling_fails_before_the_collective(ctx: ReplicaContext) -> None:
    with suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail() if odd(ctx) else asyncio.sleep(0))
    await ctx.all_reduce(SUM, LOSS)


@correct(sizes=SIZES, anyio=False)
async def cancelled_after_it_was_complete(ctx: ReplicaContext) -> None:
    task = asyncio.create_task(trainer.average(ctx, LOSS))
    await ctx.barrier()
    await task
    task.cancel()
    await ctx.barrier()


@correct(sizes=SIZES, anyio=False)
async def timeout_around_the_work_between(ctx: ReplicaContext) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.01 if odd(ctx) else None):
            await asyncio.sleep(0.02)
    await ctx.all_reduce(SUM, LOSS)


# Merges.


@mismatch(Reason.MERGE_FN, 1, sizes=SIZES)
async def merges_by_another_lambda(ctx: ReplicaContext) -> None:
    if odd(ctx):
        await ctx.merge_call(lambda strategy: None)  # named
    else:
        await ctx.merge_call(lambda strategy: 1)  # named


def _merge(strategy: Any, *args: Any, **more: Any) -> None:
    """Do nothing."""


@mismatch(Reason.STRUCTURE, 1, sizes=SIZES, says="positional")
async def merges_with_an_argument_less(ctx: ReplicaContext) -> None:
    await ctx.merge_call(_merge, args=(1.0,) if odd(ctx) else (1.0, 2.0))  # named


@mismatch(Reason.STRUCTURE, 1, sizes=SIZES, says="scale")
async def merges_with_a_keyword_less(ctx: ReplicaContext) -> None:
    await ctx.merge_call(_merge, kwargs={} if odd(ctx) else {"scale": 1.0})  # named


@mismatch(Reason.KIND, 1, sizes=SIZES)
async def reduces_instead_of_merging(ctx: ReplicaContext) -> None:
    if odd(ctx):
        await ctx.all_reduce(SUM, LOSS)  # named
    else:
        await ctx.merge_call(_merge, args=(LOSS,))  # named


@deadlock(*range(3), sizes=(3,))
async def merge_that_never_returns(ctx: ReplicaContext) -> None:
    async def hang(strategy: Any) -> None:
        await asyncio.Event().wait()  # named

    await ctx.merge_call(hang)


@raises(ValueError, sizes=SIZES)
async def merge_that_raises(ctx: ReplicaContext) -> None:
    async def merge(strategy: Any) -> None:
        await fail()

    await ctx.merge_call(merge)


@correct(sizes=SIZES)
async def merges_with_other_values(ctx: ReplicaContext) -> None:
    await ctx.merge_call(_merge, args=(LOSS * me(ctx),), kwargs={"scale": me(ctx)})


# Races and locks.


@correct(sizes=(2, 4), anyio=False)
async def children_one_after_the_other(ctx: ReplicaContext) -> None:
    for _ in range(2):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(trainer.average(ctx, LOSS))
        await trainer.average(ctx, LOSS)
