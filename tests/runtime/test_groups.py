"""Groups of some of the replicas: who is in them, what works in them, and what becomes of them when a replica fails."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import (
    CollectiveMismatchError,
    IncompleteCollectiveError,
    ReplicaContext,
    ReplicaContextError,
    Variable,
    get_replica_context,
)
from tests.runtime.programs import error_of, mirrored, results, run, still_works

pytestmark = pytest.mark.anyio


async def test_a_group_counts_its_members_in_the_order_given() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        if ctx.replica_id_in_sync_group == 1:
            return None
        group = ctx.new_group([3, 0, 2], name="experts")
        assert (group.num_replicas_in_sync, group.strategy, group.devices) == (3, ctx.strategy, ctx.devices)
        me = ctx.replica_id_in_sync_group
        ours = f"replica {group.replica_id_in_sync_group} of 3 in group 'experts' of replicas 0, 2 and 3"
        assert repr(group) == f"<ReplicaContext: {ours} on CPU:{me}>"
        gathered = await group.all_gather(np.array([me]), 0)
        return group.replica_id_in_sync_group, gathered.tolist()

    assert await results(4, program) == ((1, [3, 0, 2]), None, (2, [3, 0, 2]), (0, [3, 0, 2]))


async def test_every_collective_works_in_a_group() -> None:
    async def merge(strategy: aiodist.Strategy, value: Any) -> Any:
        assert aiodist.in_cross_replica_context()
        assert len(strategy.experimental_local_results(value)) == 2
        return await strategy.reduce("SUM", value, None), await strategy.extended.reduce_to("SUM", value, "CPU:0")

    groups: list[ReplicaContext] = []

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        groups.append(group := ctx.new_group([me % 2, me % 2 + 2]))
        mine, both = np.array([me, 10 + me]), [me % 2, me % 2 + 2]
        position = group.replica_id_in_sync_group
        assert await group.all_reduce("SUM", me) == sum(both)
        assert (await group.all_gather(mine, 0)).tolist() == [x for i in both for x in (i, 10 + i)]
        assert (await group.broadcast(mine, 1)).tolist() == [both[1], 10 + both[1]]
        assert (await group.reduce_scatter("SUM", mine)).tolist() == [sum(both) + 20 * position]
        assert (await group.all_to_all(mine)).tolist() == [10 * position + i for i in both]
        await group.barrier()
        assert await group.merge_call(merge, (me,)) == (sum(both), sum(both))
        assert await group.run_sync(get_replica_context) is ctx
        out = np.zeros(2, int)
        assert await group.all_reduce("SUM", mine, out=out) is out
        assert out.tolist() == [sum(both), sum(both) + 20]
        await ctx.barrier()
        with pytest.raises(ReplicaContextError, match=r"of replica . of 4 inside replica . of 4"):
            groups[(me + 1) % 4].barrier()  # another replica's
        await ctx.barrier()

    await run(mirrored(4), program)
    with pytest.raises(ReplicaContextError, match="whose function has ended"):
        groups[0].barrier()
    with pytest.raises(ReplicaContextError, match="whose function has ended"), groups[0]:
        groups[0].new_group([0])


async def test_a_group_of_a_group_counts_as_the_group_does() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        if ctx.replica_id_in_sync_group == 0:
            return None
        outer = ctx.new_group([3, 2, 1])
        if outer.replica_id_in_sync_group == 1:
            return None
        inner = outer.new_group([0, 2])
        return inner.replica_id_in_sync_group, await inner.all_reduce("SUM", ctx.replica_id_in_sync_group)

    assert await results(4, program) == (None, (1, 4), None, (0, 4))


async def test_groups_of_equal_members_and_name_match_in_the_order_of_their_making() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        first = ctx.new_group([0, 1], name="a")
        if ctx.replica_id_in_sync_group:
            other, second = ctx.new_group([0, 1], name="b"), ctx.new_group([0, 1], name="a")
        else:
            second, other = ctx.new_group([0, 1], name="a"), ctx.new_group([0, 1], name="b")
        handles = [group.all_reduce("SUM", value) for value, group in enumerate((first, second, other), 1)]
        return [await handle for handle in handles]

    assert await results(2, program) == ([2, 4, 6],) * 2


async def test_a_group_outside_any_run_is_of_one_replica() -> None:
    group = get_replica_context().new_group([0])
    assert await group.all_reduce("SUM", 3) == 3
    with group:
        assert get_replica_context() is group
        assert await group.merge_call(lambda _, x: x + 1, (1,)) == 2


# The current context.


async def test_a_with_block_makes_the_group_current_for_its_tasks() -> None:
    async def child(group: ReplicaContext) -> None:
        assert get_replica_context() is group
        with group:  # beside the same block in another task
            await get_replica_context().barrier()
        assert get_replica_context() is group

    async def program(ctx: ReplicaContext) -> None:
        group = ctx.new_group(range(2))
        with group:
            assert get_replica_context() is group
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(child, group)
            await ctx.barrier()  # the run's own context serves beside it
        assert get_replica_context() is ctx

    await run(mirrored(2), program)


async def test_variables_belong_to_the_strategy_in_a_group_too() -> None:
    strategy = mirrored(3)
    with strategy.scope():
        mirror = Variable(1.0, aggregation="sum")
        on_read = Variable(0.0, synchronization="on_read", aggregation="sum")

    async def program(ctx: ReplicaContext) -> Any:
        with ctx.new_group([2, 1, 0]):
            await on_read.assign(float(ctx.replica_id_in_sync_group))
            made = Variable(5.0)
            await mirror.assign_add(1.0)
            return float(on_read.read_value()), float(made.read_value()), float(mirror.read_value())

    assert await run(strategy, program) == ((0.0, 5.0, 4.0), (1.0, 5.0, 4.0), (2.0, 5.0, 4.0))


@pytest.mark.parametrize(
    ("replica_ids", "error", "text"),
    [
        ([], ValueError, "must name at least one replica"),
        ([0, 3], ValueError, "must be from 0 to 2, got 3"),
        ([0, -1], ValueError, "must be from 0 to 2, got -1"),
        ([0, 1, 0], ValueError, "once, got 0 twice"),
        ([1, 2], ValueError, "replica 0, which called it, is not among them"),
        (0, TypeError, "must be a sequence of replica ids"),
        ("01", TypeError, "must be a sequence of replica ids"),
        ([0, 1.0], TypeError, "must be a replica id, an int"),
        ([False, 1], TypeError, "must be a replica id, an int"),
    ],
)
async def test_members_that_make_no_group_are_refused_at_the_call(
    replica_ids: Any, error: type[Exception], text: str
) -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 0:
            with pytest.raises(error, match=text):
                ctx.new_group(replica_ids)
        await ctx.barrier()

    await run(mirrored(3), program)


# When replicas do not meet.


async def test_a_replica_that_ended_before_the_group_was_made_is_named() -> None:
    async def program(ctx: ReplicaContext, ended: anyio.Event) -> None:
        if ctx.replica_id_in_sync_group == 1:
            ended.set()
            return
        await ended.wait()
        await anyio.lowlevel.checkpoint()
        await ctx.new_group([0, 1], name="late").barrier()

    event = anyio.Event()
    error = await error_of(lambda ctx: program(ctx, event), 2)
    assert isinstance(error, IncompleteCollectiveError)
    assert error.report.suspects == (0, 1)
    assert str(error).startswith("replica 1 ended without collective #0 of group 'late' of replicas 0 and 1")


@pytest.mark.parametrize(
    ("order_check", "name", "differs"),
    [("call_site", None, True), ("call_site", "g", False), ("signature", None, False), ("call_path", "g", False)],
)
async def test_places_of_creation_are_compared_as_the_strategy_says(
    order_check: str, name: str | None, differs: bool
) -> None:
    async def program(ctx: ReplicaContext) -> None:
        first = ctx.new_group(range(3), name) if ctx.replica_id_in_sync_group == 0 else None
        group = first or ctx.new_group(range(3), name)
        await group.barrier()

    if not differs:
        await run(mirrored(3, order_check), program)
        return
    error = await error_of(program, 3, order_check=order_check)
    assert isinstance(error, CollectiveMismatchError)
    assert (error.report.reason, error.report.suspects) == ("call_site", (0,))
    assert str(error).startswith("replicas disagree at the creation of the group of replicas 0-2\n")


async def test_callers_of_a_creation_are_told_apart_by_call_paths() -> None:
    async def made(ctx: ReplicaContext) -> ReplicaContext:
        return ctx.new_group(range(2))

    async def program(ctx: ReplicaContext) -> None:
        first = await made(ctx) if ctx.replica_id_in_sync_group == 0 else None
        group = first or await made(ctx)
        await group.barrier()

    await run(mirrored(2), program)
    assert (await error_of(program, 2, order_check="call_path")).report.reason == "call_site"


async def test_a_group_that_some_member_never_makes_is_reported() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 0:
            ctx.new_group([0, 1], "experts")

    error = await error_of(program, 2)
    assert isinstance(error, IncompleteCollectiveError)
    assert "replica 1 ended without the creation of group 'experts' of replicas 0 and 1, which replica 0 made" in str(
        error
    )


@pytest.mark.filterwarnings("ignore:replica 0 never awaited")
async def test_a_collective_that_was_dropped_with_its_group_is_missed_at_the_end() -> None:
    async def program(ctx: ReplicaContext) -> None:
        group = ctx.new_group([0, 1], "experts")
        if ctx.replica_id_in_sync_group == 0:
            group.barrier()
        del group
        gc.collect()

    error = await error_of(program, 2)
    assert isinstance(error, IncompleteCollectiveError)


async def test_a_failure_names_who_waited_in_a_group_and_ends_all_groups() -> None:
    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        if me == 3:
            await anyio.lowlevel.checkpoint()
            raise ZeroDivisionError
        await ctx.new_group([2, 3] if me == 2 else [0, 1, 3]).barrier()

    strategy = mirrored(4)
    with pytest.raises(ZeroDivisionError) as caught:
        await run(strategy, program)
    assert "replicas 0 and 1 were waiting in barrier #0 of the group of replicas 0, 1 and 3 at " in str(
        caught.value.__notes__
    )
    await still_works(strategy)


# Many.


async def test_groups_made_at_every_step_leave_nothing() -> None:
    alive: list[weakref.ref[Any]] = []

    async def program(ctx: ReplicaContext) -> None:
        async def one(name: str) -> None:
            group = ctx.new_group([0, 1], name)
            alive.append(weakref.ref(group._me.member.group))
            await group.barrier()

        for step in range(1_000):
            await one(f"step {step}")
        await ctx.barrier()
        gc.collect()
        assert not ctx._me.member.group.ledger.has_groups
        assert not any(ref() for ref in alive)

    await run(mirrored(2), program)
