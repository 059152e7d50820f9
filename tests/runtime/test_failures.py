"""Replicas that fail: what the run raises, and that no replica is left waiting."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from aiodist import CollectiveError, CollectiveMismatchError, Reason, ReplicaContext
from aiodist._core import analysis
from tests.runtime.programs import error_of, here, mirrored, replica, run, still_works, turns

pytestmark = pytest.mark.anyio


class FirstError(Exception):
    pass


class SecondError(Exception):
    pass


async def failure_of(program: Callable[[], Any], replicas: int = 3, kind: type[BaseException] = FirstError) -> Any:
    """Return the error that a run raises; the strategy must work afterwards."""
    strategy = mirrored(replicas)
    with pytest.raises(kind) as caught:
        await strategy.run(program)
    await still_works(strategy)
    return caught.value


async def diverge() -> None:
    """Let replica 0 make another call than the others."""
    await (here().barrier() if replica() else here().all_reduce("SUM", 1))


# A replica's own exception cancels the others, and the run raises it as itself.


@pytest.mark.parametrize("error", [FirstError("mine"), ExceptionGroup("mine", [FirstError(), SecondError()])])
async def test_exception_is_raised_as_itself_with_a_note(error: Exception) -> None:
    async def program() -> None:
        if replica() == 1:
            raise error
        await here().barrier()

    assert await failure_of(program, kind=type(error)) is error
    (note,) = error.__notes__
    assert note.startswith("replica 1 of 3 on CPU:1; replica 0 was waiting in barrier #0 at ")


async def test_exception_of_a_plain_function_starts_no_other() -> None:
    started = []

    def program() -> None:
        started.append(replica())
        raise FirstError

    assert (await failure_of(program)).__notes__ == ["replica 0 of 3 on CPU:0"]
    assert started == [0]


async def test_cancellation_of_a_replica_alone_is_an_error_and_does_not_cancel_the_caller() -> None:
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
    """Return a program in which replica 1 fails, and each replica raises its error while it unwinds."""

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


async def test_several_failures_are_one_with_notes_or_a_group_if_their_types_differ() -> None:
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
async def test_many_failures_have_a_handful_of_notes(replicas: int, text: str, last: str) -> None:
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


# A disagreement, and other exceptions.


@pytest.mark.parametrize("shield", [False, True])
async def test_analysis_that_fails_keeps_no_replica_waiting(shield: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    async def program() -> None:
        with anyio.CancelScope(shield=shield):
            await diverge()

    monkeypatch.setattr(analysis, "analyse", fail)
    strategy = mirrored(3)
    with pytest.raises(CollectiveError, match="the analysis of it failed: ZeroDivisionError: a bug") as caught:
        await strategy.run(program)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    await still_works(strategy)


async def test_join_is_analysed_if_call_paths_are_compared() -> None:
    async def program(ctx: ReplicaContext) -> None:
        with anyio.CancelScope(shield=True):
            await (ctx.join() if replica() == 0 else ctx.barrier() if replica() == 1 else ctx.all_reduce("SUM", 1))

    report = (await error_of(program, order_check="call_path")).report
    assert (report.reason, report.replicas[0].call) == ("kind", "join()")


async def test_failure_while_unwinding_from_a_mismatch_is_in_a_note() -> None:
    async def program() -> None:
        try:
            await diverge()
        finally:
            if replica() == 1:
                raise SecondError("clean-up")

    error = await failure_of(program, 2, CollectiveMismatchError)
    assert error.__notes__ == ["while it unwound, replica 1 raised SecondError: clean-up"]


@pytest.mark.parametrize("error", [FirstError("mine"), ExceptionGroup("tasks", [FirstError("mine")])])
@pytest.mark.parametrize("where", ["itself", "a child", "a child that cleans up"])
async def test_cause_of_a_disagreement_is_what_the_odd_replica_was_handling(error: Exception, where: str) -> None:
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


# Before a report, replicas that can still make a call keep running.


async def test_replicas_that_are_ready_run_before_a_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do even if the whole process was stopped, and the delay is over before any of them ran."""
    monkeypatch.setattr("aiodist._runtime.scheduler._SETTLE_SECONDS", 0.0)

    async def program(_: ReplicaContext) -> None:
        await turns(3 * (replica() > 1))
        await diverge()

    report = (await error_of(program, 6)).report
    assert (report.reason, report.suspects) == (Reason.KIND, (0,))
    assert [replica.state for replica in report.replicas] == ["waiting"] * 6


# Other properties of runs.


async def test_time_limit_keeps_no_result_alive() -> None:
    async def program(ctx: ReplicaContext) -> None:
        alive = [weakref.ref(await ctx.all_reduce("SUM", np.ones(3))) for _ in range(8)]
        gc.collect()
        assert all(reference() is None for reference in alive[:4])

    await run(mirrored(2, timeout=600.0), program)


async def test_overlapped_collectives_are_reported_at_the_first_that_differs_and_no_later_merge_function_runs() -> None:
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


async def test_ten_thousand_replicas_cause_no_garbage_collections() -> None:
    count = 10_000
    order, collections = list[int](), list[object]()

    def note(phase: str, info: object) -> None:
        collections.append(info)

    async def program() -> int:
        await here().barrier()
        order.append(replica())
        if replica() == 0:
            gc.collect()
            gc.callbacks.append(note)
        total: Any = None
        for _ in range(3):
            total = await here().all_reduce("SUM", np.full(1, replica()))
        if replica() == 0:
            gc.callbacks.remove(note)
        return int(total[0]) if replica() % 5000 == 0 else 0

    result = await mirrored(count).run(program)
    assert order == list(range(count))
    assert sum(result.values) == 2 * (count * (count - 1) // 2)
    assert len(collections) <= 10  # two of each, at its beginning and end
