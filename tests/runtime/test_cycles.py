"""Replicas that wait for each other in different groups: found at once where it is certain, never where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from aiodist import DeadlockError, ReplicaContext
from tests.runtime.programs import error_of, mirrored, results, run

pytestmark = pytest.mark.anyio


def two_groups(ctx: ReplicaContext) -> tuple[ReplicaContext, ReplicaContext]:
    """Return two groups of replicas 0 and 1, in the order in which the replica uses them: not the same on both."""
    first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")
    return (first, second) if ctx.replica_id_in_sync_group == 0 else (second, first)


async def opposite(ctx: ReplicaContext) -> None:
    for group in two_groups(ctx):
        await group.barrier()


async def test_a_cycle_may_pass_through_the_runs_own_group_merge_calls_and_joins() -> None:
    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        group = ctx.new_group([1, 0]) if me < 2 else ctx
        if me == 0:
            await group.merge_call(print)
        await (ctx.join() if me == 2 else ctx.all_reduce("SUM", 1.0))

    error = await error_of(program)
    assert (error.report.reason, error.report.suspects) == ("cycle", (0, 1))
    assert "replica 1 waits in all_reduce(SUM, float) #0 of the run (" in str(error)

    async def join(ctx: ReplicaContext) -> None:
        group = ctx.new_group([0, 1], "pair")
        if ctx.replica_id_in_sync_group:
            await group.barrier()
        await ctx.join()

    error = await error_of(join, 2)
    assert (error.report.reason, error.report.suspects) == ("cycle", (0, 1))
    assert "replica 0 waits in join() of the run (" in str(error)


async def ring(ctx: ReplicaContext, *, size: int, crossed: bool) -> None:
    """Use groups of neighbours on a ring, each replica the lower-numbered group first, but for the crossed 0."""
    me = ctx.replica_id_in_sync_group
    mine = [(me, (me + 1) % size), ((me - 1) % size, me)] if me < size else []
    if not crossed:
        mine.sort()
    for group in [ctx.new_group(pair, name=str(pair)) for pair in mine]:
        await group.barrier(name="x")
    await ctx.barrier()


async def test_a_ring_leaves_out_who_only_waits_for_it() -> None:
    await run(mirrored(4), partial(ring, size=3, crossed=False))
    error = await error_of(partial(ring, size=3, crossed=True), 4)
    assert (error.report.reason, error.report.suspects) == ("cycle", (0, 1, 2))
    assert [replica.state for replica in error.report.replicas[:3]] == ["waiting"] * 3


async def test_a_ring_of_thousands_of_groups_is_found() -> None:
    """It takes seconds; where one group more cost a look at all others, it would take minutes."""
    with pytest.raises(DeadlockError) as caught:
        await run(mirrored(1_024), partial(ring, size=1_024, crossed=True))
    assert len(caught.value.report.suspects) == 1_024
    assert len(str(caught.value).splitlines()) <= 40


async def test_it_is_found_when_the_last_await_comes_late_and_child_tasks_are_done() -> None:
    kept: list[object] = []

    async def child() -> None:
        kept.append(asyncio.current_task())
        await checkpoint()

    async def program(ctx: ReplicaContext) -> None:
        first, second = two_groups(ctx)
        handle = first.barrier()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        for _ in range(5):
            await checkpoint()
        await handle
        await second.barrier()

    assert (await error_of(program, 2)).report.reason == "cycle"


# What may still act for a replica that waits: no alarm.


async def await_both(ctx: ReplicaContext, how: str, looked: anyio.Event) -> None:
    """Let replica 1 use the second group before the first, and replica 0 too, but by something beside its own task."""
    first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")

    async def use_second() -> None:
        await second.barrier(name="second")

    async def later() -> None:
        await looked.wait()
        await use_second()

    def in_thread() -> None:
        anyio.from_thread.run(looked.wait)
        anyio.from_thread.run(use_second)

    if ctx.replica_id_in_sync_group == 1:
        await use_second()
        return await first.barrier(name="first")
    started: list[asyncio.Task[None]] = []
    async with anyio.create_task_group() as tasks:
        if how == "task":
            tasks.start_soon(later)
        elif how == "thread":
            tasks.start_soon(anyio.to_thread.run_sync, in_thread)
        else:
            asyncio.get_running_loop().call_later(0.15, lambda: started.append(asyncio.create_task(use_second())))
        await first.barrier(name="first")
    return None


@pytest.mark.parametrize("how", ["task", "thread", "timer"])
@pytest.mark.every_loop("asyncio", "uvloop")
async def test_what_may_still_act_for_a_replica_is_no_alarm(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from aiodist._runtime import inspection

    looked, looks = anyio.Event(), []
    look = inspection.never_go_on

    def counted(*args: object) -> object:
        looks.append(args)
        if len(looks) == 2:
            looked.set()
        return look(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(inspection, "never_go_on", counted)
    await run(mirrored(2), partial(await_both, how=how, looked=looked))
    assert looks


async def test_a_timeout_around_a_wait_on_a_cycle_ends_it() -> None:
    async def program(ctx: ReplicaContext) -> None:
        first, second = two_groups(ctx)
        with anyio.move_on_after(0.05):
            await first.barrier(name="x")
        await second.barrier(name="x")

    assert (await error_of(program, 2)).report.reason == "abandoned"


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
    members = draw(
        st.lists(st.sets(st.integers(0, replicas - 1), min_size=2).map(sorted), min_size=1, max_size=6)
    )  # fmt: skip
    mine = [[group for group, inside in enumerate(members) if i in inside] for i in range(replicas)]
    return [draw(st.permutations(own)) for own in mine], members


@given(drawn=orders_of_groups())
def test_any_order_of_groups_goes_through_or_is_a_cycle(drawn: tuple[list[list[int]], list[list[int]]]) -> None:
    orders, members = drawn

    async def program(ctx: ReplicaContext) -> int:
        me = ctx.replica_id_in_sync_group
        mine = {i: ctx.new_group(inside, f"{i}") for i, inside in enumerate(members) if me in inside}
        return sum([await mine[i].all_reduce("SUM", 1, name="x") for i in orders[me]])

    async def main() -> None:
        if goes_through(orders, members):
            await results(len(orders), program)
        else:
            assert (await error_of(program, len(orders))).report.reason == "cycle"

    asyncio.run(main())
