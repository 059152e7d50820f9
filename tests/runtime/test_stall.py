"""Replicas that make no progress: who waits for whom, the warning that says so, and the error if none can continue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextvars import Context, ContextVar
from functools import partial
from typing import Any
from weakref import ref

import anyio
import pytest
import trio

from aiodist import DeadlockError, ReplicaContext, StallWarning
from aiodist._arrays.environment import stall_seconds
from aiodist._runtime import blocking, stall
from aiodist._runtime.blocking import BlockedLoop
from aiodist._runtime.inspection import WaitGraph, inspect_loop
from aiodist._runtime.loop import running_on_trio
from aiodist._runtime.stacks import awaited_by, can_read_other_threads, links
from aiodist._runtime.stall import StallWatch, watch_here
from tests.runtime.programs import Program, Warned, mirrored, replica, run, still_works, turns, warned

pytestmark = pytest.mark.anyio


async def while_it_runs(program: Program, act: Callable[[], Any], replicas: int) -> None:
    """Do something once nothing in a run moves, then end the run."""
    async with anyio.create_task_group() as tasks:

        async def later() -> None:
            await turns(50 + 2 * replicas)
            try:
                act()
            finally:
                tasks.cancel_scope.cancel()

        tasks.start_soon(later)
        await run(mirrored(replicas), program)


async def look_at(program: Program, check: Callable[[WaitGraph], None], replicas: int = 2) -> None:
    """Check who waits for whom once nothing in a run moves."""
    await while_it_runs(program, lambda: check(inspect_loop()), replicas)


def lines_of(graph: WaitGraph) -> list[str]:
    """Return the lines on replicas and their tasks, without places."""
    return [re.sub(r" \(\S+:\d+\)", "", line) for line in graph.lines() if line.startswith("replica")]


# What a task waits for.


async def sleeper() -> None:
    await anyio.sleep(1000)


async def notified(condition: Any) -> None:
    async with condition:
        await condition.wait()


async def shielded() -> None:
    task = asyncio.create_task(sleeper(), name="inner")
    try:
        await asyncio.shield(task)
    finally:
        task.cancel()


async def puts() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(1)
    for item in range(2):
        await queue.put(item)


async def in_a_channel(size: int) -> None:
    send, receive = anyio.create_memory_object_stream[int](size)
    with send, receive:
        await (receive.receive() if size else send.send(1))


async def beside_a_loader(group: Any) -> None:
    async with group as tasks:
        if isinstance(tasks, asyncio.TaskGroup):
            tasks.create_task(sleeper(), name="loader")
        else:
            tasks.start_soon(sleeper, name="loader")


async def in_a_generator() -> None:
    async def steps() -> AsyncIterator[int]:
        await anyio.sleep(7)
        yield 1

    async with contextlib.aclosing(steps()) as found:  # type: ignore[type-var]
        async for _ in found:
            pass


Ways = Mapping[str, Callable[[], Awaitable[Any]]]
OF_ANYIO: Ways = {
    "waits for an anyio.Event to be set": lambda: anyio.Event().wait(),
    "waits for an anyio.Semaphore": lambda: anyio.Semaphore(0).acquire(),
    "waits for an anyio.Condition to be notified": lambda: notified(anyio.Condition()),
    "waits for an item of an anyio.MemoryObjectReceiveStream": lambda: in_a_channel(1),
    "waits for room in an anyio.MemoryObjectSendStream": lambda: in_a_channel(0),
    "waits for the task 'loader'": lambda: beside_a_loader(anyio.create_task_group()),
    "waits for anyio.sleep(7)": in_a_generator,
    "waits forever: sleep_forever()": anyio.sleep_forever,
}
OF_ASYNCIO: Ways = {
    "waits for an asyncio.Event to be set": lambda: asyncio.Event().wait(),
    "waits for an asyncio.Semaphore": lambda: asyncio.Semaphore(0).acquire(),
    "waits for an item of an asyncio.Queue": lambda: asyncio.Queue[int]().get(),
    "waits for asyncio.sleep(1000)": lambda: asyncio.sleep(1000),
    "waits for a future": lambda: asyncio.get_running_loop().create_future(),
    "waits for I/O: StreamReader.readline()": lambda: asyncio.StreamReader().readline(),
    "waits for an asyncio.Condition to be notified": lambda: notified(asyncio.Condition()),
    "waits for room in an asyncio.Queue": puts,
    "waits for 2 tasks of gather()": lambda: asyncio.gather(sleeper(), sleeper()),
    "waits for the task 'loader'": lambda: beside_a_loader(asyncio.TaskGroup()),
    "waits for the task 'inner'": shielded,
    "waits for the task 'timed'": lambda: asyncio.wait_for(asyncio.create_task(sleeper(), name="timed"), 1000),
}
OF_TRIO: Ways = {
    "waits for a trio.Event to be set": lambda: trio.Event().wait(),
    "waits for a trio.Semaphore": lambda: trio.Semaphore(0).acquire(),
    "waits for trio.sleep(1000)": partial(trio.sleep, 1000),
    "waits forever: sleep_forever()": trio.sleep_forever,
    "waits for a trio.Condition to be notified": lambda: notified(trio.Condition()),
    "waits for an item of a trio.MemoryReceiveChannel": trio.open_memory_channel[int](0)[1].receive,
    "waits for the task 'loader'": lambda: beside_a_loader(trio.open_nursery()),
}


@pytest.mark.every_loop
@pytest.mark.parametrize("library", ["anyio", "its own"])
async def test_what_tasks_wait_for(library: str, anyio_backend_name: str) -> None:
    ways = OF_ANYIO if library == "anyio" else OF_TRIO if anyio_backend_name == "trio" else OF_ASYNCIO

    async def program(_: ReplicaContext) -> None:
        await list(ways.values())[replica()]()

    def check(graph: WaitGraph) -> None:
        lines = lines_of(graph)
        assert [line for line in lines if "'s task" not in line] == [f"replica {i} {w}" for i, w in enumerate(ways)]
        assert any(line.endswith("'s task 'loader' waits for anyio.sleep(1000)") for line in lines)

    await look_at(program, check, len(ways))


async def test_child_tasks_that_wait_alike_share_a_line() -> None:
    async def program(_: ReplicaContext) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleeper)

    def check(graph: WaitGraph) -> None:
        (line,) = (line for line in lines_of(graph) if line.endswith("sleep(1000)"))
        assert line.startswith("replicas 0-2's tasks of sleeper() at ")
        assert line.endswith(" wait for anyio.sleep(1000)")

    await look_at(program, check, 3)


async def test_work_in_a_thread_is_named() -> None:
    go_on = threading.Event()

    def work() -> None:
        go_on.wait(60)

    def check(graph: WaitGraph) -> None:
        go_on.set()
        assert lines_of(graph) == [
            "replica 0 waits for work() in the device's thread",
            "replica 1 waits for work() in a thread",
        ]

    await look_at(lambda ctx: anyio.to_thread.run_sync(work) if replica() else ctx.run_sync(work), check)


# What Python reports of coroutines and generators.


async def test_running_coroutine_awaits_nothing() -> None:
    """Python 3.12's own answer depends on a counter: at one of some hundred steps it is wrong, and crashes."""
    found: list[Any] = []

    class Step:
        def __await__(self) -> Generator[None]:
            found.append(awaited_by(coroutine))
            yield from ()

    async def nothing() -> None:
        pass

    async def steps() -> None:
        for number in range(5000):
            await (Step() if number % 7 else nothing())

    coroutine: Any = steps()
    await coroutine
    assert set(found) == {None}


