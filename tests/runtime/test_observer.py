"""Observers: told everything that happens in the runs that they observe, in order, and nothing of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import CollectiveError, ReplicaContext, ReplicaState
from aiodist._core.instrument import ObservedRun, Observer, observe_process, observing, who_observes
from aiodist._core.ledger import Member, Slot
from tests.runtime.programs import Program, mirrored, run

pytestmark = pytest.mark.anyio


class Listener(Observer):
    """Writes down what it is told, as text."""

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
        self.heard.append(
            f"complete #{slot.number}{'' if slot.error is None else f' with {type(slot.error).__name__}'}"
        )

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:
        self.heard.append(f"report {error.report.reason}")

    def ended(self, member: Member, end: ReplicaState, error: BaseException | None) -> None:
        self.heard.append(f"{member.replica_id} {end}{f' {error!r}' if error else ''}")

    def run_ended(self, run: ObservedRun) -> None:
        self.heard.append("run ended")


async def reduce_once(ctx: ReplicaContext) -> None:
    await ctx.all_reduce("SUM", np.ones(3, np.float32))


async def heard_of(program: Program, error: type[Exception] | None = None) -> list[str]:
    """Return what an observer is told of a run of two replicas, out of which that error comes."""
    listener = Listener()
    with observing(listener), pytest.raises(error) if error else nullcontext():
        await run(mirrored(2), program)
    return listener.heard


async def test_a_run_is_told_event_by_event() -> None:
    assert await heard_of(reduce_once) == [
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


async def test_a_disagreement_is_told_with_its_report() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await (ctx.barrier() if ctx.replica_id_in_sync_group else ctx.all_reduce("SUM", 1.0))

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


async def test_a_failure_of_a_replica_is_told_with_its_exception() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group:
            raise ValueError("no data")
        await ctx.barrier()

    heard = await heard_of(program, ValueError)
    assert "1 failed ValueError('no data')" in heard
    assert heard[-3:] == ["0 resumed #0", "0 cancelled", "run ended"]


async def test_a_merge_call_is_complete_when_its_function_has_returned() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await ctx.merge_call(lambda strategy: listener.heard.append("merging"))

    listener = Listener()
    with observing(listener):
        await run(mirrored(2), program)
    told = [line for line in listener.heard if line.startswith(("merging", "complete"))]
    assert told == ["merging", "complete #0"]


async def test_runs_beside_the_block_are_not_told() -> None:
    mine, theirs = Listener(), Listener()

    async def observed_run(listener: Listener) -> None:
        with observing(listener):
            await run(mirrored(3), reduce_once)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observed_run, mine)
        tasks.start_soon(observed_run, theirs)
        tasks.start_soon(run, mirrored(5), reduce_once)
    assert sorted(mine.heard) == sorted(theirs.heard)
    assert mine.heard[0] == "run of replica on 3"
    assert len(mine.heard) == 18


def test_several_observers_are_told_the_same_also_by_blocks_around_the_event_loop() -> None:
    outer, inner = Listener(), Listener()
    with observing(outer), observing(inner):
        asyncio.run(run(mirrored(2), reduce_once))
        assert inner.heard == outer.heard
    with observing(outer):
        asyncio.run(run(mirrored(2), reduce_once))
    asyncio.run(run(mirrored(1), reduce_once))
    assert len(outer.heard) == 2 * len(inner.heard)


async def test_who_observes_the_process_is_told_of_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert who_observes() is None
    listener = Listener()
    monkeypatch.setattr("aiodist._core.instrument._process_wide", [])
    observe_process(lambda: listener)
    await run(mirrored(2), reduce_once)
    assert listener.heard[-1] == "run ended"
