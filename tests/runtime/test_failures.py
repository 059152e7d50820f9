"""Replicas that fail, never come or give up: what comes out of the run, and that nobody is left waiting."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import (
    CollectiveError,
    CollectiveMismatchError,
    Reason,
    ReplicaContext,
)
from aiodist._core import analysis
from tests.runtime.programs import error_of, here, mirrored, replica, run, still_works, turns

pytestmark = pytest.mark.anyio
BRIEF = 0.01


class FirstError(Exception):
    pass


class SecondError(Exception):
    pass


async def failure_of(program: Callable[[], Any], replicas: int = 3, kind: type[BaseException] = FirstError) -> Any:
    """Return what comes out of a run; the same strategy must work afterwards."""
    strategy = mirrored(replicas)
    with pytest.raises(kind) as caught:
        await strategy.run(program)
    await still_works(strategy)
    return caught.value


async def part() -> None:
    """Let replica 0 call something else than the others."""
    await (here().barrier() if replica() else here().all_reduce("SUM", 1))


# A replica's own exception cancels the others, and comes out of run as itself.


@pytest.mark.parametrize("error", [FirstError("mine"), ExceptionGroup("mine", [FirstError(), SecondError()])])
async def test_exception_comes_out_as_itself_with_a_note(error: Exception) -> None:
    async def program() -> None:
        if replica() == 1:
            raise error
        await here().barrier()

    assert await failure_of(program, kind=type(error)) is error
    (note,) = error.__notes__
    assert note.startswith("replica 1 of 3 on CPU:1; replica 0 was waiting in barrier #0 at ")


async def test_exception_of_a_plain_function_begins_no_other() -> None:
    begun = []

    def program() -> None:
        begun.append(replica())
        raise FirstError

    assert (await failure_of(program)).__notes__ == ["replica 0 of 3 on CPU:0"]
    assert begun == [0]


async def test_a_cancellation_that_nobody_asked_for_is_an_error_and_no_cancellation_of_the_caller() -> None:
    async def program() -> None:
        await here().barrier()
        task = asyncio.current_task()
        if replica() == 1 and task is not None:
            task.cancel()
            await checkpoint()

    error = await failure_of(program, kind=RuntimeError)
    assert str(error).startswith("replica 1 was cancelled, and nobody has cancelled the run")
    assert isinstance(error.__cause__, asyncio.CancelledError)


def when_unwinding(*errors: Exception | None) -> Callable[[], Any]:
    """Return a program in which replica 1 fails, and each raises what is given for it while it unwinds."""

    async def program() -> None:
        try:
            await here().barrier()
            if replica() != 1:
                await anyio.sleep_forever()
        finally:
            error = errors[replica()]
            if error is not None:
                raise error

    return program


async def test_several_failures_come_out_as_one_with_notes_by_type_as_a_group_and_an_object_once() -> None:
    error = await failure_of(when_unwinding(*(FirstError(f"own of {i}") for i in range(3))))
    assert str(error) == "own of 0"
    assert error.__notes__[0].startswith("replica 0 of 3 on CPU:0")
    assert error.__notes__[1:] == [f"replica {i} failed, too: FirstError: own of {i}" for i in (1, 2)]
    group = await failure_of(when_unwinding(SecondError(), FirstError(), None), kind=ExceptionGroup)
    assert [type(error) for error in group.exceptions] == [SecondError, FirstError]
    notes = [error.__notes__[0].partition(";")[0] for error in group.exceptions]
    assert notes == ["replica 0 of 3 on CPU:0", "replica 1 of 3 on CPU:1"]
    wordless = await failure_of(when_unwinding(FirstError(), FirstError(), None))
    assert wordless.__notes__[1:] == ["replica 1 failed, too: FirstError"]
    one = FirstError()
    assert await failure_of(when_unwinding(one, one, one)) is one
    assert len(one.__notes__) == 1


@pytest.mark.parametrize(
    ("replicas", "text", "last"),
    [
        (1_024, "no data", "replicas 1-1023 failed, too: FirstError: no data"),
        (200, "none in {1}", "replicas 3-199 failed, too: FirstError: none in 3"),
        (200, "none in {0}", "more like these"),
    ],
)
async def test_crowds_that_fail_have_a_handful_of_notes(replicas: int, text: str, last: str) -> None:
    async def program() -> None:
        with anyio.CancelScope(shield=True):
            await here().barrier()
            raise FirstError(text.format(replica(), min(replica(), 3)))

    with pytest.raises(FirstError) as caught:
        await mirrored(replicas).run(program)
    notes = caught.value.__notes__
    assert len(notes) <= 6
    assert any(note.endswith(last) for note in notes), notes
    assert all(len(note) < 200 for note in notes)


@pytest.mark.parametrize("fails", [False, True])
async def test_what_crowds_leave_behind_is_analysed_once(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    analyses = []
    analyse = analysis.analyse

    def counted(*args: Any, **more: Any) -> Any:
        analyses.append(args)
        return analyse(*args, **more)

    async def program() -> None:
        await here().barrier()
        if fails and replica() == 0:
            raise FirstError
        with suppress(CollectiveError):
            await part()

    monkeypatch.setattr(analysis, "analyse", counted)
    with pytest.raises(FirstError if fails else CollectiveMismatchError):
        await mirrored(200).run(program)
    assert len(analyses) <= 1


# A disagreement, and exceptions beside it.


@pytest.mark.parametrize("shield", [False, True])
async def test_analysis_that_fails_keeps_nobody_waiting(shield: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    async def program() -> None:
        with anyio.CancelScope(shield=shield):
            await part()

    monkeypatch.setattr(analysis, "analyse", fail)
    strategy = mirrored(3)
    with pytest.raises(CollectiveError, match="the analysis of it failed: ZeroDivisionError: a bug") as caught:
        await strategy.run(program)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    await still_works(strategy)


async def test_join_is_analysed_where_call_paths_are_compared() -> None:
    async def program(ctx: ReplicaContext) -> None:
        with anyio.CancelScope(shield=True):
            await (ctx.join() if replica() == 0 else ctx.barrier() if replica() == 1 else ctx.all_reduce("SUM", 1))

    report = (await error_of(program, order_check="call_path")).report
    assert (report.reason, report.replicas[0].call) == ("kind", "join()")


async def test_failure_while_unwinding_from_a_mismatch_stands_in_a_note() -> None:
    async def program() -> None:
        try:
            await part()
        finally:
            if replica() == 1:
                raise SecondError("clean-up")

    error = await failure_of(program, 2, CollectiveMismatchError)
    assert error.__notes__ == ["while it unwound, replica 1 raised SecondError: clean-up"]


async def test_mismatch_that_came_out_of_a_task_group_is_no_failure_of_its_own() -> None:
    async def program() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(part)

    assert not hasattr(await failure_of(program, 2, CollectiveMismatchError), "__notes__")


@pytest.mark.parametrize("error", [FirstError("mine"), ExceptionGroup("tasks", [FirstError("mine")])])
@pytest.mark.parametrize("where", ["itself", "a child", "a child that cleans up"])
async def test_disagreement_is_caused_by_what_the_odd_replica_was_handling(error: Exception, where: str) -> None:
    async def fail() -> None:
        try:
            raise error
        finally:
            if where == "a child that cleans up":
                await here().barrier()

    async def program() -> None:
        try:
            if replica() == 1:
                if where == "itself":
                    await fail()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fail)
            await here().all_reduce("SUM", 1)
        finally:
            if where != "a child that cleans up":
                await here().barrier()

    found = await failure_of(program, 3, CollectiveMismatchError)
    assert found.report.suspects == (1,)
    cause = found.__cause__
    assert cause is error or cause.exceptions == (error,)
    assert f"replica 1 was handling {type(cause).__name__}: {cause}" in found.__notes__


async def test_what_the_others_were_handling_is_no_cause() -> None:
    async def program() -> None:
        try:
            int("none")
        except ValueError:
            if replica() != 1:
                await here().all_reduce("SUM", 1)
        await here().barrier()

    assert (await failure_of(program, 3, CollectiveMismatchError)).__cause__ is None


# Those who can still make a call are let run until all have settled, or none of them settles any more.


async def test_those_who_are_ready_are_heard_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the whole process has stood still, and the delay is over before anybody ran."""
    monkeypatch.setattr("aiodist._runtime.scheduler._SETTLE_SECONDS", 0.0)

    async def program(_: ReplicaContext) -> None:
        await turns(3 * (replica() > 1))
        await part()

    report = (await error_of(program, 6)).report
    assert (report.reason, report.suspects) == (Reason.KIND, (0,))
    assert [replica.state for replica in report.replicas] == ["waiting"] * 6


