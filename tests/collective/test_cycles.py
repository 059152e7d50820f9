"""Replicas that wait for each other in different groups: found at once where it is certain, never where it is not."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from functools import partial

import anyio
import anyio.lowlevel
import pytest
import sniffio
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import CollectiveMismatchError, ReplicaContext
from tests.collective.runs import error_of, mirrored, run
from tests.collective.test_random_programs import Loop, on, on_every_loop

pytestmark = pytest.mark.anyio


def two_groups(ctx: ReplicaContext) -> tuple[ReplicaContext, ReplicaContext]:
    """Return two groups of replicas 0 and 1, in the order in which the replica uses them: not the same on both."""
    first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")
    return (first, second) if ctx.replica_id_in_sync_group == 0 else (second, first)


async def opposite(ctx: ReplicaContext) -> None:
    for group in two_groups(ctx):
        await group.barrier()


async def test_groups_in_opposite_order_are_reported_as_the_cycle_they_are() -> None:
    error = await error_of(opposite, 2)
    assert isinstance(error, CollectiveMismatchError)
    assert (error.report.reason, error.report.suspects, error.report.sequence_number) == ("cycle", (0, 1), 0)
    assert [(replica.state, replica.call) for replica in error.report.replicas] == [("waiting", "barrier()")] * 2
    headline, first, second, *_ = str(error).splitlines()
    assert headline == "replicas 0 and 1 wait for each other, each in another group's collective"
    assert first.startswith("  replica 0 waits in barrier() #0 of group 'first' of replicas 0 and 1 (tests/")
    assert first.endswith(") for replica 1,")
    assert second.startswith("  replica 1 waits in barrier() #0 of group 'second' of replicas 0 and 1 (tests/")
    assert second.endswith(") for replica 0")


async def test_a_cycle_may_pass_through_the_runs_own_group_and_merge_calls() -> None:
    async def program(ctx: ReplicaContext) -> None:
        group = ctx.new_group([1, 0]) if ctx.replica_id_in_sync_group < 2 else ctx
        if ctx.replica_id_in_sync_group == 0:
            await group.merge_call(print)
        await ctx.all_reduce("SUM", 1.0)

    error = await error_of(program)
    assert (error.report.reason, error.report.suspects) == ("cycle", (0, 1))
    assert "replica 1 waits in all_reduce(SUM, float) #0 of the run (" in str(error)


async def pairs(ctx: ReplicaContext, *, crossed: bool) -> None:
    me = ctx.replica_id_in_sync_group
    mine = [pair for pair in ((0, 1), (1, 2), (0, 2)) if me in pair]
    if crossed and me == 0:
        mine.reverse()
    for group in [ctx.new_group(pair, name=str(pair)) for pair in mine]:
        await group.barrier(name="x")
    await ctx.barrier()


async def test_a_cycle_of_three_leaves_out_who_only_waits_for_it() -> None:
    await run(mirrored(4), partial(pairs, crossed=False))
    error = await error_of(partial(pairs, crossed=True), 4)
    assert (error.report.reason, error.report.suspects) == ("cycle", (0, 1, 2))
    assert [replica.state for replica in error.report.replicas[:3]] == ["waiting"] * 3


async def test_it_is_found_when_the_last_await_comes_late() -> None:
    async def program(ctx: ReplicaContext) -> None:
        first, second = two_groups(ctx)
        handle = first.barrier()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        await handle
        await second.barrier()

    assert (await error_of(program, 2)).report.reason == "cycle"


async def test_a_child_task_that_is_done_and_kept_does_not_hide_it() -> None:
    kept: list[object] = []

    async def child() -> None:
        kept.append(current_task())
        await anyio.lowlevel.checkpoint()

    def current_task() -> object:
        if sniffio.current_async_library() == "asyncio":
            return asyncio.current_task()
        return trio.lowlevel.current_task()

    async def program(ctx: ReplicaContext) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        await opposite(ctx)

    assert (await error_of(program, 2)).report.reason == "cycle"


async def test_issuing_both_before_awaiting_is_no_cycle() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for handle in [group.barrier() for group in two_groups(ctx)]:
            await handle

    await run(mirrored(2), program)


# What may still act for a replica that waits: no alarm.


async def test_another_task_of_the_replica_may_still_arrive() -> None:
    async def later(group: ReplicaContext) -> None:
        await anyio.sleep(0.12)
        await group.barrier(name="second")

    async def program(ctx: ReplicaContext) -> None:
        first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")
        async with anyio.create_task_group() as tasks:
            if ctx.replica_id_in_sync_group == 0:
                tasks.start_soon(later, second)
            else:
                await second.barrier(name="second")
            await first.barrier(name="first")

    await run(mirrored(2), program)


async def test_a_worker_thread_of_the_replica_may_still_start_a_task() -> None:
    async def program(ctx: ReplicaContext) -> None:
        first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")

        async def use_second() -> None:
            await second.barrier(name="second")

        def in_thread() -> None:
            threading.Event().wait(0.05)
            anyio.from_thread.run(use_second)

        if ctx.replica_id_in_sync_group == 1:
            await use_second()
            return await first.barrier(name="first")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, in_thread)
            await first.barrier(name="first")
        return None

    await run(mirrored(2), program)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"])
async def test_a_timer_of_the_replica_may_still_start_a_task(frozen: bool) -> None:
    async def program(ctx: ReplicaContext) -> None:
        first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")
        started: list[asyncio.Task[None]] = []

        async def use_second() -> None:
            await second.barrier(name="second")

        def start() -> None:
            started.append(asyncio.create_task(use_second()))

        if ctx.replica_id_in_sync_group == 1:
            await use_second()
            return await first.barrier(name="first")
        asyncio.get_running_loop().call_later(0.05, start)
        if frozen:
            gc.freeze()  # the garbage collector shows the timer no more
        await first.barrier(name="first")
        return await started[0]

    await run(mirrored(2), program)


async def test_a_timeout_around_a_wait_on_a_cycle_ends_it() -> None:
    async def program(ctx: ReplicaContext) -> None:
        first, second = two_groups(ctx)
        with anyio.move_on_after(0.05):
            await first.barrier(name="x")
        await second.barrier(name="x")

    assert (await error_of(program, 2)).report.reason in ("abandoned", "cycle")  # as the event loop can tell


# Any order.


def goes_through(orders: Sequence[Sequence[int]], members: Sequence[Sequence[int]]) -> bool:
    """Whether replicas that use groups in these orders, one collective each, come to their ends."""
    left = [list(order) for order in orders]
    moved = True
    while moved:
        moved = False
        for group, replicas in enumerate(members):
            if all(left[i] and left[i][0] == group for i in replicas):
                for i in replicas:
                    left[i].pop(0)
                moved = True
    return not any(left)


@st.composite
def orders_of_groups(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    replicas = draw(st.integers(2, 5))
    members = [sorted(draw(st.sets(st.integers(0, replicas - 1), min_size=1))) for _ in range(draw(st.integers(1, 5)))]
    orders = [
        draw(st.permutations([group for group, inside in enumerate(members) if me in inside])) for me in range(replicas)
    ]
    return orders, members


@on_every_loop
@settings(max_examples=60)
@given(drawn=orders_of_groups())
def test_any_order_of_groups_goes_through_or_is_a_cycle(
    loop: Loop, drawn: tuple[list[list[int]], list[list[int]]]
) -> None:
    orders, members = drawn

    async def program(ctx: ReplicaContext) -> int:
        me = ctx.replica_id_in_sync_group
        mine = {i: ctx.new_group(inside, f"{i}") for i, inside in enumerate(members) if me in inside}
        return sum([await mine[i].all_reduce("SUM", 1, name="x") for i in orders[me]])

    async def main() -> None:
        if goes_through(orders, members):
            await run(mirrored(len(orders)), program)
        else:
            assert (await error_of(program, len(orders))).report.reason == "cycle"

    on(loop, main)
