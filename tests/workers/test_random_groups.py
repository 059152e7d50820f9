"""Groups across workers in circles, with workers that are lost, and in random programs."""

from __future__ import annotations

import random
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist import (
    CollectiveError,
    CollectiveTimeoutError,
    CommunicationOptions,
    DeadlockError,
    ReplicaContext,
    WorkerLostError,
)
from tests.runtime.programs import error_of
from tests.runtime.test_cycles import goes_through, orders_of_groups
from tests.runtime.test_random_programs import Loop, on, seeds
from tests.workers.simulated import Job, Program, on_both_loops, on_one_machine
from tests.workers.test_divergence import without_workers

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_pauses")]


async def opposite(ctx: ReplicaContext) -> None:
    first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")
    for group in (first, second) if ctx.replica_id_in_sync_group == 0 else (second, first):
        await group.barrier()


async def a_join_and_a_group(ctx: ReplicaContext) -> None:
    group = ctx.new_group([0, 1], "pair")
    if ctx.replica_id_in_sync_group:
        await group.barrier()
    await ctx.join()


async def a_circle_of_three(ctx: ReplicaContext) -> None:
    me = ctx.replica_id_in_sync_group
    mine = [pair for pair in ((0, 1), (1, 2), (0, 2)) if me in pair]
    if me == 0:
        mine.reverse()
    for group in [ctx.new_group(pair, name=str(pair)) for pair in mine]:
        await group.barrier(name="x")
    await ctx.barrier()


@pytest.mark.parametrize(
    ("program", "layout"),
    [(opposite, (1, 1)), (opposite, (2,)), (a_join_and_a_group, (1, 1)), (a_circle_of_three, (1, 2, 1)),
     (a_circle_of_three, (1, 1, 1, 1)), (a_circle_of_three, (4,))],
)  # fmt: skip
async def test_a_circle_is_reported_as_on_one_machine(program: Program, layout: tuple[int, ...]) -> None:
    expected = await error_of(program, sum(layout))
    job = Job(*layout)
    for outcome in await job.run(program):
        assert isinstance(outcome, DeadlockError)
        assert without_workers(str(outcome)) == without_workers(str(expected))
        assert outcome.report.suspects == expected.report.suspects


async def test_another_task_of_a_replica_may_still_arrive() -> None:
    async def later(group: ReplicaContext) -> None:
        await anyio.sleep(0.35)
        await group.barrier(name="second")

    async def program(ctx: ReplicaContext) -> None:
        first, second = ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")
        async with anyio.create_task_group() as tasks:
            if ctx.replica_id_in_sync_group == 0:
                tasks.start_soon(later, second)
            else:
                await second.barrier(name="second")
            await first.barrier(name="first")

    await Job(1, 1).values(program)


async def test_a_member_that_does_not_come_in_time_is_named() -> None:
    async def program(ctx: ReplicaContext) -> None:
        group = ctx.new_group([0, 1], "pair")
        if ctx.replica_id_in_sync_group == 1:
            await anyio.sleep_forever()
        await group.all_reduce("SUM", 1, CommunicationOptions(timeout_seconds=0.1))

    for outcome in await Job(1, 1).run(program):
        assert isinstance(outcome, CollectiveTimeoutError)
        assert outcome.report.suspects == (1,)
        assert "#0 of group 'pair' of replicas 0 and 1 timed out after 0.1 s" in str(outcome)


@pytest.mark.parametrize("when", ["before it makes the group", "in the group"])
async def test_a_member_worker_that_is_lost_ends_the_run_everywhere(when: str) -> None:
    job = Job(1, 1, 1)

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        me = ctx.replica_id_in_sync_group
        if me == 1 and when == "in the group":
            await ctx.new_group([0, 1], "pair").barrier(name="x")
        if me == 1:
            job.cluster.lose(1, "has died")
            await anyio.sleep_forever()
        if me == 0:
            group = ctx.new_group([0, 1], "pair")
            await group.barrier(name="x")
            await group.barrier(name="y")
        await ctx.barrier()

    for outcome in await job.run_and_lose(1, program):
        assert isinstance(outcome, WorkerLostError), outcome
        assert outcome.report.suspects == (1,)


