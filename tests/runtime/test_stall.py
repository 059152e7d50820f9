"""The stall report: a warning that tells who waits for what when the replicas of a run stand still."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from aiodist import DeadlockError, ReplicaContext, StallWarning
from aiodist._arrays.environment import stall_seconds
from aiodist._runtime.stall import StallWatch, watch_here
from tests.runtime.programs import Program, mirrored, run
from tests.runtime.warned import warned

pytestmark = pytest.mark.anyio


class Looks:
    """A clock and a timer that stand still until a test lets time go by."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[Callable[[], None]] = []

    def after(self, delay: float, fn: Callable[[], None]) -> None:
        self.due.append(fn)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due, self.due = self.due, []
        for fn in due:
            fn()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    watch = StallWatch(10.0, looks.after, lambda: looks.now)
    monkeypatch.setattr("aiodist._runtime.scheduler.watch_here", lambda: watch)
    return looks


async def while_it_runs(program: Program, act: Callable[[], Any], replicas: int = 3) -> None:
    """Do something when nothing in a run moves any more, then end it."""
    async with anyio.create_task_group() as tasks:

        async def later() -> None:
            for _ in range(30 + 2 * replicas):
                await anyio.lowlevel.checkpoint()
            act()
            tasks.cancel_scope.cancel()

        tasks.start_soon(later)
        await run(mirrored(replicas), program)


def lock_across_a_barrier(seconds: float = 3600.0) -> Program:
    """Let replicas wait for each other, within a time limit, which may end it."""
    lock = anyio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        with anyio.move_on_after(seconds):
            async with lock:
                await ctx.barrier()

    return program


async def test_who_stands_still_is_told_once_with_the_circle(looks: Looks) -> None:
    def act() -> None:
        looks.pass_time(2.5)
        looks.pass_time(2.5)
        with warned() as told:
            looks.pass_time(10.0)
            looks.pass_time(20.0)
        (warning,) = told
        assert (warning.category, warning.file) == (StallWarning, __file__)
        assert re.sub(r"\(\S*test_stall.py:\d+\)", "(here)", warning.text).splitlines() == [
            "no replica has made progress for 12.5 s (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
            "  replica 0 waits in barrier #0 (here) for replicas 1 and 2",
            "  replicas 1 and 2 wait for an anyio.Lock (here), which replica 0 holds",
            "  in a circle: replica 0 waits in barrier #0 (here) for replica 1,",
            "  which waits for an anyio.Lock (here) that replica 0 holds",
        ]

    await while_it_runs(lock_across_a_barrier(), act)


async def test_who_waits_for_each_other_for_ever_ends_after_a_second(looks: Looks) -> None:
    async def later() -> None:
        await anyio.wait_all_tasks_blocked()
        for _ in range(5):
            looks.pass_time(0.5)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(later)
        with pytest.raises(DeadlockError, match="replicas 0-2 wait for each other, and nothing else") as caught:
            await run(mirrored(3), lock_across_a_barrier(math.inf))
    assert (caught.value.report.reason, caught.value.report.suspects) == ("deadlock", (1, 2))


async def test_replicas_that_get_on_are_not_warned_of(looks: Looks) -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(5):
            if ctx.replica_id_in_sync_group == 0:
                looks.pass_time(8.0)
            await ctx.barrier()

    await run(mirrored(2), program)


async def test_nobody_in_a_collective_is_no_stall(looks: Looks) -> None:
    async def program(ctx: ReplicaContext) -> None:
        await anyio.Event().wait()

    def act() -> None:
        for _ in range(10):
            looks.pass_time(10.0)

    await while_it_runs(program, act)


async def test_the_timer_ends_when_nothing_runs(looks: Looks) -> None:
    await run(mirrored(2), lambda ctx: ctx.barrier())
    looks.pass_time(2.5)
    assert looks.due == []
    await run(mirrored(2), lambda ctx: ctx.barrier())
    assert len(looks.due) == 1


async def test_a_stall_is_logged_where_warnings_are_errors(
    looks: Looks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(text: str, category: type[Warning], *_: Any) -> None:  # as a filter has it, which threads share
        raise category(text)

    def act() -> None:
        looks.pass_time(2.5)
        looks.pass_time(10.0)

    monkeypatch.setattr(warnings, "warn_explicit", warn)
    with caplog.at_level(logging.ERROR, "aiodist"):
        await while_it_runs(lock_across_a_barrier(), act)
    assert "no replica has made progress for 10 s" in caplog.text


async def test_a_real_timer_looks_after_a_real_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0.01")
    monkeypatch.setattr("aiodist._runtime.stall._watches", {})
    told = anyio.Event()

    def warn(_text: str, category: type[Warning], *_: Any) -> None:  # filters are shared with threads
        if category is StallWarning:
            told.set()

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group:
            await told.wait()
        await ctx.barrier()

    monkeypatch.setattr(warnings, "warn_explicit", warn)
    await run(mirrored(2), program)


async def test_zero_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._runtime.stall._watches", {})
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0")
    watch = watch_here()
    assert watch is not None
    assert not watch.warns


def test_a_loop_that_proves_a_standstill_is_not_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop(asyncio.SelectorEventLoop):
        proves_deadlock = True

    async def main() -> None:
        assert watch_here() is None

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_time_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", text)
    with pytest.raises(ValueError, match="AIODIST_STALL_SECONDS must be a number of seconds, 0 for no stall report"):
        stall_seconds()


async def test_a_run_refuses_a_time_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._runtime.stall._watches", {})
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "soon")
    with pytest.raises(ValueError, match="AIODIST_STALL_SECONDS must be"):
        await run(mirrored(2), lambda ctx: ctx.barrier())


def test_ten_seconds_are_allowed_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIODIST_STALL_SECONDS", raising=False)
    assert stall_seconds() == 10
