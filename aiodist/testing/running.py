"""Running replicas in a test: once, or under many schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiodist._checking import explore as exploring
from aiodist._checking.explore import Program, Result, coroutine_program
from aiodist._checking.schedule import Schedule
from aiodist._core.text import count
from aiodist._runtime.loop import running_on_trio
from aiodist._strategy.base import Strategy
from aiodist._strategy.mirrored import MirroredStrategy

_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Explored:
    """What came of an exploration in which nothing failed.

    Attributes:
        schedules: how many schedules were run: fewer than were asked for where the program leaves no choice.
        results: what the replicas returned in the first of them, one entry each.
    """

    schedules: int
    results: tuple[Any, ...]


def run_replicas(
    fn: Callable[..., Any],
    n: int | Strategy,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    replay: str | None = None,
    timeout: float | None = _SECONDS,
) -> tuple[Any, ...]:
    """Run a replica function once, on a controlled loop, in asyncio's order.

    Time is virtual there: sleeps take none, and timeouts come when nothing else can.

    Args:
        fn: the replica function.
        n: on how many CPU replicas; or a strategy.
        args: its arguments, as for `Strategy.run`.
        kwargs: its keyword arguments, likewise.
        replay: a schedule that failed, as `explore` and ``aiodist check`` print it, to run in that order.
        timeout: how long it may take, in real seconds; None: as long as it likes.

    Returns:
        What the replicas returned, one entry each.

    Raises:
        DeadlockError: nothing can run any more.
        CollectiveError: replicas did not meet, or took longer than ``timeout``.
        RuntimeError: called in a coroutine: it makes an event loop of its own.
        ValueError: ``n`` is no number of replicas; ``replay`` is no schedule.
        Exception: what a replica raised.
    """
    __tracebackhide__ = True
    schedule = Schedule.parse(replay) if replay is not None else Schedule()
    strategy, program = _program(fn, n, args, kwargs)
    exploration = exploring.replay(program, schedule, seconds=timeout)
    ended = exploration.failure or exploration.default
    assert ended is not None
    if ended.error is not None:
        raise ended.error
    return strategy.experimental_local_results(ended.value)


def explore(
    fn: Callable[..., Any],
    n: int | Strategy,
    schedules: int = 100,
    seed: int = 0,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    replay: str | None = None,
    timeout: float | None = _SECONDS,
) -> Explored:
    """Run a replica function under many schedules: orders in which ready tasks run. Stop at the first that fails.

    The first is asyncio's order, the second its reverse; then come random ones, and ones directed at the places where
    the order can be another. A failing schedule is reduced to the fewest changes that still fail; notes on the error
    tell what they are, and how to run it again. What a run changes outside the function, the next one finds changed.

    Args:
        fn: the replica function.
        n: on how many CPU replicas; or a strategy.
        schedules: how many to run at most.
        seed: what they are drawn from, and the random numbers of `random` and `numpy.random` in the program.
        args: the function's arguments, as for `Strategy.run`.
        kwargs: its keyword arguments, likewise.
        replay: the one schedule to run instead.
        timeout: how long a run may take, in real seconds; None: as long as it likes.

    Raises:
        DeadlockError: nothing can run any more.
        CollectiveError: replicas did not meet, or took longer than ``timeout``.
        RuntimeError: called in a coroutine: it makes an event loop of its own.
        ValueError: ``n`` is no number of replicas; ``schedules`` is less than 1; ``replay`` is no schedule.
        Exception: what a replica raised.
    """
    __tracebackhide__ = True
    if schedules < 1:
        raise ValueError(f"schedules must be at least 1, got {schedules}")
    strategy, program = _program(fn, n, args, kwargs)
    if replay is not None:
        exploration = exploring.replay(program, Schedule.parse(replay), seconds=timeout)
    else:
        exploration = exploring.explore(program, schedules=schedules, seed=seed, seconds=timeout)
    if exploration.failure is not None:
        _tell(exploration, exploration.failure)
        assert exploration.failure.error is not None
        raise exploration.failure.error
    assert exploration.default is not None
    return Explored(exploration.schedules, strategy.experimental_local_results(exploration.default.value))


def _program(
    fn: Callable[..., Any], n: int | Strategy, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Strategy, Program]:
    _check_no_loop()
    strategy = n if isinstance(n, Strategy) else _cpus(n)
    return strategy, coroutine_program(partial(strategy.run, fn, args, kwargs))


def _cpus(n: object) -> Strategy:
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a number of replicas, from 1 on, or a strategy, got {n!r}")
    return MirroredStrategy([f"CPU:{index}" for index in range(n)])


def _check_no_loop() -> None:
    if running_on_trio() or _asyncio_runs():
        raise RuntimeError(
            "aiodist.testing runs replicas on an event loop of its own, and one runs here already: "
            "call it from a plain function, not from a coroutine"
        )


def _asyncio_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _tell(exploration: exploring.Exploration, failure: Result) -> None:
    """Note on an error how it came about."""
    assert failure.error is not None
    changes = len(failure.schedule.changes)
    if changes:
        where = f"in schedule {exploration.schedules}" if exploration.default is not None else "in the schedule given"
        failure.error.add_note(f"{where}, with {count(changes, 'change')} to the default order:")
        for line in exploration.changes:
            failure.error.add_note(f"  {line}")
    failure.error.add_note(f"to run it again: replay={str(failure.schedule)!r}")
