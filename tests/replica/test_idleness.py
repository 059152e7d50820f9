"""Whether an event loop may go on by anything but steps between workers."""

from __future__ import annotations

import asyncio
import selectors
from contextlib import closing
from typing import Any

import trio
import trio.lowlevel

from aiodist.replica import idleness
from aiodist.replica.waits import WaitGraph


def test_a_future_beside_a_step_may_come_from_anywhere() -> None:
    async def wait(things: set[Any]) -> None:
        await asyncio.wait(things)

    async def main() -> list[bool]:
        step, future = asyncio.ensure_future(wait({asyncio.Future()})), asyncio.Future[None]()
        waiting = [asyncio.ensure_future(wait(things)) for things in ({step}, {step, future})]
        await asyncio.sleep(0)
        graph = WaitGraph([step, *waiting])
        by_task = {waiter.task: waiter for waiter in graph.waiters}
        found = [idleness._waits_for_a_step(graph, by_task[task]) for task in waiting]
        for task in [step, *waiting]:
            task.cancel()
        return found

    assert asyncio.run(main()) == [True, False]


def test_an_event_loop_with_queues_of_its_own_may_have_something_to_run() -> None:
    class _OfWindows(asyncio.SelectorEventLoop):
        def _run_once(self) -> None:
            """Run what is in its queues."""

    kinds: list[type[asyncio.SelectorEventLoop]] = [asyncio.SelectorEventLoop, _OfWindows]
    for kind in kinds:
        with closing(kind()) as loop:
            assert idleness._on_asyncio(loop) is (kind is _OfWindows)


def test_an_event_loop_that_waits_in_a_selector_of_the_programs_may_have_something_to_run() -> None:
    class _RunsWindows(selectors.DefaultSelector):
        pass

    with closing(asyncio.SelectorEventLoop(_RunsWindows())) as loop:
        assert idleness._on_asyncio(loop)


def test_trio_as_the_guest_of_another_loop_may_have_something_to_run() -> None:
    async def guest() -> bool:
        return idleness._on_trio()

    async def host() -> Any:
        loop, found = asyncio.get_running_loop(), asyncio.Future[Any]()
        trio.lowlevel.start_guest_run(
            guest, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=found.set_result
        )
        return (await found).unwrap()

    assert asyncio.run(host())