async def test_step_of_an_async_generator_ends_where_it_runs() -> None:
    seen: list[tuple[str, bool]] = []

    async def numbers() -> AsyncIterator[int]:
        seen.extend((link.frame.f_code.co_name, link.running) for link in links(generator) if link.frame is not None)
        yield 1

    generator = numbers()
    async for _ in generator:
        pass
    assert seen == [("numbers", True)]


# Cycles.


@pytest.mark.every_loop
async def test_lock_that_knows_its_holder_need_not_be_taken_by_with(anyio_backend_name: str) -> None:
    async def program(ctx: ReplicaContext, lock: Any) -> None:
        await lock.acquire()
        await ctx.barrier()

    def check(graph: WaitGraph, holder: str) -> None:
        kind = f"{type(lock).__module__.partition('.')[0]}.Lock"
        assert lines_of(graph) == [
            "replica 0 waits in barrier #0 for replica 1",
            f"replica 1 waits for {'a' if kind == 'trio.Lock' else 'an'} {kind}{holder}",
        ]

    for lock, holder in {
        anyio.Lock(): ", which replica 0 holds",
        trio.Lock() if anyio_backend_name == "trio" else asyncio.Lock(): (
            ", which replica 0 holds" if anyio_backend_name == "trio" else "; who took it cannot be seen"
        ),
    }.items():
        await look_at(partial(program, lock=lock), partial(check, holder=holder))


