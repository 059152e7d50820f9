"""Tasks of one replica that race for its next collective are warned of, in runs that are observed.

Which events an observer sees, the tests of traces show.
"""

from __future__ import annotations

from contextlib import nullcontext

import anyio
import pytest

from aiodist import ReplicaContext
from aiodist._core.instrument import Observer, observing
from tests.runtime.programs import Program, mirrored, run, turns, warned

pytestmark = pytest.mark.anyio


async def warnings_of(program: Program, *, observed: bool = True) -> list[str]:
    """Return the texts of the warnings that two replicas' run of a program gives."""
    with warned() as found, observing(Observer()) if observed else nullcontext():
        await run(mirrored(2, "signature"), program)
    return [warning.text for warning in found]


async def actor(ctx: ReplicaContext) -> None:
    for _ in range(5):
        await ctx.all_reduce("SUM", 1.0)


async def learner(ctx: ReplicaContext) -> None:
    for _ in range(5):
        await ctx.all_reduce("SUM", 2.0)


async def side_by_side(ctx: ReplicaContext) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor, ctx)
        tasks.start_soon(learner, ctx)


async def beside_its_child(ctx: ReplicaContext) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor, ctx)
        await learner(ctx)


@pytest.mark.parametrize(
    ("program", "other"), [(side_by_side, "the task of learner() at "), (beside_its_child, "replica 0")]
)
async def test_racing_tasks_are_named_with_their_lines(program: Program, other: str) -> None:
    (text,) = await warnings_of(program)  # one for all replicas
    assert text.startswith("tasks of replica 0 race for the next collective: the task of actor() at ")
    assert text.count("issued all_reduce(SUM, float) at ") == 2
    assert f", {other}" in text
    assert text.endswith("may differ: await them one after the other, or give each a group")
    assert await warnings_of(program, observed=False) == []


async def in_turn(ctx: ReplicaContext) -> None:
    await ctx.barrier()
    for work in (actor, learner, actor):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, ctx)
        await ctx.barrier()


async def a_group_each(ctx: ReplicaContext) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor, ctx.new_group([0, 1], "actors"))
        tasks.start_soon(learner, ctx.new_group([0, 1], "learners"))


async def one_that_issues_beside_one_that_does_not(ctx: ReplicaContext) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns)
        await actor(ctx)


async def a_child_of_a_child(ctx: ReplicaContext) -> None:
    async def child() -> None:
        await actor(ctx)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(learner, ctx)
        await actor(ctx)

    await learner(ctx)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child)
    await learner(ctx)


@pytest.mark.parametrize(
    "program", [in_turn, a_group_each, one_that_issues_beside_one_that_does_not, a_child_of_a_child]
)
async def test_tasks_in_an_order_give_no_warning(program: Program) -> None:
    assert await warnings_of(program) == []
