"""Calls in another order, with other arguments, under conditions, in loops, through helpers and in groups."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from aiodist import Reason, ReplicaContext, ReplicaContextError
from tests.faults import trainer
from tests.faults.case import (
    EVERYONE,
    GRADIENT,
    LOSS,
    SIZES,
    correct,
    cycle,
    deadlock,
    everyone,
    fail,
    family,
    incomplete,
    me,
    mismatch,
    odd,
    raises,
)
from tests.faults.trainer import Trainer

family("order")  # Calls swapped, skipped, added.


@mismatch(Reason.CALL_SITE, *EVERYONE, peers=True, name="swapped_by_one_half", given={"some": (0, 1)})
@mismatch(Reason.CALL_SITE, 2, peers=True, name="swapped_sums_of_equal_shape", given={"some": (2,)})
async def swapped(ctx: ReplicaContext, some: tuple[int, ...]) -> None:
    if me(ctx) in some:
        await ctx.all_reduce("SUM", GRADIENT)  # named
        await ctx.all_reduce("SUM", LOSS)
    else:
        await ctx.all_reduce("SUM", LOSS)  # named
        await ctx.all_reduce("SUM", GRADIENT)


@mismatch(Reason.KIND, 1, peers=True)
async def swapped_kinds(ctx: ReplicaContext) -> None:
    if odd(ctx):
        await ctx.barrier()  # named
        await ctx.all_reduce("SUM", LOSS)
    else:
        await ctx.all_reduce("SUM", LOSS)  # named
        await ctx.barrier()


@mismatch(Reason.CALL_SITE, 3, peers=True)
async def skipped_one_of_three(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("SUM", LOSS)
    if me(ctx) != 3:
        await ctx.all_reduce("SUM", GRADIENT)  # named
    await ctx.all_reduce("SUM", LOSS)  # named


@mismatch(Reason.CALL_SITE, 0, peers=True)
async def added_one_before(ctx: ReplicaContext) -> None:
    if me(ctx) == 0:
        await ctx.all_reduce("SUM", LOSS)  # named
    await ctx.all_reduce("SUM", LOSS)  # named
    await ctx.all_reduce("SUM", GRADIENT)


@incomplete(Reason.EXITED, 1, peers=True, name="added_one_after", given={"some": (1,)})
@incomplete(Reason.EXITED, 0, peers=True, name="skipped_the_last", given={"some": (1, 2, 3)})
async def some_make_one_more(ctx: ReplicaContext, some: tuple[int, ...]) -> None:
    await ctx.all_reduce("SUM", LOSS)
    if me(ctx) in some:
        await ctx.all_reduce("SUM", LOSS)  # named


@mismatch(Reason.CALL_SITE, 2, peers=True, never="left the loop")
async def repeated_by_a_retry(ctx: ReplicaContext) -> None:
    for _ in range(2 if me(ctx) == 2 else 1):
        await ctx.all_reduce("SUM", LOSS)  # named
    await ctx.all_reduce("SUM", GRADIENT)  # named


@mismatch(Reason.CALL_SITE, 1, peers=True)
async def swapped_in_the_pending_list(ctx: ReplicaContext) -> None:
    if odd(ctx):
        pending = [ctx.all_reduce("SUM", GRADIENT), ctx.all_reduce("SUM", LOSS)]  # named
    else:
        pending = [
            ctx.all_reduce("SUM", LOSS),  # named
            ctx.all_reduce("SUM", GRADIENT),
        ]
    for handle in pending:
        await handle


@correct(peers=True)
async def awaited_in_another_order_than_issued(ctx: ReplicaContext) -> None:
    loss, gradient = ctx.all_reduce("SUM", LOSS), ctx.all_reduce("SUM", GRADIENT)
    first, second = (gradient, loss) if me(ctx) % 2 else (loss, gradient)
    await first
    await second
    total: np.ndarray = await loss
    assert total.tolist() == [4.0, 8.0]


family("value")  # The same call with other arguments: shapes, dtypes, axes, sources, merge functions.

GRADIENTS = {"bias": np.zeros(2), "weight": np.zeros(3)}


@correct(name="keys_inserted_in_another_order", given={"own": dict([*GRADIENTS.items()][::-1]), "usual": GRADIENTS})
@correct(peers=True, name="equal_shapes_by_other_ways", given={"own": np.zeros((2, 3)).T, "usual": np.zeros((3, 2))})
@mismatch(Reason.STRUCTURE, 1, name="gradient_is_none", given={"own": GRADIENTS | {"bias": None}, "usual": GRADIENTS})
@mismatch(Reason.DTYPE, 1, peers=True, name="float64_by_default", given={"own": np.zeros(2), "usual": LOSS})
@mismatch(Reason.SHAPE, 1, peers=True, name="last_smaller_batch", given={"own": LOSS[:1], "usual": LOSS})
async def one_reduces_another_value(ctx: ReplicaContext, own: Any, usual: Any) -> None:
    await ctx.all_reduce("MEAN", own if odd(ctx) else usual)  # named


@mismatch(Reason.SOURCE, *EVERYONE, peers=True)
async def source_is_its_own_id(ctx: ReplicaContext) -> None:
    await ctx.broadcast(np.zeros(3), me(ctx))  # named


@raises(ReplicaContextError)
async def collective_in_a_merge_function(ctx: ReplicaContext) -> None:
    await ctx.merge_call(lambda strategy: ctx.all_reduce("SUM", 1.0))


@raises(TypeError)
async def bad_argument_on_one_replica(ctx: ReplicaContext) -> None:
    value: Any = "three" if odd(ctx) else np.zeros(3)
    await ctx.all_reduce("SUM", value)


@correct()
async def ragged_gather(ctx: ReplicaContext) -> None:
    whole: np.ndarray = await ctx.all_gather(np.zeros(me(ctx)), 0)
    assert whole.shape == (6,)


@correct()
async def axis_counted_from_the_end(ctx: ReplicaContext) -> None:
    await ctx.all_gather(np.zeros((2, 2)), -1 if odd(ctx) else 1)


@correct()
async def merge_function_that_captures(ctx: ReplicaContext) -> None:
    assert await ctx.merge_call(lambda strategy, loss: ctx.num_replicas_in_sync, args=(float(me(ctx)),)) == 4


@mismatch(Reason.MERGE_FN, 1, sizes=SIZES)
async def merges_by_another_lambda(ctx: ReplicaContext) -> None:
    if odd(ctx):
        await ctx.merge_call(lambda strategy: None)  # named
    else:
        await ctx.merge_call(lambda strategy: 1)  # named


@deadlock(*range(3), sizes=(3,))
async def merge_that_never_returns(ctx: ReplicaContext) -> None:
    async def hang(strategy: Any) -> None:
        await asyncio.Event().wait()  # named

    await ctx.merge_call(hang)


@raises(ValueError, sizes=SIZES)
async def merge_that_raises(ctx: ReplicaContext) -> None:
    await ctx.merge_call(lambda strategy: fail())


family("container")  # The order of sets and dicts decides the order of calls.

SHAPES = {"bias": 2, "scale": 3, "weight": 4}


def order_of(ctx: ReplicaContext) -> list[str]:
    """Return the keys in the order of a set of strings, which differs between processes."""
    names = list(SHAPES)
    return names[1:] + names[:1] if odd(ctx) else names


@mismatch(Reason.SHAPE, 1, peers=True)
async def iterates_over_a_set(ctx: ReplicaContext) -> None:
    for name in order_of(ctx):
        await ctx.all_reduce("SUM", np.zeros(SHAPES[name]))  # named


@mismatch(Reason.SHAPE, 1, peers=True)
async def gradients_in_order_of_arrival(ctx: ReplicaContext) -> None:
    pending = [ctx.all_reduce("SUM", np.zeros(SHAPES[name])) for name in order_of(ctx)]  # named
    for handle in pending:
        await handle


@correct(peers=True)
async def iterates_over_sorted_names(ctx: ReplicaContext) -> None:
    for name in sorted(order_of(ctx)):
        await ctx.all_reduce("SUM", np.zeros(SHAPES[name]))


@correct()
async def reduces_one_dict(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("SUM", {name: np.zeros(SHAPES[name]) for name in order_of(ctx)})


family("condition")  # Collectives under a condition that is not the same on every replica.


def own_loss(ctx: ReplicaContext, step: int = 0) -> np.ndarray:
    """Return a loss that falls; replica 2's falls fastest."""
    return np.array([1.0 / (1 + step * (2 if me(ctx) == 2 else 1))], np.float32)


