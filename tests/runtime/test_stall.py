"""Replicas that stand still: a warning tells who waits for what; where none of them can ever go on, it is an error."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aiodist import DeadlockError, ReplicaContext, StallWarning
from aiodist._arrays.environment import stall_seconds
from aiodist._runtime.blocking import BlockedLoop
from aiodist._runtime.loop import running_on_trio
from aiodist._runtime.stall import StallWatch, watch_here
from tests.runtime.programs import Program, mirrored, run, still_works
from tests.runtime.warned import Warned, warned

pytestmark = pytest.mark.anyio


class Looks:
    """A clock and a timer that stand still until a test lets time go by."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[Callable[[], None]] = []

    def after(self, delay: float, fn: Callable[[], None]) -> None:
        self.due.append(fn)

    def pass_time(self, *seconds: float) -> None:
        for each in seconds:
            self.now += each
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
                await checkpoint()
            act()
            tasks.cancel_scope.cancel()

        tasks.start_soon(later)
        await run(mirrored(replicas), program)


def waits_for(event: anyio.Event) -> Program:
    """Return a program in which replica 0 waits in a barrier, and the others for an event first."""

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group:
            await event.wait()
        await ctx.barrier()

    return program


async def told_in(program: Program, looks: Looks, *seconds: float) -> list[Warned]:
    """Return what is told of a program that stands still for so long, and so long again."""
    told: list[Warned] = []

    def act() -> None:
        with warned() as found:
            looks.pass_time(*seconds)
        told.extend(found)

    await while_it_runs(program, act)
    return told


async def test_who_stands_still_is_told_once_with_who_waits_for_what(looks: Looks) -> None:
    (warning,) = await told_in(waits_for(anyio.Event()), looks, 2.5, 2.5, 10.0, 20.0)
    assert (warning.category, warning.file) == (StallWarning, __file__)
    assert re.sub(r"\(\S*test_stall.py:\d+\)", "(here)", warning.text).splitlines() == [
        "no replica has made progress for 12.5 s (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
        "  replica 0 waits in barrier #0 (here) for replicas 1 and 2",
        "  replicas 1 and 2 wait for an anyio.Event to be set (here)",
        "  They may be waiting for each other: replica 0 waits in barrier #0 (here) for replica 1,",
        "  which waits for an anyio.Event to be set (here) that replica 0 uses, too.",
    ]


async def test_replicas_that_go_on_are_not_warned_of(looks: Looks) -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(5):
            if ctx.replica_id_in_sync_group == 0:
                looks.pass_time(8.0)
            await ctx.barrier()

    await run(mirrored(2), program)


async def test_nobody_in_a_collective_is_no_stall(looks: Looks) -> None:
    assert await told_in(lambda _: anyio.sleep_forever(), looks, *[10.0] * 10) == []


async def test_the_timer_ends_when_nothing_runs(looks: Looks) -> None:
    await run(mirrored(2), lambda ctx: ctx.barrier())
    looks.pass_time(2.5)
    assert looks.due == []
    await run(mirrored(2), lambda ctx: ctx.barrier())
    assert len(looks.due) == 1


def fail(*_: object, **__: object) -> None:
    raise ValueError("I/O operation on closed file")  # as where standard error is closed


class BrokenHandler(logging.Handler):
    """A logging handler that fails."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no room")


@pytest.mark.parametrize("how", ["error", "showwarning", "handler"])
async def test_stall_that_cannot_be_shown_does_not_end_the_program(
    how: str, looks: Looks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    event = anyio.Event()
    handler = BrokenHandler()

    async def later() -> None:
        for _ in range(30):
            await checkpoint()
        looks.pass_time(2.5, 10.0)
        event.set()

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("always" if how == "showwarning" else "error")
        if how == "showwarning":
            patch.setattr(warnings, "showwarning", fail)
        elif how == "handler":
            logging.getLogger("aiodist").addHandler(handler)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            await run(mirrored(3), waits_for(event))
    logging.getLogger("aiodist").removeHandler(handler)
    assert ("no replica has made progress for 10 s" in caplog.text) == (how != "handler")


# Nobody can go on.


def lock_across_a_barrier() -> Program:
    lock = anyio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        async with lock:
            await ctx.barrier()

    return program


def child_tasks_crossed(beside: Callable[[ReplicaContext], Any]) -> Program:
    """Return a program in which each replica's child task waits in a group for the other's, for they are crossed."""

    async def work(first: ReplicaContext, second: ReplicaContext, name: str) -> None:
        await first.barrier(name=name)
        await second.barrier(name=name)

    async def program(ctx: ReplicaContext) -> None:
        groups = [ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")]
        if ctx.replica_id_in_sync_group == 1:
            groups.reverse()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, groups[0], groups[1], "x")
            await beside(ctx)

    return program


def locks_and_tasks(beside: Callable[[ReplicaContext], Any]) -> Program:
    """Return a program in which replica 1's child holds a lock across a barrier, and replica 0 waits for the lock."""
    lock, held = anyio.Lock(), anyio.Event()

    async def child(ctx: ReplicaContext) -> None:
        async with lock:
            held.set()
            await ctx.barrier(name="x")

    async def program(ctx: ReplicaContext) -> None:
        if ctx.replica_id_in_sync_group == 0:
            await held.wait()
            async with lock:
                await ctx.barrier(name="x")
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, ctx)
            await beside(ctx)

    return program


