"""Which threads could act, and which only wait for what another one does."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from aiodist._checking import threads
from aiodist._checking.threads import busy_threads
from aiodist._runtime.stacks import other_threads_can_be_looked_at
from tests.checking.programs import value


def busy() -> list[str]:
    """Return the names of threads that are busy at this moment."""
    return [thread.name for thread in busy_threads(pause=0)]


def wait_until_idle() -> None:
    while busy_threads(pause=0.0002):
        pass


@contextmanager
def nobody_else_runs() -> Iterator[None]:
    """Keep the interpreter's lock, so that a thread that has been woken stays where it was."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


with_a_lock = pytest.mark.skipif(not other_threads_can_be_looked_at(), reason="there is no interpreter lock to keep")

ITEMS: queue.Queue[int] = queue.Queue()
EVENT = threading.Event()


@pytest.mark.parametrize(("wait", "wake"), [(ITEMS.get, lambda: ITEMS.put(1)), (EVENT.wait, EVENT.set)])
@with_a_lock
def test_thread_that_has_been_woken_is_busy_before_it_runs(wait: Any, wake: Any) -> None:
    thread = threading.Thread(target=wait)
    thread.start()
    wait_until_idle()
    with nobody_else_runs():
        wake()
        found = thread in busy_threads(pause=0)
    thread.join()
    assert found


@with_a_lock
def test_work_that_an_executor_has_handed_out_is_seen_before_its_thread_runs() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(20):
            async with asyncio.timeout(1000):  # which the clock must not jump to
                with nobody_else_runs():
                    await loop.run_in_executor(None, int)

    value(main)


@with_a_lock
def test_work_that_a_program_has_submitted_is_seen_before_its_thread_runs() -> None:
    with ThreadPoolExecutor(2, "pool") as pool:
        both = threading.Barrier(2)
        for work in [pool.submit(both.wait) for _ in range(2)]:
            work.result()
        for _ in range(50):
            wait_until_idle()
            with nobody_else_runs():
                work = pool.submit(int)
                found = busy()
            assert [name for name in found if name.startswith("pool_")]
            work.result()


def test_executor_that_has_lost_count_of_its_threads_is_believed_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1, "pool") as pool:
        pool.submit(int).result()
        wait_until_idle()
        assert pool._idle_semaphore.acquire(timeout=0)
        assert "pool_0" in busy()
        monkeypatch.setattr(threads, "_COUNT_SECONDS", 0.0)
        assert "pool_0" not in busy()


@with_a_lock
def test_thread_of_an_executor_that_is_shut_down_is_about_to_end() -> None:
    pool = ThreadPoolExecutor(1, "pool")
    pool.submit(int).result()
    wait_until_idle()
    with nobody_else_runs():
        pool.shutdown(wait=False)
        found = busy()
    pool.shutdown()
    assert "pool_0" in found
