"""Observers: told everything that happens in the runs that they listen to, in order, and nothing of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from aiodist import CollectiveError, MirroredStrategy, ReduceOp, ReplicaContext, get_replica_context
from aiodist.collective.describe import call_text
from aiodist.collective.observer import observe_process, observing, who_listens
from tests.runtime.programs import Relay, mirrored, run

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.member import Member
    from aiodist.collective.rendezvous import Rendezvous

pytestmark = pytest.mark.anyio


class Listener:
    """Writes down what it is told, as text."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.times: list[int] = []

    def note(self, group: SyncGroup, line: str) -> None:
        self.heard.append(line)
        self.times.append(group.now())

    def run_begun(self, group: SyncGroup, fn: Callable[..., Any]) -> None:
        self.note(group, f"run of {fn.__name__} on {len(group.members)}")

    def started(self, member: Member) -> None:
        self.note(member.group, f"{member.replica_id} started")

    def arrived(self, member: Member, meeting: Rendezvous) -> None:
        call = call_text(meeting.call_of(member.replica_id)[0])
        self.note(member.group, f"{member.replica_id} at #{meeting.number} {call}")

    def waits(self, member: Member, meeting: Rendezvous) -> None:
        self.note(member.group, f"{member.replica_id} waits #{meeting.number}")

    def resumed(self, member: Member, meeting: Rendezvous) -> None:
        self.note(member.group, f"{member.replica_id} resumed #{meeting.number}")

    def completed(self, group: SyncGroup, meeting: Rendezvous) -> None:
        error = "" if meeting.error is None else f" with {type(meeting.error).__name__}"
        self.note(group, f"complete #{meeting.number}{error}")

    def judged(self, group: SyncGroup, verdict: CollectiveError) -> None:
        self.note(group, f"verdict {verdict.report.reason}")

    def ended(self, member: Member, error: BaseException | None) -> None:
        self.note(member.group, f"{member.replica_id} {member.end}{f' {error!r}' if error else ''}")

    def run_ended(self, group: SyncGroup) -> None:
        self.note(group, "run ended")


async def reduce_once(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(ReduceOp.SUM, np.ones(3, np.float32))


async def test_run_is_told_event_by_event() -> None:
    listener = Listener()
    with observing(listener):
        await run(mirrored(2), reduce_once)
    assert listener.heard == [
        "run of replica on 2",
        "0 started",
        "0 at #0 all_reduce(SUM, float32[3])",
        "0 waits #0",
        "1 started",
        "1 at #0 all_reduce(SUM, float32[3])",
        "complete #0",
        "1 waits #0",
        "0 resumed #0",
        "0 exited",
        "1 resumed #0",
        "1 exited",
        "run ended",
    ]
    assert listener.times == sorted(listener.times)


async def test_disagreement_is_told_with_its_verdict() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await (ctx.barrier() if ctx.replica_id_in_sync_group else ctx.all_reduce(ReduceOp.SUM, 1.0))

    listener = Listener()
    with observing(listener), pytest.raises(CollectiveError):
        await run(mirrored(2), program)
    told = [line for line in listener.heard if "waits" not in line and "started" not in line]
    assert told == [
        "run of replica on 2",
        "0 at #0 all_reduce(SUM, float)",
        "1 at #0 barrier()",
        "verdict kind",
        "complete #0 with CollectiveMismatchError",
        "1 resumed #0",  # whose own call closed the group: it need not wait
        "1 failed",
        "0 resumed #0",
        "0 failed",
        "run ended",
    ]


async def test_failure_of_a_replica_is_told_with_its_exception() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group:
            raise ValueError("no data")
        await ctx.barrier()

    listener = Listener()
    with observing(listener), pytest.raises(ValueError, match="no data"):
        await run(mirrored(2), program)
    assert "1 failed ValueError('no data')" in listener.heard
    assert listener.heard[-3:] == ["0 resumed #0", "0 cancelled", "run ended"]


async def test_merge_call_is_complete_when_its_function_has_returned() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await ctx.merge_call(lambda strategy: listener.heard.append("merging"))

    listener = Listener()
    with observing(listener):
        await run(mirrored(2), program)
    told = [line for line in listener.heard if line.startswith(("merging", "complete"))]
    assert told == ["merging", "complete #0"]


async def test_runs_beside_the_block_are_not_told() -> None:
    mine, theirs = Listener(), Listener()

    async def observed_run(listener: Listener, turns: Relay) -> None:
        with observing(listener):
            await run(mirrored(3), reduce_once)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observed_run, mine, Relay([0]))
        tasks.start_soon(observed_run, theirs, Relay([0]))
        tasks.start_soon(run, mirrored(5), reduce_once)
    assert sorted(mine.heard) == sorted(theirs.heard)
    assert mine.heard[0] == "run of replica on 3"
    assert len(mine.heard) == 18


async def test_several_observers_are_told_the_same() -> None:
    outer, inner = Listener(), Listener()
    with observing(outer), observing(inner):
        await run(mirrored(2), reduce_once)
        assert inner.heard == outer.heard
    with observing(outer):
        await run(mirrored(2), reduce_once)
    assert len(outer.heard) == 2 * len(inner.heard)


def test_block_around_the_event_loop_observes_its_runs() -> None:
    async def replica() -> None:
        await get_replica_context().barrier()

    listener = Listener()
    with observing(listener):
        asyncio.run(MirroredStrategy(["CPU:0"]).run(replica))
    asyncio.run(MirroredStrategy(["CPU:0"]).run(replica))
    assert listener.heard.count("run ended") == 1


def test_nobody_listens_by_itself() -> None:
    assert who_listens() is None


async def test_who_listens_to_the_process_is_told_of_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    monkeypatch.setattr("aiodist.collective.observer._process_wide", [])
    observe_process(lambda: listener)
    await run(mirrored(2), reduce_once)
    assert listener.heard[-1] == "run ended"
