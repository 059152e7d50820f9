"""A deadlock is proved, at once, and what can still go on is never taken for one."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from aiodist import CollectiveTimeoutError, DeadlockError, Reason, get_replica_context
from tests.checking.programs import Main, ended, mirrored, value

# What can still go on.


async def _timers() -> None:
    async with asyncio.timeout(50):
        await asyncio.sleep(10)


async def _threads() -> None:
    for _ in range(3):
        await asyncio.to_thread(time.sleep, 0.01)
        await anyio.to_thread.run_sync(time.sleep, 0.01)
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.01)


async def _run_sync() -> None:
    async def replica() -> None:
        ctx = get_replica_context()
        await ctx.run_sync(time.sleep, 0.01 * ctx.replica_id_in_sync_group)
        await ctx.barrier()
        await asyncio.sleep(5)

    await mirrored(3).run(replica)


async def _foreign_thread() -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()

    def call_in() -> None:
        time.sleep(0.03)
        loop.call_soon_threadsafe(ready.set)

    thread = threading.Thread(target=call_in)
    thread.start()
    await ready.wait()
    thread.join()


async def _executor_of_its_own() -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            pool.submit(time.sleep, 0.001).add_done_callback(lambda _: loop.call_soon_threadsafe(ready.set))
            await ready.wait()
            ready.clear()


async def _thread_fed_by_a_queue() -> None:
    work: queue.Queue[Callable[[], Any] | None] = queue.Queue()

    def serve() -> None:
        while (job := work.get()) is not None:
            job()

    thread = threading.Thread(target=serve)
    thread.start()
    loop = asyncio.get_running_loop()
    for _ in range(20):
        ready = asyncio.Event()
        work.put(lambda ready=ready: loop.call_soon_threadsafe(ready.set))  # type: ignore[misc]
        await ready.wait()
    work.put(None)
    thread.join()


async def _thread_awaited_in_a_loop() -> None:
    task = asyncio.create_task(asyncio.to_thread(time.sleep, 0.01))
    while not task.done():  # noqa: ASYNC110  (programs do)
        await asyncio.sleep(0)


async def _sockets() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        await writer.wait_closed()


async def _socket_read_by_hand() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        loop = asyncio.get_running_loop()
        receiving = asyncio.create_task(loop.sock_recv(ours, 5))
        await asyncio.sleep(0)
        thread = threading.Timer(0.03, theirs.send, [b"hello"])
        thread.start()
        assert await receiving == b"hello"
        thread.join()


async def _subprocess() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(0.05); print(1)")
    assert await process.wait() == 0


async def _signal() -> None:
    got = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, got.set)
    thread = threading.Timer(0.03, os.kill, [os.getpid(), signal.SIGUSR1])
    thread.start()
    await got.wait()
    thread.join()
    loop.remove_signal_handler(signal.SIGUSR1)


@pytest.mark.parametrize(
    "main",
    [
        _timers,
        _threads,
        _run_sync,
        _foreign_thread,
        _executor_of_its_own,
        _thread_fed_by_a_queue,
        _thread_awaited_in_a_loop,
        _sockets,
        _socket_read_by_hand,
        _subprocess,
        pytest.param(_signal, marks=pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")),
    ],
)
def test_what_can_still_go_on_is_no_deadlock(main: Main) -> None:
    value(main)


def test_a_timeout_around_work_in_a_thread_is_not_jumped_to() -> None:
    def slow() -> str:
        time.sleep(0.02)
        return "done"

    async def main() -> str:
        async with asyncio.timeout(30):
            return await asyncio.to_thread(slow)

    assert value(main) == "done"


# What cannot.


async def _lock_held_across_a_collective() -> None:
    lock = asyncio.Lock()

    async def replica() -> None:
        async with lock:
            await get_replica_context().all_reduce("SUM", np.ones(3))

    await mirrored(3).run(replica)


async def _nobody_sets_the_event() -> None:
    async def replica() -> None:
        await asyncio.Event().wait()

    await mirrored(3).run(replica)


async def _one_waits_for_a_queue() -> None:
    items: asyncio.Queue[int] = asyncio.Queue()

    async def replica() -> None:
        ctx = get_replica_context()
        await ctx.run_sync(time.sleep, 0.001)  # its thread is idle afterwards
        if ctx.replica_id_in_sync_group == 1:
            await items.get()
        await ctx.barrier()

    await mirrored(3).run(replica)


async def _while_a_server_thread_waits_for_work() -> None:
    work: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(target=work.get)
    thread.start()
    try:
        await _nobody_sets_the_event()
    finally:
        work.put(0)
        thread.join()


@pytest.mark.parametrize(
    ("main", "waiting", "suspects"),
    [
        (_lock_held_across_a_collective, (0,), (1, 2)),
        (_nobody_sets_the_event, (), (0, 1, 2)),
        (_one_waits_for_a_queue, (0, 2), (1,)),
        (_while_a_server_thread_waits_for_work, (), (0, 1, 2)),
    ],
)
def test_deadlock_is_proved(main: Main, waiting: tuple[int, ...], suspects: tuple[int, ...]) -> None:
    began = time.monotonic()
    error = ended(main).error
    assert time.monotonic() - began < 5
    assert isinstance(error, DeadlockError)
    report = error.report
    assert report.reason is Reason.DEADLOCK
    assert tuple(r.replica_id for r in report.replicas if r.state == "waiting") == waiting
    assert report.suspects == suspects
    assert all(r.location or r.stack for r in report.replicas)


def test_deadlock_tells_by_which_awaits_a_replica_came_to_where_it_waits() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    async def replica() -> None:
        ctx = get_replica_context()
        if ctx.replica_id_in_sync_group == 1:
            await outer()
        await ctx.barrier()

    text = str(ended(lambda: mirrored(2).run(replica)).error)
    assert re.search(r"^Replica 1 came there by \S+:\d+ in .*replica, \S+:\d+ in .*outer\.$", text, re.MULTILINE)


def test_deadlock_is_raised_in_those_who_wait_and_out_of_run_and_the_program_goes_on() -> None:
    caught: list[str] = []

    async def replica() -> None:
        ctx = get_replica_context()
        try:
            if ctx.replica_id_in_sync_group == 1:
                await asyncio.Event().wait()
            await ctx.barrier()
        except BaseException as error:
            caught.append(f"{ctx.replica_id_in_sync_group} {type(error).__name__}")
            raise

    async def main() -> str:
        strategy = mirrored(2)
        try:
            await strategy.run(replica)
        except DeadlockError:
            await strategy.run(asyncio.sleep, args=(1,))
            return "goes on"
        return "never"

    assert value(main) == "goes on"
    assert sorted(caught) == ["0 DeadlockError", "1 CancelledError"]


def test_youngest_of_nested_runs_is_ended_first() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def merged(strategy: Any) -> str:
        try:
            await strategy.run(stuck)
        except DeadlockError:
            return "inner"
        return "never"

    async def replica() -> Any:
        return await get_replica_context().merge_call(merged)

    async def main() -> Any:
        return await mirrored(2).run(replica)

    assert value(main) == "inner"


@pytest.mark.leaves_tasks
def test_main_that_waits_for_ever_outside_of_runs_is_ended_too() -> None:
    async def main() -> None:
        await asyncio.create_task(_forever())

    error = ended(main).error
    assert isinstance(error, DeadlockError)
    assert error.report.replicas == ()
    assert "_forever() at " in str(error)


async def _forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.leaves_tasks
def test_replica_that_ignores_the_deadlock_does_not_hang_the_loop() -> None:
    async def replica() -> None:
        with anyio.CancelScope(shield=True):
            await asyncio.Event().wait()

    assert isinstance(ended(lambda: mirrored(2).run(replica)).error, DeadlockError)


def test_thread_that_never_comes_is_waited_for_until_the_time_is_up() -> None:
    release = threading.Event()

    async def main() -> None:
        thread = threading.Thread(target=release.wait, args=(20,))
        thread.start()
        try:
            await _nobody_sets_the_event()
        finally:
            release.set()
            thread.join()

    error = ended(main, seconds=0.2).error
    assert isinstance(error, CollectiveTimeoutError)
    assert "At work in threads: 'Thread-" in str(error)
    assert "--timeout" in str(error)


def test_echo_of_a_verdict_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def replica() -> None:
        ctx = get_replica_context()
        children = [asyncio.create_task(_barrier(ctx))]
        await asyncio.sleep(0)
        if ctx.replica_id_in_sync_group == 1:
            await asyncio.Event().wait()
        await ctx.barrier()
        del children

    assert isinstance(ended(lambda: mirrored(2).run(replica)).error, DeadlockError)
    gc.collect()
    assert caplog.records == []


async def _barrier(ctx: Any) -> None:
    await ctx.barrier()


def test_a_progress_display_is_no_hope() -> None:
    async def replica() -> None:
        if get_replica_context().replica_id_in_sync_group:
            await asyncio.Event().wait()
        await get_replica_context().barrier()

    with Progress(console=Console(file=io.StringIO()), auto_refresh=True) as progress:
        for _ in progress.track(range(1)):
            assert isinstance(ended(lambda: mirrored(2).run(replica)).error, DeadlockError)
