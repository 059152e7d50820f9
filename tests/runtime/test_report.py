"""What a report holds beside its verdict: histories, places, stacks, and that it is a value."""

from __future__ import annotations

import pickle
from pathlib import Path

import anyio
import numpy as np
import pytest

from aiodist import CallRecord, CollectiveReport, ReduceOp, ReplicaContext, ReplicaState
from aiodist._core.ledger import HISTORY
from tests.runtime.programs import error_of

pytestmark = pytest.mark.anyio


def line_of(text: str) -> int:
    """Return the number of the one line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return found


async def inner(ctx: ReplicaContext) -> None:
    await ctx.all_reduce(ReduceOp.SUM, np.zeros(3, np.float32))  # the call


async def usual(ctx: ReplicaContext) -> None:
    await ctx.barrier()  # the first barrier
    await inner(ctx)  # the usual caller


async def parting(ctx: ReplicaContext) -> None:
    if ctx.replica_id_in_sync_group == 1:
        await ctx.barrier(name="odd")  # the odd call
    await usual(ctx)


async def test_a_report_tells_what_each_replica_does_and_where() -> None:
    async def program(ctx: ReplicaContext) -> None:
        await usual(ctx)
        await parting(ctx)  # the parting

    report = (await error_of(program)).report
    assert report.sequence_number == 2
    zero, one, two = report.replicas
    assert [(r.replica_id, r.device, r.state) for r in report.replicas] == [
        (i, f"CPU:{i}", ReplicaState.WAITING) for i in range(3)
    ]
    assert (zero.call, one.call) == ("barrier()", "barrier(name='odd')")
    assert zero.location is not None
    assert one.location is not None
    assert one.location == (__file__, line_of("the odd call"), "parting")
    assert zero.location == two.location == (__file__, line_of("the first barrier"), "usual")
    assert one.history == (
        CallRecord(0, "barrier()", zero.location),
        CallRecord(1, "all_reduce(SUM, float32[3])", one.history[1].location),
        CallRecord(2, "barrier(name='odd')", one.location),
    )
    assert one.history[1].location == (__file__, line_of("the call"), "inner")
    own = [(place.line, place.function) for place in one.stack if place.file == __file__]
    assert own == [(line_of("the parting"), "program"), (line_of("the odd call"), "parting")]
    assert "aiodist" not in {place.function for place in one.stack}


async def test_a_report_is_a_value() -> None:
    report = (await error_of(parting)).report
    copy = pickle.loads(pickle.dumps(report))
    assert isinstance(copy, CollectiveReport)
    assert copy == report
    assert str(copy) == str(report)
    assert hash(copy) == hash(report)


async def test_an_error_can_be_pickled() -> None:
    error = await error_of(parting)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.report == error.report


async def test_history_keeps_the_last_ones() -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(HISTORY + 10):
            await ctx.barrier()
        if ctx.replica_id_in_sync_group:
            await ctx.all_reduce(ReduceOp.SUM, 1)

    report = (await error_of(program)).report
    zero, one, _ = report.replicas
    assert [record.sequence_number for record in zero.history] == list(range(10, HISTORY + 10))
    assert [record.sequence_number for record in one.history] == list(range(10, HISTORY + 11))


async def test_history_shows_each_replicas_own_calls_where_a_name_joined_them() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 1:
            await ctx.barrier(name="here")  # the one
        else:
            await ctx.barrier(name="here")  # the other
        if ctx.replica_id_in_sync_group == 2:
            await ctx.barrier()

    replicas = (await error_of(program)).report.replicas
    lines = [line_of("the other"), line_of("the one"), line_of("the other")]
    assert [replica.history[0].location.line for replica in replicas] == lines


async def test_a_running_replica_has_a_stack_and_no_call() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 2:
            await anyio.Event().wait()  # stuck
        await ctx.barrier()

    running = (await error_of(program, timeout=0.01)).report.replicas[2]
    assert (running.state, running.call, running.location, running.history) == ("running", None, None, ())
    assert (line_of("stuck"), "program") in [(place.line, place.function) for place in running.stack]
