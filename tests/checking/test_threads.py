"""Which threads could act, and which only wait for another thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from aiodist._checking.threads import at_work
from aiodist._runtime.stacks import can_read_other_threads
from tests.checking.programs import value

pytestmark = pytest.mark.skipif(not can_read_other_threads(), reason="there is no interpreter lock to keep")


def wait_until_idle() -> None:
    while at_work(pause=0.0002):
        pass


@contextmanager
def nobody_else_runs() -> Iterator[None]:
    """Keep the interpreter lock, so that a thread that has been notified stays where it is."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_thread_that_has_been_notified_is_busy_before_it_runs() -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    wait_until_idle()
    with nobody_else_runs():
        event.set()
        found = at_work(pause=0)
    thread.join()
    assert thread in found


def test_submitted_work_is_seen_before_its_thread_runs() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool:
            for give in (pool.submit, partial(loop.run_in_executor, pool)):
                pool.submit(int).result()  # so its thread waits for more
                wait_until_idle()
                with nobody_else_runs():
                    work = give(int)
                    assert at_work(pause=0)
                await asyncio.wait([asyncio.wrap_future(work)])

    value(main)


def test_work_that_no_thread_can_begin_is_not_at_work() -> None:
    """The only thread waits for what the work behind it would do: a deadlock, which needs no timeout."""

    async def main() -> None:
        event = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(event.wait)
            second = pool.submit(event.set)
            try:
                wait_until_idle()
                assert not second.done()
            finally:
                event.set()
            await asyncio.wait([asyncio.wrap_future(first)])

    value(main)


def test_thread_of_an_executor_that_is_shut_down_can_act() -> None:
    pool = ThreadPoolExecutor(1, "pool")
    pool.submit(int).result()
    wait_until_idle()
    with nobody_else_runs():
        pool.shutdown(wait=False)
        found = at_work(pause=0)
    pool.shutdown()
    assert found