# The warning.


NEVER = threading.Barrier(3)  # passed by nobody until a test breaks it


class Looks:
    """A clock and a timer that stand still until a test advances them."""

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
    monkeypatch.setattr("aiodist._runtime.tasks.watch_here", lambda: watch)
    return looks


def waits_for(event: anyio.Event) -> Program:
    """Return a program in which replica 0 waits in a barrier, and the others for an event first."""

    async def program(ctx: ReplicaContext) -> None:
        if replica():
            await event.wait()
        await ctx.barrier()

    return program


async def warnings_of(program: Program, looks: Looks, *seconds: float, replicas: int = 3) -> list[Warned]:
    """Return the warnings of a program that makes no progress while these times pass, one after the other."""
    found: list[Warned] = []

    def act() -> None:
        with warned() as each:
            looks.pass_time(*seconds)
        found.extend(each)
        NEVER.abort()

    await while_it_runs(program, act, replicas)
    return found


async def test_run_without_progress_gives_one_warning_that_says_who_waits_for_what(looks: Looks) -> None:
    (warning,) = await warnings_of(waits_for(anyio.Event()), looks, 2.5, 2.5, 10.0, 20.0)
    assert (warning.category, warning.file) == (StallWarning, __file__)
    assert re.sub(r"\(\S*test_stall.py:\d+\)", "(here)", warning.text).splitlines() == [
        "no replica has made progress for 12.5 s (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
        "  replica 0 waits in barrier #0 (here) for replicas 1 and 2",
        "  replicas 1 and 2 wait for an anyio.Event to be set (here)",
    ]


variable: ContextVar[str] = ContextVar("variable", default="")


async def test_warning_is_given_in_the_context_of_the_runs_caller(looks: Looks) -> None:
    """A free-threaded Python keeps the filters of `warnings.catch_warnings` there."""
    shown: list[str] = []
    variable.set("the caller's")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn_explicit", lambda *_: shown.append(variable.get()))
        act = partial(Context().run, looks.pass_time, 2.5, 10.0)
        await while_it_runs(waits_for(anyio.Event()), act, 2)
    assert shown == ["the caller's"]


async def test_replicas_that_make_progress_or_are_in_no_collective_give_no_warning(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def program(ctx: ReplicaContext) -> None:
        for _ in range(5):
            if replica() == 0:
                looks.pass_time(8.0)
            await ctx.barrier()

    await run(mirrored(2), program)
    monkeypatch.setattr("aiodist._runtime.inspection.deadlocked", None)  # sleepers are not inspected
    assert await warnings_of(lambda _: anyio.sleep_forever(), looks, *[10.0] * 10) == []
    looks.pass_time(2.5)
    assert looks.due == []  # the timer ends when nothing runs
    await run(mirrored(2), lambda ctx: ctx.barrier())
    assert len(looks.due) == 1


class BrokenHandler(logging.Handler):
    """A logging handler that fails."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no room")


@pytest.mark.parametrize("handlers", [[], [BrokenHandler()]])
async def test_warning_that_cannot_be_shown_does_not_end_the_program(
    handlers: list[logging.Handler], looks: Looks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    event = anyio.Event()

    async def later() -> None:
        await turns(30)
        looks.pass_time(2.5, 10.0)
        event.set()

    monkeypatch.setattr(logging.getLogger("aiodist"), "handlers", handlers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later)
            await run(mirrored(3), waits_for(event))
    assert ("no replica has made progress for 10 s" in caplog.text) == (not handlers)


# Nobody can continue.

Beside = Callable[[ReplicaContext], Any]


def lock_across_a_barrier(_: Beside) -> Program:
    lock = anyio.Lock()

    async def program(ctx: ReplicaContext) -> None:
        async with lock:
            await ctx.barrier()

    return program


def locks_crossed(_: Beside) -> Program:
    """Return a program without collectives, in which two replicas take two locks in opposite order."""
    locks = [anyio.Lock(), anyio.Lock()]

    async def program(_: ReplicaContext) -> None:
        async with locks[replica()]:
            await turns(5)
            async with locks[1 - replica()]:
                pass

    return program


def child_tasks_crossed(beside: Beside) -> Program:
    """Return a program in which the replicas' child tasks use two groups in opposite order."""

    async def work(first: ReplicaContext, second: ReplicaContext) -> None:
        await first.barrier(name="x")
        await second.barrier(name="x")

    async def program(ctx: ReplicaContext) -> None:
        groups = [ctx.new_group([0, 1], "first"), ctx.new_group([0, 1], "second")]
        if replica() == 1:
            groups.reverse()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, groups[0], groups[1])
            await beside(ctx)

    return program


