"""Replicas that never come: early returns, abandoned collectives, timeouts, and what cannot be caught."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import (
    CollectiveError,
    CollectiveMismatchError,
    CommunicationOptions,
    IncompleteCollectiveError,
    Reason,
    ReplicaContext,
)
from tests.runtime.programs import error_of, mirrored, run

pytestmark = pytest.mark.anyio
BRIEF = 0.01


def states(error: CollectiveError) -> list[str]:
    return [str(replica.state) for replica in error.report.replicas]


# Ended without it.


# Those who can still make a call are let run until all have settled, or none of them settles any more.


async def test_those_who_are_ready_are_heard_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the whole process has stood still, and the delay is over before anybody ran."""
    monkeypatch.setattr("aiodist._runtime.scheduler._SETTLE_SECONDS", 0.0)

    async def program(ctx: ReplicaContext) -> None:
        for _ in range(3 * (ctx.replica_id_in_sync_group > 1)):
            await checkpoint()
        await (ctx.barrier() if ctx.replica_id_in_sync_group == 0 else ctx.all_reduce("SUM", 1))

    error = await error_of(program, 6)
    assert (error.report.reason, error.report.suspects, states(error)) == (Reason.KIND, (0,), ["waiting"] * 6)


# Cancelled out of it.


async def test_an_abandoning_replica_that_shows_nothing_more_is_judged_after_the_delay() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 1:
            with anyio.move_on_after(BRIEF):
                await ctx.barrier()
        if ctx.replica_id_in_sync_group:
            await anyio.sleep_forever()
        await ctx.barrier()

    error = await error_of(program)
    assert (error.report.reason, error.report.sequence_number) == (Reason.ABANDONED, 0)
    assert 1 in error.report.suspects
    assert states(error) == ["waiting", "running", "running"]
    assert "cancelled out of it, goes on" in str(error)


async def test_a_collective_that_all_give_up_is_an_error_too() -> None:
    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 2:
            with anyio.move_on_after(BRIEF):
                await anyio.sleep_forever()
            return
        with anyio.move_on_after(0):
            await ctx.barrier()

    error = await error_of(program)
    assert type(error) is IncompleteCollectiveError
    assert error.report.sequence_number == 0


async def test_giving_up_a_merge_call_that_then_completes_is_an_error() -> None:
    given_up = anyio.Event()

    async def merge(strategy: Any) -> None:
        await given_up.wait()

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 1:
            with anyio.move_on_after(0):
                await ctx.merge_call(merge, name="m")
            given_up.set()
            await anyio.sleep_forever()
        else:
            await ctx.merge_call(merge, name="m")

    error = await error_of(program)
    assert (error.report.reason, error.report.suspects) == (Reason.ABANDONED, (1,))


# Too late.


async def test_a_time_limit_keeps_no_result_alive_until_it_would_be_up() -> None:
    async def program(ctx: ReplicaContext) -> None:
        alive = [weakref.ref(await ctx.all_reduce("SUM", np.ones(3))) for _ in range(8)]
        gc.collect()
        assert all(reference() is None for reference in alive[:4])

    await run(mirrored(2, timeout=600.0), program)


async def test_a_timeout_tells_who_is_held_up_by_an_earlier_collective() -> None:
    brief = CommunicationOptions(timeout_seconds=BRIEF)

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 2:
            await anyio.sleep_forever()
        first = ctx.all_reduce("SUM", 1)
        if ctx.replica_id_in_sync_group == 1:
            await first
        second = ctx.all_reduce("SUM", 2, brief)
        await second
        await first

    error = await error_of(program)
    assert error.report.reason is Reason.TIMEOUT
    assert "replicas 1 and 2 have not arrived, replica 0 waits in it" in str(error)


# Several at once.


async def test_overlapped_collectives_differ_at_the_first_that_differs() -> None:
    results: dict[int, int] = {}

    async def program(ctx: ReplicaContext) -> None:
        odd = ctx.replica_id_in_sync_group == 2
        first = ctx.all_reduce("SUM", 1)
        second = ctx.all_reduce("MAX" if odd else "SUM", 2)
        third = ctx.all_reduce("SUM", 3.0)
        results[ctx.replica_id_in_sync_group] = await first
        for pending in (third, second):
            with pytest.raises(CollectiveMismatchError):
                await pending

    error = await error_of(program, 4)
    assert (error.report.reason, error.report.sequence_number, error.report.suspects) == (Reason.REDUCE_OP, 1, (2,))
    assert [record.sequence_number for record in error.report.replicas[2].history] == [0, 1, 2]
    assert set(results.values()) <= {4}


async def test_a_merge_function_that_a_report_overtakes_does_not_run() -> None:
    ran: list[Any] = []

    async def program(ctx: ReplicaContext) -> None:
        merged = ctx.merge_call(ran.append)
        await ctx.all_reduce("MAX" if ctx.replica_id_in_sync_group == 2 else "SUM", 1)
        await merged

    error = await error_of(program)
    assert (error.report.reason, error.report.sequence_number, error.report.suspects) == (Reason.REDUCE_OP, 1, (2,))
    assert ran == []
