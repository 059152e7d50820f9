"""Observers see the events of a run in their order, and races are looked for in runs that are observed.

Whose runs an observer sees, the tests of traces show.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import CollectiveError, ReplicaContext, ReplicaState
from aiodist._core.instrument import ObservedRun, Observer, observing
from aiodist._core.ledger import Member, Slot
from tests.runtime.programs import Program, mirrored, replica, run, turns
from tests.runtime.warned import warned

pytestmark = pytest.mark.anyio


class Listener(Observer):
    """Writes down each event, as text."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def run_begun(self, run: ObservedRun, fn: Callable[..., Any]) -> None:
        self.heard.append(f"run of {fn.__name__} on {len(run.devices)}")

    def started(self, member: Member) -> None:
        self.heard.append(f"{member.replica_id} started")

    def posted(self, member: Member, slot: Slot) -> None:
        self.heard.append(f"{member.replica_id} at #{slot.number} {slot.post_of(member.position).call}")

    def waits(self, member: Member, slot: Slot) -> None:
        self.heard.append(f"{member.replica_id} waits #{slot.number}")

    def resumed(self, member: Member, slot: Slot) -> None:
        self.heard.append(f"{member.replica_id} resumed #{slot.number}")

    def completed(self, slot: Slot) -> None:
        error = "" if slot.error is None else f" with {type(slot.error).__name__}"
        self.heard.append(f"complete #{slot.number}{error}")

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:
        self.heard.append(f"report {error.report.reason}")

    def ended(self, member: Member, end: ReplicaState, error: BaseException | None) -> None:
        self.heard.append(f"{member.replica_id} {end}{f' {error!r}' if error else ''}")

    def run_ended(self, run: ObservedRun) -> None:
        self.heard.append("run ended")


async def heard_of(program: Program, error: type[Exception] | None = None) -> list[str]:
    """Return what each of two observers hears of a run of two replicas, out of which that error comes."""
    outer, inner = Listener(), Listener()
    with observing(outer), observing(inner), pytest.raises(error) if error else nullcontext():
        await run(mirrored(2), program)
    assert outer.heard == inner.heard
    return outer.heard


async def test_events_of_a_run() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await ctx.all_reduce("SUM", np.ones(3, np.float32))
        await ctx.merge_call(print, name="m")

    heard = await heard_of(program)
    assert heard[:9] == [
        "run of replica on 2",
        "0 started",
        "0 at #0 all_reduce(SUM, float32[3])",
        "0 waits #0",
        "1 started",
        "1 at #0 all_reduce(SUM, float32[3])",
        "complete #0",
        "1 waits #0",
        "0 resumed #0",
    ]
    assert heard[-6:] == ["complete #1", "0 resumed #1", "0 exited", "1 resumed #1", "1 exited", "run ended"]


async def test_events_of_a_disagreement() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await (ctx.barrier() if replica() else ctx.all_reduce("SUM", 1.0))

    heard = await heard_of(program, CollectiveError)
    assert [line for line in heard if "waits" not in line and "started" not in line] == [
        "run of replica on 2",
        "0 at #0 all_reduce(SUM, float)",
        "1 at #0 barrier()",
        "report kind",
        "complete #0 with CollectiveMismatchError",
        "1 resumed #0",  # whose own call closed the group: it need not wait
        "1 failed",
        "0 resumed #0",
        "0 failed",
        "run ended",
    ]


# Tasks of one replica that race for its next collective are warned of, in runs that are observed.


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