def lock_of_a_child_task(beside: Beside) -> Program:
    """Return a program in which replica 1's child holds a lock across a barrier, and replica 0 waits for the lock."""
    lock, held = anyio.Lock(), anyio.Event()

    async def child(ctx: ReplicaContext) -> None:
        async with lock:
            held.set()
            await ctx.barrier(name="x")

    async def program(ctx: ReplicaContext) -> None:
        if replica() == 0:
            await held.wait()
            async with lock:
                await ctx.barrier(name="x")
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, ctx)
            await beside(ctx)

    return program


@pytest.mark.parametrize(
    ("program", "replicas", "reason", "suspects"),
    [
        (lock_across_a_barrier, 3, "deadlock", (1, 2)),  # those that wait outside of the collective
        (locks_crossed, 2, "deadlock", (0, 1)),
        (child_tasks_crossed, 2, "cycle", (0, 1)),
        (lock_of_a_child_task, 2, "deadlock", (0,)),
    ],
)
async def test_replicas_that_wait_for_each_other_end_after_a_second(
    program: Callable[[Beside], Program],
    replicas: int,
    reason: str,
    suspects: tuple[int, ...],
    looks: Looks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = mirrored(replicas)
    if reason == "cycle":  # otherwise it is found at once, because it passes through groups
        monkeypatch.setattr("aiodist._runtime.scheduler.Run._check_for_deadlock", lambda run: None)

    async def later() -> None:
        await turns(50)
        looks.pass_time(0.5, 0.5)
        await turns(50)
        assert not caught  # the first of these checks has still seen progress
        looks.pass_time(0.5)

    caught: list[DeadlockError] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(later)
        try:
            await run(strategy, program(lambda _: turns(1)))
        except DeadlockError as raised:
            caught.append(raised)
    (error,) = caught
    assert (error.report.reason, error.report.suspects) == (reason, suspects)
    assert " wait for each other" in str(error)
    monkeypatch.undo()
    await still_works(strategy)


async def wait_for_an_event(_: ReplicaContext) -> None:
    await anyio.Event().wait()


async def set_a_timer(ctx: ReplicaContext) -> None:
    if running_on_trio():  # which has no such timers
        await wait_for_an_event(ctx)
    asyncio.get_running_loop().call_later(1000, print)
    await turns(1)


async def receive(_: ReplicaContext) -> None:
    await in_a_channel(1)


async def work(ctx: ReplicaContext) -> None:
    with contextlib.suppress(threading.BrokenBarrierError):
        await ctx.run_sync(NEVER.wait, 60)


LIMITS: dict[str, Callable[[], Any]] = {
    "move_on_after": lambda: anyio.move_on_after(1000),
    "fail_after": lambda: anyio.fail_after(1000),
    "its own": lambda: trio.fail_after(1000) if running_on_trio() else asyncio.timeout(1000),
}


@pytest.mark.parametrize("program", [child_tasks_crossed, lock_of_a_child_task])
@pytest.mark.parametrize("beside", [wait_for_an_event, set_a_timer, receive, work, *LIMITS])
@pytest.mark.every_loop("asyncio", "trio")
async def test_what_may_end_a_wait_makes_it_a_warning(program: Any, beside: Any, looks: Looks) -> None:
    NEVER.reset()
    inner = program((lambda _: turns(1)) if beside in LIMITS else beside)

    async def limited(ctx: ReplicaContext) -> None:
        limit = LIMITS.get(beside, contextlib.nullcontext)()
        if isinstance(limit, asyncio.Timeout):
            async with limit:
                await inner(ctx)
        else:
            with limit:
                await inner(ctx)

    found = await warnings_of(limited, looks, *[1.5] * 10, replicas=2)
    assert [warning.category for warning in found] == [StallWarning]


# A replica that holds up the event loop.

locked = pytest.mark.skipif(not can_read_other_threads(), reason="frames of other threads cannot be read")


class LoopThread:
    """Watches the thread that makes it, on a clock that a test controls."""

    def __init__(self) -> None:
        loop = None if running_on_trio() else asyncio.get_running_loop()
        self.reported: list[str] = []
        self.now = self.computed = 0.0
        self._blocked = BlockedLoop(
            lambda: loop, lambda text, _: self.reported.append(text), lambda: self.now, lambda _: self.computed
        )

    def hold(self, seconds: float, share: float = 1.0) -> None:
        """Hold up the loop for a time, of which the thread computes for a share."""
        looker = threading.Thread(target=self._look, args=(round(seconds * 10) + 1, share))
        looker.start()
        looker.join()

    def _look(self, times: int, share: float) -> None:
        for _ in range(times):
            self._blocked.check()
            self.now += 0.1
            self.computed += 0.1 * share


@pytest.mark.every_loop
@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize(
    ("held", "share", "warns"),
    [
        ([(1.2,)], 1, True),
        ([(3.0,)], 0, True),
        ([(1.2,)], 0.5, False),
        ([(0.9, 0.9)], 1, False),  # two steps of one task, and below, steps of two tasks
        ([(0.9,), (0.9,)], 1, False),
    ],
)
async def test_replica_that_holds_up_the_loop_is_named_with_its_line(
    held: list[tuple[float, ...]], share: float, warns: bool, child: bool
) -> None:
    thread = LoopThread()

    async def hold(seconds: tuple[float, ...]) -> None:
        for each in seconds:
            if replica() == 1:
                thread.hold(each, share)
            await turns(1)

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        async with anyio.create_task_group() as tasks:
            for seconds in held:
                if child:
                    tasks.start_soon(hold, seconds)
                else:
                    await hold(seconds)

    await run(mirrored(2), program)
    assert len(thread.reported) == warns
    for text in thread.reported:
        assert re.match(r"replica 1 has held up the event loop for more than a second at \S*test_stall.py:\d+: ", text)


@locked
async def test_look_at_the_loop_keeps_nothing_of_the_program_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, looked, over = asyncio.get_running_loop(), threading.Event(), threading.Event()

    def schedule(_: Any) -> None:  # the program may continue meanwhile
        looked.set()
        assert over.wait(60)

    monkeypatch.setattr(loop, "call_soon_threadsafe", schedule)
    looker = threading.Thread(target=BlockedLoop(lambda: loop, lambda *_: None).check)

    def step() -> ref[Any]:
        local = threading.Event()
        looker.start()
        assert looked.wait(60)
        return ref(local)

    left = step()()
    over.set()
    looker.join()
    assert left is None


# Real threads and timers.


@pytest.fixture
def new_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_watches", {})


def test_loop_is_not_watched_without_the_interpreter_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    unwatched = BlockedLoop(lambda: None, lambda *_: None)
    blocking.watch(unwatched, ["a run"])
    assert unwatched not in blocking._watched


@locked
@pytest.mark.usefixtures("new_watches")
async def test_a_thread_watches_the_loop_while_there_are_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "_LIMIT_SECONDS", 0.02)
    monkeypatch.setattr(blocking, "_PAUSE_SECONDS", 0.01)
    shown = threading.Event()
    monkeypatch.setattr(warnings, "warn_explicit", lambda *_: shown.set())

    async def program(ctx: ReplicaContext) -> None:
        await ctx.barrier()
        assert shown.wait(60)

    await run(mirrored(1), program)


