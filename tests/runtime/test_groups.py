"""Groups of some of the replicas: their members, their collectives, and what happens if members disagree."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

import aiodist
from aiodist import (
    DeadlockError,
    IncompleteCollectiveError,
    ReplicaContext,
    ReplicaContextError,
    Variable,
    get_replica_context,
)
from aiodist._runtime import inspection
from tests.runtime.programs import error_of, mirrored, replica, results, run, still_works

pytestmark = pytest.mark.anyio


async def test_ids_in_a_group_and_in_a_group_of_it_follow_the_order_given() -> None:
    async def program(ctx: ReplicaContext) -> Any:
        me = replica()
        if me == 1:
            return None
        group = ctx.new_group([3, 0, 2], name="experts")
        assert (group.num_replicas_in_sync, group.strategy, group.devices) == (3, ctx.strategy, ctx.devices)
        ours = f"replica {group.replica_id_in_sync_group} of 3 in group 'experts' of replicas 0, 2 and 3"
        assert repr(group) == f"<ReplicaContext: {ours} on CPU:{me}>"
        gathered = (await group.all_gather(np.array([me]), 0)).tolist()
        if me == 0:
            return gathered
        inner = group.new_group([2, 0])
        return gathered, inner.replica_id_in_sync_group, await inner.all_reduce("SUM", me)

    assert await results(4, program) == ([3, 0, 2], None, ([3, 0, 2], 0, 5), ([3, 0, 2], 1, 5))


async def test_merge_calls_threads_and_buffers_work_in_a_group() -> None:
    """Every other collective is in the random programs."""

    async def merge(strategy: aiodist.Strategy, value: Any) -> Any:
        assert aiodist.in_cross_replica_context()
        assert len(strategy.experimental_local_results(value)) == 2
        return await strategy.reduce("SUM", value, None), await strategy.extended.reduce_to("SUM", value, "CPU:0")

    groups: list[ReplicaContext] = []

    async def program(ctx: ReplicaContext) -> None:
        me, out = replica(), np.zeros(2, int)
        groups.append(group := ctx.new_group([me % 2, me % 2 + 2]))
        total = 2 * (me % 2) + 2
        assert await group.merge_call(merge, (me,)) == (total, total)
        assert await group.run_sync(get_replica_context) is ctx
        assert await group.all_reduce("SUM", np.array([me, 10 + me]), out=out) is out
        assert out.tolist() == [total, total + 20]
        await ctx.barrier()
        with pytest.raises(ReplicaContextError, match=r"of replica . of 4 inside replica . of 4"):
            groups[(me + 1) % 4].barrier()  # another replica's
        await ctx.barrier()

    await run(mirrored(4), program)
    with pytest.raises(ReplicaContextError, match="whose function has ended"):
        groups[0].barrier()
    with pytest.raises(ReplicaContextError, match="whose function has ended"), groups[0]:
        groups[0].new_group([0])


async def test_replica_outside_any_run_makes_a_group_and_joins_alone() -> None:
    ctx = get_replica_context()
    with ctx.new_group([0]) as group:
        assert get_replica_context() is group
        assert await group.all_reduce("SUM", 3) == 3
        assert await group.merge_call(lambda _, x: x + 1, (1,)) == 2
    assert await ctx.join() == 0
    assert await ctx.all_reduce("SUM", 2) == 2


async def test_variables_in_a_group_belong_to_the_strategy() -> None:
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
        assert len(ctx._me.member.group.ledger.groups()) == 1
        assert not any(ref() for ref in alive)

    await run(mirrored(2), program)


# Members that fail or disagree.


@pytest.mark.filterwarnings("ignore:replica 0 never awaited")
async def test_collective_that_was_dropped_with_its_group_is_reported_at_the_end() -> None:
    async def program(ctx: ReplicaContext) -> None:
        group = ctx.new_group([0, 1], "experts")
        if replica() == 0:
            group.barrier()
        del group
        gc.collect()

    assert isinstance(await error_of(program, 2), IncompleteCollectiveError)


async def test_failure_ends_all_groups_and_names_the_replicas_that_waited_in_one() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if replica() == 3:
            await checkpoint()
            raise ZeroDivisionError
        await ctx.new_group([2, 3] if replica() == 2 else [0, 1, 3]).barrier()

    strategy = mirrored(4)
    with pytest.raises(ZeroDivisionError) as caught:
        await run(strategy, program)
    waited = "replicas 0 and 1 were waiting in barrier #0 of the group of replicas 0, 1 and 3 at "
    assert waited in str(caught.value.__notes__)
    await still_works(strategy)


# Replicas that wait for each other in different groups: reported at once if it is certain, otherwise never.


async def ring(ctx: ReplicaContext, *, size: int) -> None:
    """Use the groups of neighbours on a ring, each replica first the one with the next: all wait for each other."""
    me = replica()
    for pair in [(me, (me + 1) % size), ((me - 1) % size, me)]:
        await ctx.new_group(pair, name=str(pair)).barrier(name="x")


class Window(nullcontext[None]):
    """A context manager of the program, with attributes named like those of timeouts."""

    when = deadline = "tomorrow"


@pytest.mark.every_loop
async def test_neither_a_time_limit_outside_a_shield_nor_the_programs_own_context_manager_ends_a_wait() -> None:
    async def program(ctx: ReplicaContext) -> None:
        with anyio.move_on_after(0), anyio.CancelScope(shield=True), Window():
            await ring(ctx, size=3)

    assert (await error_of(program)).report.reason == "cycle"


async def test_a_ring_of_thousands_of_groups_is_found() -> None:
    """This takes seconds; if each group cost a look at all others, it would take minutes."""
    with pytest.raises(DeadlockError) as caught:
        await run(mirrored(1_024), partial(ring, size=1_024))
    assert len(caught.value.report.suspects) == 1_024
    assert len(str(caught.value).splitlines()) <= 40


@pytest.mark.every_loop("asyncio", "uvloop")
async def test_no_deadlock_is_reported_while_a_timer_may_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 1 uses the second group before the first, and so does replica 0, in a timer; test_stall has others."""
    checks: list[Any] = []
    deadlocked = inspection.deadlocked

    def counted(*args: Any) -> object:
        checks.append(args)
        return deadlocked(*args)

    async def program(ctx: ReplicaContext) -> None:
        first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")
        started: list[asyncio.Task[None]] = []

        async def use_second() -> None:
            await second.barrier(name="second")

        if replica() == 1:
            await use_second()
        else:
            asyncio.get_running_loop().call_later(0.15, lambda: started.append(asyncio.create_task(use_second())))
        await first.barrier(name="first")

    monkeypatch.setattr(inspection, "deadlocked", counted)
    await run(mirrored(2), program)
    assert checks


def goes_through(orders: Sequence[Sequence[int]], members: Sequence[Sequence[int]]) -> bool:
    """Return whether replicas that use groups in these orders, one collective each, reach their ends."""
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
    group = st.sets(st.integers(0, replicas - 1), min_size=2).map(sorted)
    members = draw(st.lists(group, min_size=1, max_size=6))
    mine = [[group for group, inside in enumerate(members) if i in inside] for i in range(replicas)]
    return [draw(st.permutations(own)) for own in mine], members


@given(drawn=orders_of_groups())
def test_any_order_of_groups_completes_or_is_a_cycle(drawn: tuple[list[list[int]], list[list[int]]]) -> None:
    orders, members = drawn

    async def program(ctx: ReplicaContext) -> int:
        mine = {i: ctx.new_group(inside, f"{i}") for i, inside in enumerate(members) if replica() in inside}
        return sum([await mine[i].all_reduce("SUM", 1, name="x") for i in orders[replica()]])

    async def main() -> None:
        if goes_through(orders, members):
            await results(len(orders), program)
        else:
            assert (await error_of(program, len(orders))).report.reason == "cycle"

    asyncio.run(main())