# Too late.


async def test_a_time_limit_keeps_no_result_alive_until_it_would_be_up() -> None:
    async def program(ctx: ReplicaContext) -> None:
        alive = [weakref.ref(await ctx.all_reduce("SUM", np.ones(3))) for _ in range(8)]
        gc.collect()
        assert all(reference() is None for reference in alive[:4])

    await run(mirrored(2, timeout=600.0), program)


# Several at once.


async def test_overlapped_collectives_differ_at_the_first_that_differs_and_no_merge_function_runs_behind_it() -> None:
    results: dict[int, int] = {}
    merged: list[Any] = []

    async def program(ctx: ReplicaContext) -> None:
        first, merging = ctx.all_reduce("SUM", 1), ctx.merge_call(merged.append, name="m")
        second = ctx.all_reduce("MAX" if replica() == 2 else "SUM", 2)
        third = ctx.all_reduce("SUM", 3.0)
        results[replica()] = await first
        for pending in (third, second):
            with pytest.raises(CollectiveMismatchError):
                await pending
        await merging

    error = await error_of(program, 4)
    assert (error.report.reason, error.report.sequence_number, error.report.suspects) == (Reason.REDUCE_OP, 2, (2,))
    assert [record.sequence_number for record in error.report.replicas[2].history] == [0, 1, 2, 3]
    assert set(results.values()) <= {4}
    assert merged == []


# Ten thousand replicas in one process.


@pytest.mark.asyncio
async def test_ten_thousand_replicas_meet() -> None:
    count = 10_000
    order = []

    async def program() -> int:
        await here().barrier()
        order.append(replica())
        total = await here().all_reduce("SUM", np.full(1, replica()))
        return int(total[0]) if replica() % 5000 == 0 else 0

    result = await mirrored(count).run(program)
    assert order == list(range(count))
    assert sum(result.values) == 2 * (count * (count - 1) // 2)


@pytest.mark.asyncio
async def test_replicas_that_meet_again_and_again_leave_the_garbage_collector_alone() -> None:
    collections: list[object] = []

    def note(phase: str, info: object) -> None:
        if phase == "start":
            collections.append(info)

    async def program() -> None:
        value = np.ones(1)
        for _ in range(2):
            await here().barrier()
        if replica() == 0:
            gc.collect()
            gc.callbacks.append(note)
        for _ in range(5):
            await here().all_reduce("SUM", value)
        if replica() == 0:
            gc.callbacks.remove(note)

    await mirrored(3_000).run(program)
    assert len(collections) <= 5  # it was 25 when all were woken at a time
