"""Runs that can continue are waited for; others end with a `DeadlockError` or a timeout, and a useful text."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console
from rich.progress import Progress

from aiodist import CollectiveTimeoutError, DeadlockError, Reason
from tests.checking.programs import Main, result, value
from tests.project.paths import ROOT
from tests.runtime.programs import check_golden, here, mirrored, replica

GOLDEN = Path(__file__).parent / "golden"

# Runs that can continue.


def work_until_the_loop_waits() -> None:
    """Keep this thread at work until the main thread's loop waits for threads in real time."""
    main, limit = threading.main_thread().ident, time.monotonic() + 20
    while time.monotonic() < limit:
        frame = sys._current_frames().get(main or 0)
        while frame is not None:
            if frame.f_code.co_qualname == "ControlledLoop._wait_for_more":
                return
            frame = frame.f_back


async def work_in_threads() -> None:
    loop = asyncio.get_running_loop()
    for start in (asyncio.to_thread, anyio.to_thread.run_sync, partial(loop.run_in_executor, None)):
        async with asyncio.timeout(1000):  # which the clock must not jump to
            await start(work_until_the_loop_waits)


async def thread_awaited_in_a_loop() -> None:
    go_on = threading.Event()
    task = asyncio.create_task(asyncio.to_thread(go_on.wait, 20))
    await asyncio.sleep(0)
    go_on.set()
    while not task.done():  # noqa: ASYNC110  (programs do)
        await asyncio.sleep(0)


async def sockets() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await writer.wait_closed()


async def subprocess() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-SEc", "pass")
    assert await process.wait() == 0


def after(wait: Coroutine[Any, Any, Any], act: Callable[..., object], *args: Any) -> Coroutine[Any, Any, Any]:
    """Return a wait during which a thread acts."""

    def work() -> None:
        work_until_the_loop_waits()
        act(*args)

    async def both() -> Any:
        thread = threading.Thread(target=work)
        thread.start()
        found = await wait
        thread.join()
        return found

    return both()


async def foreign_thread() -> None:
    ready = asyncio.Event()
    await after(ready.wait(), asyncio.get_running_loop().call_soon_threadsafe, ready.set)


async def signal_handler() -> None:
    loop, got = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, got.set)
    await after(got.wait(), os.kill, os.getpid(), signal.SIGUSR1)
    loop.remove_signal_handler(signal.SIGUSR1)


POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@pytest.mark.parametrize(
    "main",
    [
        *(work_in_threads, thread_awaited_in_a_loop, foreign_thread, sockets, subprocess),
        pytest.param(signal_handler, marks=POSIX),
    ],
)
def test_run_that_can_continue_is_no_deadlock(main: Main) -> None:
    value(main)


# Runs that cannot; docs/checking.md has a lock that is held across a collective.


async def empty_queue_with_idle_threads() -> None:
    items: asyncio.Queue[int] = asyncio.Queue()

    async def next_item() -> int:
        return await items.get()

    async def program() -> None:
        await here().run_sync(int)
        await here().barrier()
        if replica() == 1:
            await next_item()
        await here().all_reduce("SUM", 1.0)

    work: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(target=work.get)
    thread.start()
    try:
        await mirrored(3).run(program)
    finally:
        work.put(0)
        thread.join()


async def locks_in_opposite_order() -> None:
    locks = [asyncio.Lock(), asyncio.Lock()]

    async def program() -> None:
        first = replica() % 2
        async with locks[first]:
            await asyncio.sleep(1)
            async with locks[1 - first]:
                pass

    await mirrored(2).run(program)


async def sleep_forever() -> None:
    await mirrored(2).run(anyio.sleep_forever)


async def alike_child_tasks() -> None:
    async def program() -> None:
        await asyncio.gather(forever(), forever(), forever())

    await mirrored(1).run(program)


@pytest.mark.parametrize(
    "main", [empty_queue_with_idle_threads, locks_in_opposite_order, sleep_forever, alike_child_tasks]
)
def test_deadlock_is_proved_and_reported(main: Main, update_golden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    error = result(main).error
    assert isinstance(error, DeadlockError)
    assert error.report.reason is Reason.DEADLOCK
    check_golden(GOLDEN / main.__name__, error, update_golden)


# Where the error is raised.


async def forever() -> None:
    await asyncio.Event().wait()


def test_youngest_of_nested_runs_is_ended_first() -> None:
    async def merged(strategy: Any) -> str:
        with pytest.raises(DeadlockError):
            await strategy.run(forever)
        return "inner"

    async def program() -> Any:
        return await here().merge_call(merged)

    async def main() -> Any:
        return await mirrored(2).run(program)

    assert value(main).values == ("inner", "inner")


@pytest.mark.leaves_tasks
def test_main_that_waits_forever_outside_of_runs_is_ended() -> None:
    async def main() -> None:
        await asyncio.create_task(forever())

    error = result(main).error
    assert isinstance(error, DeadlockError)
    assert error.report.replicas == ()
    assert "forever() at " in str(error)


@pytest.mark.leaves_tasks
def test_replica_that_ignores_the_deadlock_does_not_hang_the_loop() -> None:
    async def program() -> None:
        with anyio.CancelScope(shield=True):
            await forever()

    assert isinstance(result(lambda: mirrored(2).run(program)).error, DeadlockError)


def test_replica_that_polls_for_a_day_while_another_waits_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._checking.loop._MOST_JUMPS", 100)

    async def program(pause: float, times: int) -> None:
        if replica():
            for _ in range(times):
                await asyncio.sleep(pause)
        await here().barrier()

    def main(*args: int) -> Main:
        return lambda: mirrored(3).run(program, args)

    error = result(main(800, 300)).error
    assert isinstance(error, DeadlockError)
    assert (error.report.reason, error.report.suspects) == (Reason.LIVELOCK, (1, 2))
    first, *lines = str(error).splitlines()
    assert first == "no replica has made progress for a day of virtual time"
    assert any("replicas 1 and 2 wait for asyncio.sleep(800) (" in line for line in lines)
    for pause, times in ((3600, 90), (100, 150)):  # a long wait of few sleeps, and a short one of many
        value(main(pause, times))


def test_thread_that_never_ends_is_waited_for_until_the_timeout() -> None:
    release = threading.Event()

    async def main() -> None:
        thread = threading.Thread(target=release.wait, args=(20,))
        thread.start()
        try:
            await mirrored(2).run(forever)
        finally:
            release.set()
            thread.join()

    error = result(main, seconds=0.05).error
    assert isinstance(error, CollectiveTimeoutError)
    assert "At work in threads: 'Thread-" in str(error)
    assert "--timeout" in str(error)


def test_echo_of_a_deadlock_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        child = asyncio.create_task(here().barrier())
        await asyncio.sleep(0)
        await (forever() if replica() else here().barrier())
        del child

    assert isinstance(result(lambda: mirrored(2).run(program)).error, DeadlockError)
    gc.collect()
    assert caplog.records == []


def test_stuck_thread_at_the_end_of_a_loop_hides_no_deadlock() -> None:
    go_on = threading.Event()

    async def program() -> None:
        await asyncio.to_thread(go_on.wait)

    error = result(lambda: mirrored(2).run(program)).error  # pytest would raise asyncio's warning (3.12 on)
    go_on.set()
    assert isinstance(error, DeadlockError)


def test_thread_of_a_progress_display_only_watches() -> None:
    with Progress(console=Console(file=io.StringIO()), auto_refresh=True) as progress:
        for _ in progress.track(range(1)):
            assert isinstance(result(lambda: mirrored(2).run(forever)).error, DeadlockError)
