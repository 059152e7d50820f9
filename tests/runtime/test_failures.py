"""A replica's own exception cancels the others, and comes out of run as itself; nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiodist import CollectiveError, CollectiveMismatchError, ReplicaContext
from aiodist._core import analysis
from tests.runtime.programs import error_of, here, mirrored, replica, still_works

pytestmark = pytest.mark.anyio


class FirstError(Exception):
    pass


class SecondError(Exception):
    pass


def error_out() -> None:
    raise FirstError


async def failure_of(program: Callable[[], Any], replicas: int = 3, kind: type[BaseException] = FirstError) -> Any:
    """Return what comes out of a run; the same strategy must work afterwards."""
    strategy = mirrored(replicas)
    with pytest.raises(kind) as caught:
        await strategy.run(program)
    await still_works(strategy)
    return caught.value


# What comes out.


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

    error = await failure_of(program)
    assert error.__notes__ == ["replica 0 of 3 on CPU:0"]
    assert begun == [0]


async def test_a_cancellation_that_nobody_asked_for_is_an_error_and_no_cancellation_of_the_caller() -> None:
    async def program() -> None:
        await here().barrier()
        if replica() == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await checkpoint()

    error = await failure_of(program, kind=RuntimeError)
    assert str(error).startswith("replica 1 was cancelled, and nobody has cancelled the run")
    assert isinstance(error.__cause__, asyncio.CancelledError)


def when_unwinding(*errors: Exception | None, first: int = 1) -> Callable[[], Any]:
    """Return a program in which one replica fails, and each raises what is given for it while it unwinds."""

    async def program() -> None:
        try:
            await here().barrier()
            if replica() != first:
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


# Nobody is left waiting.


@pytest.mark.parametrize("shield", [False, True])
async def test_analysis_that_fails_keeps_nobody_waiting(shield: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    async def program() -> None:
        with anyio.CancelScope(shield=shield):
            await (here().barrier() if replica() else here().all_reduce("SUM", 1))

    monkeypatch.setattr(analysis, "analyse", fail)
    strategy = mirrored(3)
    with pytest.raises(CollectiveError, match="the analysis of it failed: ZeroDivisionError: a bug") as caught:
        await strategy.run(program)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    await still_works(strategy)


async def test_join_is_analysed_where_call_paths_are_compared() -> None:
    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        with anyio.CancelScope(shield=True):
            await (ctx.join() if me == 0 else ctx.barrier() if me == 1 else ctx.all_reduce("SUM", 1))

    report = (await error_of(program, order_check="call_path")).report
    assert (report.reason, report.replicas[0].call) == ("kind", "join()")


# A disagreement, and exceptions beside it.


async def test_failure_while_unwinding_from_a_mismatch_stands_in_a_note() -> None:
    async def program() -> None:
        try:
            await (here().barrier() if replica() else here().all_reduce("SUM", 1))
        finally:
            if replica() == 1:
                raise SecondError("clean-up")

    error = await failure_of(program, 2, CollectiveMismatchError)
    assert error.__notes__ == ["while it unwound, replica 1 raised SecondError: clean-up"]


async def test_mismatch_that_came_out_of_a_task_group_is_no_failure_of_its_own() -> None:
    async def child() -> None:
        await (here().barrier() if replica() else here().all_reduce("SUM", 1))

    async def program() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)

    error = await failure_of(program, 2, CollectiveMismatchError)
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("error", [FirstError("mine"), ExceptionGroup("tasks", [FirstError("mine")])])
@pytest.mark.parametrize("how", ["raised", "of a child task"])
async def test_disagreement_is_caused_by_what_the_odd_replica_was_handling(error: Exception, how: str) -> None:
    async def fail() -> None:
        raise error

    async def program() -> None:
        try:
            if replica() == 1:
                if how == "raised":
                    await fail()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fail)
            await here().all_reduce("SUM", 1)
        finally:
            await here().barrier()

    found = await failure_of(program, 3, CollectiveMismatchError)
    assert found.report.suspects == (1,)
    cause = found.__cause__
    assert cause is error or cause.exceptions == (error,)
    assert f"replica 1 was handling {type(cause).__name__}: {cause}" in found.__notes__


async def test_what_the_others_were_handling_is_no_cause() -> None:
    async def program() -> None:
        try:
            error_out()
        except FirstError:
            if replica() != 1:
                await here().all_reduce("SUM", 1)
        await here().barrier()

    assert (await failure_of(program, 3, CollectiveMismatchError)).__cause__ is None
