"""The controlled loop: its order, its clock, and calls from threads."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist._checking.explore import replay
from aiodist._checking.loop import HeldUpLoop
from aiodist._checking.schedule import DEFER, Schedule
from aiodist._runtime.blocking import watch
from aiodist._runtime.stacks import can_read_other_threads
from tests.checking.programs import Main, value
from tests.runtime.programs import here, mirrored, replica


def letters(tasks: int, turns: int = 2) -> Main:
    """Return a program whose tasks write their numbers once a turn; its value is the text."""

    async def main() -> str:
        written: list[str] = []

        async def task(number: int) -> None:
            for _ in range(turns):
                written.append(str(number))
                await asyncio.sleep(0)

        await asyncio.gather(*(task(number) for number in range(tasks)))
        return "".join(written)

    return main


async def events_of_all_kinds() -> list[str]:
    """Return the order of callbacks, tasks, locks, queues, timers and cancellations."""
    loop, seen = asyncio.get_running_loop(), []
    lock, queue = asyncio.Lock(), asyncio.Queue[int](1)

    async def worker(name: str, pauses: int) -> None:
        async with lock:
            seen.append(f"{name} has the lock")
            for _ in range(pauses):
                await asyncio.sleep(0)
        await queue.put(1)
        seen.append(f"{name} has put")

    async def reader() -> None:
        while True:
            await queue.get()
            loop.call_soon(seen.append, "got")

    async def impatient() -> None:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("timeout")

    reading = asyncio.create_task(reader())
    loop.call_later(0, seen.append, "timer")
    loop.call_soon(seen.append, "soon")
    loop.call_soon(reading.get_name)
    async with asyncio.TaskGroup() as group:
        for i in range(3):
            group.create_task(worker(f"w{i}", 3 * (i == 0)))
        group.create_task(impatient())
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return seen


@pytest.mark.parametrize("program", [events_of_all_kinds, letters(5)])
def test_default_order_is_that_of_asyncio(program: Callable[[], Any]) -> None:
    assert value(program) == asyncio.run(program())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), "012012"),
        (((0, 2),), "201201"),
        (((0, -1),), "201201"),
        (((0, -1), (1, -1)), "210210"),
        (((0, DEFER),), "121200"),
        (((0, 9),), "012012"),
        (((7, 1), (90, 1)), "012012"),
    ],
)
def test_change_alters_which_task_runs(changes: tuple[tuple[int, int], ...], expected: str) -> None:
    assert value(letters(3), *changes) == expected


def test_deferred_task_is_not_starved_by_one_that_polls_for_it() -> None:
    async def main() -> None:
        done: list[bool] = []

        async def spin() -> None:
            while not done:  # noqa: ASYNC110  (programs do)
                await asyncio.sleep(0)

        async def finish() -> None:
            done.append(True)

        await asyncio.gather(finish(), spin())

    value(main, (0, DEFER))


def test_clock_jumps_to_the_next_timer_however_late_it_is() -> None:
    async def main() -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(86_400))
        for _ in range(3):
            await asyncio.sleep(86_400 * 365.25)
            await asyncio.sleep(0.001)
        return asyncio.get_running_loop().time()

    assert value(main) == pytest.approx(86_400 * (1 + 3 * 365.25), rel=1e-9)


def test_timers_of_the_same_time_run_in_the_order_of_their_requests() -> None:
    async def main() -> list[int]:
        loop, seen = asyncio.get_running_loop(), list[int]()
        for number in range(9):
            loop.call_at(5, seen.append, number)
            loop.call_at(5 - number / 10, int)
        await asyncio.sleep(6)
        return seen

    assert value(main) == list(range(9))


@pytest.mark.parametrize("where", ["device", "asyncio", "anyio"])
def test_calls_from_threads_are_ordered_by_the_tasks_that_wait_for_them(where: str) -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        done = [threading.Event() for _ in range(5)]
        done[4].set()

        def last_first(number: int) -> None:
            done[number + 1].wait(20)
            done[number].set()

        async def program() -> None:
            number = replica()
            ways: dict[str, Any] = {
                "device": here().run_sync,
                "asyncio": asyncio.to_thread,
                "anyio": anyio.to_thread.run_sync,
            }
            await ways[where](last_first, number)
            seen.append(number)

        await mirrored(4).run(program)
        return seen

    assert value(main) == [0, 1, 2, 3]


def test_random_numbers_depend_on_the_seed_and_the_caller_keeps_its_state() -> None:
    async def main() -> tuple[float, float]:
        return random.random(), float(np.random.random())  # noqa: NPY002

    def drawn(seed: int) -> object:
        return replay(main, Schedule(seed), seconds=20).value

    before = random.getstate()
    assert drawn(3) == drawn(3) != drawn(4)
    assert random.getstate() == before


def test_tasks_that_are_cancelled_together_unwind_in_the_order_of_their_creation() -> None:
    async def main() -> list[int]:
        seen: list[int] = []

        async def task(number: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append(number)

        tasks = [asyncio.create_task(task(i)) for i in range(9)]
        await asyncio.sleep(0)
        for one in random.sample(tasks, 9):
            one.cancel()
        await asyncio.wait(tasks)
        return seen

    assert value(main) == list(range(9))


@pytest.mark.skipif(not can_read_other_threads(), reason="frames of other threads cannot be read")
def test_replica_that_holds_up_the_loop_is_noted_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._runtime.blocking._PAUSE_SECONDS", 0.001)
    monkeypatch.setattr("aiodist._runtime.blocking._LIMIT_SECONDS", 0.0)
    held_up, runs = HeldUpLoop(), [1]

    def computes() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until and "replica 1 has held up" not in "".join(held_up.found):
            pass

    async def program() -> None:
        if replica() == 1:
            computes()
        await here().barrier()

    watch(held_up, runs)
    value(lambda: mirrored(3).run(program))
    runs.clear()
    assert "computes" in {place.function for text, place in held_up.found.items() if "replica 1 " in text}


def test_calls_from_threads_that_no_task_waits_for_are_ordered_by_name() -> None:
    async def main() -> list[int]:
        loop, sent = asyncio.get_running_loop(), asyncio.Queue[int]()
        for number in (2, 10, 1):
            call = partial(loop.call_soon_threadsafe, sent.put_nowait, number)
            threading.Thread(target=call, name=f"thread {number}").start()
        return [await sent.get() for _ in range(3)]

    assert value(main) == [1, 2, 10]