@on_both_loops
@settings(max_examples=6)
@given(drawn=orders_of_groups(), cuts=st.lists(st.booleans(), min_size=4, max_size=4))
def test_any_order_of_groups_goes_through_or_is_a_circle(
    loop: Loop, drawn: tuple[list[list[int]], list[list[int]]], cuts: list[bool]
) -> None:
    orders, members = drawn

    async def program(ctx: ReplicaContext) -> int:
        me = ctx.replica_id_in_sync_group
        mine = {i: ctx.new_group(inside, f"{i}") for i, inside in enumerate(members) if me in inside}
        return sum([await mine[i].all_reduce("SUM", 1, name="x") for i in orders[me]])

    async def main() -> None:
        job = Job(*layout_of(len(orders), cuts))
        outcomes = await job.run(program)
        if goes_through(orders, members):
            assert not any(isinstance(outcome, Exception) for outcome in outcomes), outcomes
        else:
            assert {outcome.report.reason for outcome in outcomes} == {"cycle"}
            assert len({str(outcome) for outcome in outcomes}) == 1

    on(loop, main)


def layout_of(replicas: int, cuts: list[bool]) -> list[int]:
    """Return how many replicas each worker has; cuts say behind which replicas a worker's end."""
    ends = [i + 1 for i in range(replicas - 1) if cuts[i]]
    return [b - a for a, b in zip([0, *ends], [*ends, replicas], strict=True)]


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[str], bool]]]:
    """Draw a number of replicas, and groups of them, each with its steps, and whether its members join at the end."""
    replicas = draw(st.integers(2, 5))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.permutations(range(replicas)))[: draw(st.integers(1, replicas))]
        steps = draw(
            st.lists(st.sampled_from(["sum", "gather", "barrier", "scatter", "large"]), min_size=1, max_size=4)
        )
        groups.append((list(members), steps, draw(st.booleans())))
    return replicas, groups


def issue(group: ReplicaContext, kind: str) -> Any:
    me, n = group.replica_id_in_sync_group, group.num_replicas_in_sync
    if kind == "sum":
        return group.all_reduce("SUM", np.arange(3) * me)
    if kind == "large":
        return group.all_reduce("SUM", np.arange(300) + me)
    if kind == "gather":
        return group.all_gather(np.full(me + 1, me), 0)
    if kind == "scatter":
        return group.reduce_scatter("SUM", np.arange(2 * n) + me)
    return group.barrier()


async def carry_out(group: ReplicaContext, steps: list[str], joins: bool, pauses: random.Random) -> list[Any]:
    found: list[Any] = []
    for kind in steps + ["barrier"] * (group.replica_id_in_sync_group if joins else 0):
        for _ in range(pauses.choice((0, 0, 1, 3))):
            await anyio.lowlevel.checkpoint()
        result = await issue(group, kind)
        found.append(None if result is None else result.tolist())
    return [*found, await group.join()] if joins else found


@on_both_loops
@settings(max_examples=20)
@given(drawn=programs(), cuts=st.lists(st.booleans(), min_size=4, max_size=4), seed=seeds, odd=st.integers(0, 9))
def test_random_programs_give_what_one_machine_gives_and_name_who_differs(
    loop: Loop, drawn: Any, cuts: list[bool], seed: int, odd: int
) -> None:
    replicas, groups = drawn

    async def program(ctx: ReplicaContext, wrong: int = -1) -> str:
        me = ctx.replica_id_in_sync_group
        pauses = random.Random(seed + me)
        found: list[list[Any]] = []
        for number, (members, steps, joins) in enumerate(groups):
            if me in members:
                group = ctx.new_group(members, f"{number}")
                if me == wrong and not found:
                    await group.all_reduce("MAX", 1.0)
                found.append(await carry_out(group, steps, joins, pauses))
        return repr(found)

    async def main() -> None:
        layout = layout_of(replicas, cuts)
        job = Job(*layout)
        assert await job.values(program) == list(await on_one_machine(program, replicas))
        first = next((members for members, *_ in groups if len(members) > 2), None)
        if first is not None and groups[0][0] == first:
            wrong = first[odd % len(first)]
            for outcome in await job.run(lambda ctx: program(ctx, wrong)):
                assert isinstance(outcome, CollectiveError)
                assert outcome.report.suspects == (wrong,), outcome

    on(loop, main)