async def nothing(ctx: ReplicaContext) -> None:
    await checkpoint()


@pytest.mark.parametrize(
    ("program", "replicas", "reason", "suspects"),
    [
        (lock_across_a_barrier(), 3, "deadlock", (1, 2)),  # those who wait outside of the collective
        (child_tasks_crossed(nothing), 2, "cycle", (0, 1)),
        (locks_and_tasks(nothing), 2, "deadlock", (0,)),
    ],
    ids=["lock", "child tasks", "lock of a child task"],
)
async def test_replicas_that_wait_for_each_other_end_after_a_second(
    program: Program,
    replicas: int,
    reason: str,
    suspects: tuple[int, ...],
    looks: Looks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = mirrored(replicas)
    if reason == "cycle":  # else it would be found at once, as one that passes through groups is
        monkeypatch.setattr("aiodist._runtime.scheduler.Run._look", lambda run: None)

    async def later() -> None:
        for _ in range(50):
            await checkpoint()
        looks.pass_time(0.5, 0.5)
        for _ in range(50):
            await checkpoint()
        assert not caught  # the first of these looks has seen them go on
        looks.pass_time(0.5)

    caught: list[DeadlockError] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(later)
        try:
            await run(strategy, program)
        except DeadlockError as raised:
            caught.append(raised)
    (error,) = caught
    assert (error.report.reason, error.report.suspects) == (reason, suspects)
    assert " wait for each other" in str(error)
    monkeypatch.undo()
    await still_works(strategy)


def waits_in_a_thread(go_on: threading.Event) -> Callable[[ReplicaContext], Any]:
    return lambda ctx: ctx.run_sync(go_on.wait, 30)


async def sets_a_timer(ctx: ReplicaContext) -> None:
    asyncio.get_running_loop().call_later(1000, print)
    await checkpoint()


async def within_a_time_limit(ctx: ReplicaContext) -> None:
    async with asyncio.timeout(1000):
        await asyncio.Event().wait()


@pytest.mark.parametrize("beside", ["event", "thread", "timer", "time limit", "queue"])
@pytest.mark.parametrize("program", [child_tasks_crossed, locks_and_tasks])
async def test_what_may_end_a_wait_makes_it_a_warning(
    program: Callable[[Any], Program], beside: str, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    ways: dict[str, Callable[[ReplicaContext], Any]] = {
        "event": lambda _: anyio.Event().wait(),
        "thread": waits_in_a_thread(go_on),
        "timer": sets_a_timer,
        "time limit": within_a_time_limit,
        "queue": lambda _: asyncio.Queue[int]().get(),
    }
    told: list[Warned] = []

    def act() -> None:
        with warned() as found:
            looks.pass_time(*[1.5] * 10)
        told.extend(found)
        go_on.set()

    await while_it_runs(program(ways[beside]), act, 2)
    assert [warning.category for warning in told] == [StallWarning]


# A replica that holds up the event loop.


class LoopThread:
    """Looks at the thread that makes it as often as a test says, at times of the test's choosing."""

    def __init__(self) -> None:
        loop = None if running_on_trio() else asyncio.get_running_loop()
        self.told: list[str] = []
        self.now = self.computed = 0.0
        self._blocked = BlockedLoop(
            lambda: loop, lambda text, _: self.told.append(text), lambda: self.now, lambda _: self.computed
        )

    def hold(self, seconds: float, share: float = 1.0) -> None:
        """Hold up the loop, and say that it computes for a share of that time; without one it stands still."""
        looker = threading.Thread(target=self._look, args=(round(seconds * 10) + 1, share))
        looker.start()
        looker.join()

    def _look(self, times: int, share: float) -> None:
        for _ in range(times):
            self._blocked.look()
            self.now += 0.1
            self.computed += 0.1 * share


@pytest.mark.every_loop
@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize(
    ("held", "share", "is_told"), [((1.2,), 1, True), ((3.0,), 0, True), ((1.2,), 0.5, False), ((0.9, 0.9), 1, False)]
)
async def test_a_replica_that_holds_up_the_loop_is_named_with_its_line(
    held: tuple[float, ...], share: float, is_told: bool, child: bool
) -> None:
    thread = LoopThread()

    async def hold(ctx: ReplicaContext) -> None:
        for seconds in held:
            if ctx.replica_id_in_sync_group == 1:
                thread.hold(seconds, share)
            await checkpoint()

    async def in_tasks(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold, ctx)

    await run(mirrored(2), in_tasks if child else hold)
    assert len(thread.told) == is_told
    for text in thread.told:
        assert re.match(r"replica 1 has held up the event loop for more than a second at \S*test_stall.py:\d+: ", text)


@pytest.mark.every_loop
async def test_tasks_of_one_replica_that_run_one_after_the_other_do_not_add_up() -> None:
    thread = LoopThread()

    async def one(ctx: ReplicaContext, name: str) -> None:
        await ctx.barrier(name=name)
        thread.hold(0.9)

    async def program(ctx: ReplicaContext) -> None:
        async with anyio.create_task_group() as tasks:
            for name in "ab":
                tasks.start_soon(one, ctx, name)

    await run(mirrored(1), program)
    assert thread.told == []


async def test_the_watch_looks_by_itself_while_there_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._runtime.blocking._LIMIT_SECONDS", 0.02)
    monkeypatch.setattr("aiodist._runtime.blocking._PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("aiodist._runtime.stall._watches", {})
    told = threading.Event()
    monkeypatch.setattr(warnings, "warn_explicit", lambda *_: told.set())

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        assert told.wait(60)

    await run(mirrored(1), program)


# When it looks.


@pytest.mark.every_loop
async def test_a_real_timer_looks_after_a_real_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0.01")
    monkeypatch.setattr("aiodist._runtime.stall._watches", {})
    told = anyio.Event()

    def warn(_text: str, category: type[Warning], *_: Any) -> None:  # filters are shared with threads
        if category is StallWarning:
            told.set()

    monkeypatch.setattr(warnings, "warn_explicit", warn)
    await run(mirrored(2), waits_for(told))


async def test_zero_turns_it_off_and_what_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._runtime.stall._watches", {})
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0")
    watch = watch_here()
    assert watch is not None
    assert not watch.warns  # it looks for deadlocks alone
    monkeypatch.setattr("aiodist._runtime.stall._watches", {})
    for text in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("AIODIST_STALL_SECONDS", text)
        with pytest.raises(
            ValueError, match="AIODIST_STALL_SECONDS must be a number of seconds, 0 for no stall report"
        ):
            stall_seconds()
    with pytest.raises(ValueError, match="AIODIST_STALL_SECONDS must be"):
        await run(mirrored(2), lambda ctx: ctx.barrier())
    monkeypatch.delenv("AIODIST_STALL_SECONDS")
    assert stall_seconds() == 10


def test_a_loop_that_proves_deadlocks_is_not_looked_after() -> None:
    class Loop(asyncio.SelectorEventLoop):
        proves_deadlock = True

    async def main() -> None:
        assert watch_here() is None

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())


@pytest.mark.filterwarnings("ignore")  # of what the loop leaves behind
def test_nobody_looks_after_a_loop_that_was_closed_in_the_middle_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._runtime.blocking._PAUSE_SECONDS", 0.01)
    begun = asyncio.Event()

    async def program(ctx: ReplicaContext) -> None:
        begun.set()
        await anyio.sleep_forever()

    loop = asyncio.new_event_loop()
    left = loop.create_task(run(mirrored(2), program))
    loop.run_until_complete(begun.wait())
    watching = [each for each in threading.enumerate() if each.name == "aiodist watch"]
    loop.close()
    for each in watching:
        each.join(timeout=60)
        assert not each.is_alive()
    assert not left.done()
