"""The controlled loop runs what asyncio runs, in its order unless a schedule says otherwise, and its clock jumps."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from aiodist import DeadlockError, get_replica_context
from aiodist.checking.runs import function_program, run
from aiodist.checking.schedule import Order
from tests.checking.programs import ASIDE, ended, letters, mirrored, value


async def events_of_all_kinds() -> list[str]:
    """Callbacks, tasks, locks, queues and cancellations; the order in which they come."""
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


async def replicas_in_order() -> list[int]:
    seen: list[int] = []

    async def replica() -> None:
        ctx = get_replica_context()
        for _ in range(3):
            seen.append(ctx.replica_id_in_sync_group)
            await ctx.all_reduce("SUM", np.ones(2))
            await asyncio.sleep(0.001 * ctx.replica_id_in_sync_group)

    await mirrored(3).run(replica)
    return seen


@pytest.mark.parametrize("program", [events_of_all_kinds, replicas_in_order, letters(5)])
def test_plain_order_is_that_of_asyncio(program: Callable[[], Any]) -> None:
    assert value(program) == asyncio.run(program())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), "012012"),
        (((0, 1),), "102102"),
        (((0, 2),), "201201"),
        (((0, -1),), "201201"),
        (((0, -1), (1, -1)), "210210"),
        (((2, 1),), "012102"),
        (((0, ASIDE),), "121200"),
        (((0, 9),), "012012"),
        (((1, ASIDE), (3, ASIDE)), "020211"),
        (((7, 1), (90, 1)), "012012"),
    ],
)
def test_a_change_alters_who_runs(changes: tuple[tuple[int, int], ...], expected: str) -> None:
    assert value(letters(3), *changes) == expected


def test_who_steps_aside_is_not_starved_by_one_that_waits_for_it_in_a_loop() -> None:
    async def main() -> bool:
        done = False

        async def slow() -> None:
            nonlocal done
            done = True

        async def spinning() -> None:
            while not done:  # noqa: ASYNC110  (programs do)
                await asyncio.sleep(0)

        await asyncio.gather(slow(), spinning())
        return done

    assert value(main, (0, ASIDE))


def test_callbacks_that_stand_before_a_chosen_task_run_before_it() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def task(name: str) -> None:
            seen.append(name)

        tasks = [asyncio.create_task(task("a"))]
        asyncio.get_running_loop().call_soon(seen.append, "callback")
        tasks.append(asyncio.create_task(task("b")))
        await asyncio.wait(tasks)
        return seen

    assert value(main) == ["a", "callback", "b"]
    assert value(main, (0, 1)) == ["callback", "b", "a"]


def test_clock_jumps_over_sleeps() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(100_000))
        return loop.time() - began

    began = time.monotonic()
    assert value(main) == pytest.approx(100_000)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("where", ["device", "asyncio", "anyio"])
def test_work_in_threads_comes_back_in_an_order_that_does_not_depend_on_who_was_faster(where: str) -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        pauses = [0.02, 0.0, 0.01, 0.005]

        async def replica() -> None:
            ctx = get_replica_context()
            pause = pauses[ctx.replica_id_in_sync_group]
            if where == "device":
                await ctx.run_sync(time.sleep, pause)
            elif where == "asyncio":
                await asyncio.to_thread(time.sleep, pause)
            else:
                await anyio.to_thread.run_sync(time.sleep, pause)
            seen.append(ctx.replica_id_in_sync_group)

        await mirrored(4).run(replica)
        return seen

    assert value(main) == [0, 1, 2, 3]


def test_timers_come_however_late_it_is() -> None:
    async def long_nights() -> float:
        for _ in range(3):
            await asyncio.sleep(86_400 * 365.25)
            await asyncio.sleep(0.001)
        return asyncio.get_running_loop().time()

    assert value(long_nights) == pytest.approx(3 * 86_400 * 365.25, rel=1e-9)


def test_sleep_for_ever_is_no_hope() -> None:
    assert isinstance(ended(lambda: mirrored(2).run(anyio.sleep_forever)).error, DeadlockError)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_alarm_that_a_program_has_set_is_waited_for() -> None:
    async def main() -> None:
        rang, loop = asyncio.Event(), asyncio.get_running_loop()
        signal.signal(signal.SIGALRM, lambda *_: loop.call_soon_threadsafe(rang.set))
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        await rang.wait()

    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    try:
        value(main)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_random_numbers_are_those_of_the_seed_and_the_caller_keeps_his() -> None:
    async def main() -> tuple[float, float]:
        return random.random(), float(np.random.random())  # noqa: NPY002

    before = random.getstate()
    assert value(main, seed=3) == value(main, seed=3) != value(main, seed=4)
    assert random.getstate() == before


def test_tasks_that_are_cancelled_from_a_set_unwind_in_the_order_of_their_creation() -> None:
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

    assert value(main, seed=5) == list(range(9))


@pytest.mark.filterwarnings("ignore:.*get_event_loop_policy:DeprecationWarning")
def test_a_function_that_makes_loops_itself_gets_controlled_ones() -> None:
    def main() -> list[Any]:
        return [asyncio.run(letters(2)()), asyncio.run(letters(2)())]

    before = asyncio.get_event_loop_policy()
    how = run(function_program(main), Order(), seed=0, seconds=20)
    assert how.value == ["0101", "0101"]
    assert how.loops == 2
    assert asyncio.get_event_loop_policy() is before


def test_errors_come_out_of_the_run() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise ValueError("as it is")

    how = ended(main)
    assert isinstance(how.error, ValueError)
    assert str(how.schedule) == "0/"


def test_interruption_is_no_outcome() -> None:
    async def main() -> None:
        await asyncio.sleep(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ended(main)


@pytest.mark.leaves_tasks
def test_endless_run_is_ended_after_its_time() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110  (programs do)
            await asyncio.sleep(0)

    how = ended(main, seconds=0.05)
    assert isinstance(how.error, TimeoutError)
    assert "longer than 0.05 s" in str(how.error)