@mismatch(Reason.REDUCE_OP, 3, peers=True)
async def clips_where_its_own_gradient_is_large(ctx: ReplicaContext) -> None:
    gradient = np.array([1.0 if me(ctx) < 3 else 9.0], np.float32)
    if gradient[0] > 5:
        await ctx.all_reduce("MAX", gradient)  # named
    await ctx.all_reduce("MEAN", gradient)  # named


@incomplete(Reason.EXITED, 2, peers=True)
async def returns_when_its_own_loss_is_small(ctx: ReplicaContext) -> str:
    for step in range(10):
        if own_loss(ctx, step)[0] < 0.2:
            return "converged"
        await ctx.all_reduce("MEAN", own_loss(ctx, step))  # named
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
        await ctx.all_reduce("MEAN", own_loss(ctx, step))  # named
        step += 1
    await ctx.all_reduce("MEAN", own_loss(ctx, step))  # named


@mismatch(Reason.REDUCE_OP, 1, peers=True)
async def op_chosen_on_one_line(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("MAX" if odd(ctx) else "SUM", own_loss(ctx))  # named


@mismatch(Reason.CALL_SITE, 3, peers=True)
async def match_on_its_own_batch(ctx: ReplicaContext) -> None:
    match "image" if me(ctx) == 3 else "text":
        case "text":
            await ctx.all_reduce("SUM", own_loss(ctx))  # named
        case _:
            await ctx.all_reduce("SUM", own_loss(ctx))  # named


@mismatch(Reason.KIND, 1, peers=True)
async def short_circuits(ctx: ReplicaContext) -> None:
    _ = odd(ctx) or (await ctx.all_reduce("MAX", own_loss(ctx)))  # named
    await ctx.barrier()  # named


@mismatch(Reason.CALL_SITE, 0, peers=True)
async def logs_a_loss_on_the_first_replica(ctx: ReplicaContext) -> None:
    for step in range(4):
        await ctx.all_reduce("MEAN", own_loss(ctx, step))  # named
        if me(ctx) == 0 and step == 2:
            await ctx.all_reduce("MEAN", own_loss(ctx, step))  # named


@correct(peers=True)
async def decides_on_a_reduced_condition(ctx: ReplicaContext) -> None:
    for step in range(10):
        loss: np.ndarray = await ctx.all_reduce("MAX", own_loss(ctx, step))
        if loss[0] < 0.2:
            break
    await ctx.barrier()


@correct(peers=True)
async def branches_that_meet_by_name(ctx: ReplicaContext) -> None:
    if me(ctx) == 2:
        await ctx.all_reduce("SUM", own_loss(ctx), name="loss")
    else:
        await ctx.all_reduce("SUM", own_loss(ctx) * 2, name="loss")
    await ctx.barrier()


family("loop")  # Loops of unequal length.


@incomplete(Reason.EXITED, 3, peers=True, name="one_loop_is_longer", given={"steps": {3: 7}})
@incomplete(Reason.EXITED, 1, peers=True, name="one_loop_is_shorter", given={"steps": {1: 5}})
async def unequal_loops(ctx: ReplicaContext, steps: dict[int, int]) -> None:
    for _ in range(steps.get(me(ctx), 6)):
        await ctx.all_reduce("SUM", LOSS)  # named


@mismatch(Reason.CALL_SITE, 0, peers=True)
async def batches_missing_in_every_epoch(ctx: ReplicaContext) -> None:
    for _ in range(3):
        for _ in range(2 if me(ctx) == 0 else 3):
            await ctx.all_reduce("MEAN", LOSS)  # named
        await ctx.all_reduce("MEAN", LOSS)  # named


@correct(peers=True)
async def loops_of_the_agreed_length(ctx: ReplicaContext) -> None:
    steps: int = await ctx.all_reduce("MIN", 5 + me(ctx))
    for _ in range(steps):
        await ctx.all_reduce("SUM", LOSS)


@correct(peers=True)
async def stops_when_all_have_run_out(ctx: ReplicaContext) -> None:
    left = 3 + me(ctx)
    while await ctx.all_reduce("MAX", left):
        await ctx.all_reduce("SUM", LOSS if left else np.zeros_like(LOSS))
        left = max(left - 1, 0)


@incomplete(Reason.EXITED, 0)
async def one_does_not_join(ctx: ReplicaContext) -> None:
    for _ in range(2 + me(ctx)):
        await ctx.all_reduce("SUM", LOSS)  # named
    if me(ctx):
        await ctx.join()


@correct()
async def joins_when_it_has_run_out(ctx: ReplicaContext) -> None:
    for step in range(2 + me(ctx)):
        mean: np.ndarray = await ctx.all_reduce("MEAN", LOSS * step)
        assert mean.tolist() == (LOSS * step).tolist()
    assert await ctx.join() == 3


@incomplete(Reason.EXITED, 1, sizes=SIZES, says="continue")
async def continues_under_a_condition(ctx: ReplicaContext) -> None:
    for step in range(4):
        if odd(ctx) and step == 2:
            continue
        await ctx.all_reduce("MEAN", LOSS)  # named
        await ctx.barrier()  # named


@mismatch(Reason.KIND, 0, sizes=SIZES, says="eplica 0 ma", never="left the loop")
async def first_replica_saves_after_an_epoch(ctx: ReplicaContext) -> None:
    for _ in range(3):
        for _ in range(2):
            await ctx.all_reduce("MEAN", LOSS)  # named
        if me(ctx) == 0:
            await ctx.barrier()  # named


@mismatch(Reason.KIND, 1, sizes=SIZES, says="left the loop")
async def stops_early_by_its_own_loss(ctx: ReplicaContext) -> None:
    for step in range(5):
        if odd(ctx) and step == 3:
            break
        await ctx.all_reduce("MEAN", LOSS)  # named
    await ctx.barrier()  # named


@mismatch(Reason.KIND, 1, sizes=SIZES)
async def one_line_of_two_calls(ctx: ReplicaContext) -> None:
    await (ctx.barrier() if odd(ctx) else ctx.all_reduce("SUM", LOSS))  # named


@incomplete(Reason.EXITED, 1, sizes=SIZES)
async def returns_inside_two_loops(ctx: ReplicaContext) -> None:
    for epoch in range(2):
        for step in range(3):
            if odd(ctx) and (epoch, step) == (1, 1):
                return  # named
            await ctx.all_reduce("MEAN", LOSS)  # named


family("helper")  # Calls in a helper that several callers share.

ONES, TWOS, THREES = (np.full(3, value, np.float32) for value in (1, 2, 3))


async def total(ctx: ReplicaContext, value: Any, **more: Any) -> Any:
    return await ctx.all_reduce("SUM", value, **more)


async def total_and_meet(ctx: ReplicaContext, value: Any) -> None:
    await total(ctx, value)
    await ctx.barrier()


@correct(name="swapped_through_a_helper_by_name", given={"helper": partial(total, name="loss"), "some": (2,)})
@mismatch(
    Reason.CALL_SITE, 1, sizes=SIZES, says="in the opposite order", name="swapped_through_a_helper_of_another_file",
    given={"helper": trainer.average, "some": (1,)},
)  # fmt: skip
@mismatch(Reason.CALL_SITE, *EVERYONE, name="swapped_through_a_helper_by_one_half", given={"some": (0, 1)})
async def swapped_through_a_helper(ctx: ReplicaContext, some: tuple[int, ...], helper: Any = total) -> None:
    for name in ("loss", "gradient") if me(ctx) in some else ("gradient", "loss"):
        if name == "loss":
            await helper(ctx, ONES)  # named
        else:
            await helper(ctx, TWOS)  # named


@mismatch(Reason.CALL_SITE, 2, says="from tests/faults/calls.py")
async def swapped_through_a_helper_around_many_calls(ctx: ReplicaContext) -> None:
    for name in ("loss", "common", "gradient") if me(ctx) == 2 else ("gradient", "common", "loss"):
        if name == "loss":
            await total(ctx, ONES)  # named
        elif name == "gradient":
            await total(ctx, TWOS)  # named
        else:
            for _ in range(100):
                await total(ctx, ONES)


@mismatch(Reason.CALL_SITE, 2)
async def swapped_with_a_call_of_itself(ctx: ReplicaContext, *calls_itself: bool) -> None:
    for each in calls_itself or ((True, False) if me(ctx) == 2 else (False, True)):
        if each:
            await swapped_with_a_call_of_itself(ctx, False)  # named
        else:
            await ctx.all_reduce("SUM", LOSS)  # named


@mismatch(Reason.CALL_SITE, 2)
async def rotated_through_a_helper(ctx: ReplicaContext) -> None:
    async def first() -> None:
        await total_and_meet(ctx, ONES)  # named

    async def second() -> None:
        await total_and_meet(ctx, TWOS)  # named

    async def third() -> None:
        await total_and_meet(ctx, THREES)  # named

    for step in (second, third, first) if me(ctx) == 2 else (first, second, third):
        await step()


@mismatch(Reason.CALL_SITE, 2)
async def swapped_through_a_helper_of_a_group(ctx: ReplicaContext) -> None:
    if me(ctx):
        group = ctx.new_group([1, 2, 3], name="experts")
        for step in (1, 0) if me(ctx) == 2 else (0, 1):
            if step:
                await total(group, ONES)  # named
            else:
                await total(group, TWOS)  # named
    await ctx.barrier()


@mismatch(Reason.CALL_SITE, 2)
async def issued_through_a_helper_in_another_order(ctx: ReplicaContext) -> None:
    def issue(value: Any) -> Any:
        return ctx.all_reduce("SUM", value)

    pending = []
    for step in (1, 0) if me(ctx) == 2 else (0, 1):
        if step:
            pending.append(issue(ONES))  # named
        else:
            pending.append(issue(TWOS))  # named
    for handle in pending:
        await handle


@correct()
async def callers_that_merely_differ(ctx: ReplicaContext) -> None:
    for _ in range(5):
        if me(ctx) == 2:
            await total(ctx, ONES)
        else:
            await total(ctx, TWOS)
    await total(ctx, ONES)


@mismatch(Reason.KIND, 1, sizes=SIZES, says="after_epoch")
async def saves_after_an_epoch(ctx: ReplicaContext) -> None:
    async def save(epoch: int) -> None:
        if odd(ctx) and epoch == 1:
            await ctx.barrier()  # named

    await Trainer(ctx).fit(3, after_epoch=save)


@incomplete(Reason.EXITED, 1, sizes=SIZES, says="trainer.py:34", never="drop the remainder")
async def raises_out_of_the_trainer_and_returns(ctx: ReplicaContext) -> None:
    async def stop(step: int) -> bool:
        if odd(ctx) and step == 1:
            raise StopAsyncIteration
        return False

    with suppress(StopAsyncIteration):
        await Trainer(ctx).fit(2, before_step=stop)


@mismatch(Reason.KIND, 1, sizes=SIZES)
async def early_out_of_a_helper(ctx: ReplicaContext) -> None:
    await trainer.average_all(ctx, [LOSS] * (1 if odd(ctx) else 2))
    await ctx.barrier()  # named


@mismatch(Reason.CALL_SITE, 1, sizes=SIZES)
async def deeper_recursion(ctx: ReplicaContext) -> None:
    await trainer.spread(ctx, 3 if odd(ctx) else 2)
    await ctx.all_reduce("SUM", LOSS)  # named


@mismatch(Reason.SHAPE, 1, sizes=SIZES)
async def another_shape_through_a_decorated_function(ctx: ReplicaContext) -> None:
    @trainer.logged
    async def reduce(size: int) -> None:
        await ctx.all_reduce("SUM", np.zeros(size))  # named

    await reduce(2 if odd(ctx) else 3)


@mismatch(Reason.KIND, 1, sizes=SIZES)
async def leaves_a_fence(ctx: ReplicaContext) -> None:
    async with trainer.fenced(ctx):
        if not odd(ctx):
            await ctx.all_reduce("SUM", LOSS)  # named


@mismatch(Reason.KIND, 1, sizes=SIZES, anyio=False)
async def fewer_batches_of_a_generator(ctx: ReplicaContext) -> None:
    async for batch in trainer.batches(2 if odd(ctx) else 3):
        await ctx.all_reduce("SUM", batch)  # named
    await ctx.barrier()  # named


@correct(sizes=SIZES)
async def trainer_with_hooks(ctx: ReplicaContext) -> None:
    await Trainer(ctx).fit(3, after_epoch=lambda epoch: ctx.all_gather(LOSS, 0))


@correct(sizes=SIZES)
async def recursion_of_one_depth(ctx: ReplicaContext) -> None:
    await trainer.spread(ctx, 3)
    async with trainer.fenced(ctx):
        await trainer.average_all(ctx, [LOSS, LOSS])


family("group")  # Groups of some replicas: orders across groups, missing members, the wrong group.


@incomplete(Reason.EXITED, 3)
async def member_leaves_its_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group([1, 2, 3] if me(ctx) else [0])
    if me(ctx) != 3:
        await group.all_reduce("SUM", LOSS)  # named


@raises(ValueError)
async def group_of_others(ctx: ReplicaContext) -> None:
    await ctx.new_group([0, 1]).barrier()


@correct()
async def disjoint_groups_of_unequal_length(ctx: ReplicaContext) -> None:
    i = me(ctx)
    group = ctx.new_group([0, 1] if i < 2 else [2, 3])
    for _ in range(3 if i < 2 else 5):
        await group.all_reduce("SUM", LOSS)
    await ctx.barrier()


@correct()
async def overlapping_groups_in_one_order(ctx: ReplicaContext) -> None:
    for members in ([0, 1, 2], [1, 2, 3], [0, 3]):
        if me(ctx) in members:
            await ctx.new_group(members).all_reduce("SUM", LOSS)
    await ctx.barrier()


@correct(anyio=False)
async def opposite_orders_in_flight_together(ctx: ReplicaContext) -> None:
    first, second = (ctx.new_group(range(4), name=name) for name in ("first", "second"))
    order = (first, second) if me(ctx) % 2 else (second, first)
    await asyncio.gather(*(group.all_reduce("SUM", LOSS, name="loss") for group in order))


@cycle(0, 1, 2)
async def ring_of_groups(ctx: ReplicaContext) -> None:
    i = me(ctx)
    if i == 3:
        return
    left, right = (ctx.new_group(sorted({k, (k + 1) % 3})) for k in ((i - 1) % 3, i))
    await right.barrier()  # named
    await left.barrier()


@cycle(0, 1)
async def group_against_the_whole_run(ctx: ReplicaContext) -> None:
    i = me(ctx)
    group = ctx.new_group([0, 1] if i < 2 else [2, 3])
    if i == 0:
        await ctx.barrier(name="end")  # named
        await group.barrier()
    else:
        await group.barrier()  # named
        await ctx.barrier(name="end")


ALL, FIRST_TWO, REVERSED = slice(None), slice(2), slice(None, None, -1)


@cycle(1, sizes=SIZES, says="order", name="group_of_members_in_another_order", given={"own": REVERSED})
@cycle(1, sizes=(3, 7), says="members", name="group_of_other_members", given={"own": FIRST_TWO})
@cycle(1, sizes=SIZES, says="name", name="group_of_another_name", given={"own": ALL, "own_name": "expert"})
async def one_makes_another_group(ctx: ReplicaContext, own: slice, own_name: str = "experts") -> None:
    members, name = (everyone(ctx)[own], own_name) if odd(ctx) else (everyone(ctx), "experts")
    await ctx.new_group(members, name=name).all_reduce("SUM", LOSS)  # named


@cycle(1, sizes=SIZES, says="context")
async def context_of_the_run_instead_of_the_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx), name="experts")
    await (ctx if odd(ctx) else group).all_reduce("SUM", LOSS)  # named