@pytest.mark.usefixtures("new_watches")
@pytest.mark.every_loop
async def test_a_real_timer_watches_a_real_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0.01")
    shown = anyio.Event()

    def warn(_text: str, category: type[Warning], *_: Any) -> None:  # filters are shared with threads
        if category is StallWarning:
            shown.set()

    monkeypatch.setattr(warnings, "warn_explicit", warn)
    await run(mirrored(2), waits_for(shown))


@pytest.mark.usefixtures("new_watches")
async def test_zero_seconds_turn_the_warning_off_and_invalid_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in ("soon", "-1", "inf", "nan"):
        monkeypatch.setenv("AIODIST_STALL_SECONDS", text)
        with pytest.raises(ValueError, match="AIODIST_STALL_SECONDS must be a number of seconds, 0 for no"):
            await run(mirrored(2), lambda ctx: ctx.barrier())
    monkeypatch.setenv("AIODIST_STALL_SECONDS", "0")
    watch = watch_here()
    assert watch is not None
    assert not watch.warns  # it only looks for deadlocks
    monkeypatch.delenv("AIODIST_STALL_SECONDS")
    assert stall_seconds() == 10


@locked
def test_loop_that_was_closed_in_the_middle_of_a_run_is_no_longer_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "_PAUSE_SECONDS", 0.01)
    loop = asyncio.new_event_loop()
    loop.close()
    left = BlockedLoop(lambda: loop, lambda *_: None)
    blocking.watch(left, ["a run that never ends"])
    while left in blocking._watched:
        threading.Event().wait(0.01)