@cycle(1, sizes=SIZES, says="#1 of group 'experts'")
async def one_call_more_in_the_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx), name="experts")
    for _ in range(2 if odd(ctx) else 1):
        await group.all_reduce("SUM", LOSS)  # named
    await ctx.barrier()  # named


@incomplete(Reason.EXITED, 1, sizes=SIZES, says="has not made group 'experts'", never="out of data")
async def member_does_not_make_the_group(ctx: ReplicaContext) -> None:
    if not odd(ctx):
        await ctx.new_group(everyone(ctx), name="experts").all_reduce("SUM", LOSS)  # named


@mismatch(Reason.KIND, 1, sizes=SIZES, says="group 'experts'")
async def another_kind_in_the_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx), name="experts")
    await ctx.barrier()
    if odd(ctx):
        await group.barrier()  # named
    else:
        await group.all_reduce("SUM", LOSS)  # named


@cycle(1, sizes=SIZES)
async def groups_of_all_in_another_order(ctx: ReplicaContext) -> None:
    rows, columns = (ctx.new_group(everyone(ctx), name=name) for name in ("rows", "columns"))
    if odd(ctx):
        await columns.all_reduce("SUM", LOSS)  # named
        await rows.all_reduce("SUM", LOSS)
    else:
        await rows.all_reduce("SUM", LOSS)  # named
        await columns.all_reduce("SUM", LOSS)


@correct(sizes=SIZES)
async def group_of_members_in_one_other_order(ctx: ReplicaContext) -> None:
    group = ctx.new_group(everyone(ctx)[::-1])
    assert me(group) == ctx.num_replicas_in_sync - 1 - me(ctx)
    await group.barrier()
