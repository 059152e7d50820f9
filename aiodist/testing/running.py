"""Running replicas in a test: once, or under many schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiodist._checking import explore as exploring
from aiodist._checking.explore import Program, coroutine_program
from aiodist._checking.schedule import Schedule
from aiodist._core.errors import ReplicaContextError
from aiodist._runtime.loop import current_loop
from aiodist._strategy.strategy import MirroredStrategy, Strategy

_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Explored:
    """The result of an exploration in which nothing failed.

    Attributes:
        schedules: how many schedules were run: fewer than requested if the program leaves no choice.
        results: what the replicas returned in the first of them, one entry per replica.
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
    """Run a replica function once, on a controlled event loop, in asyncio's order.

    Time is virtual there: sleeps take no time, and a timeout fires only when nothing else can happen before it.

    Args:
        fn: the replica function.
        n: the number of CPU replicas, or a strategy.
        args: its arguments, as for `Strategy.run`.
        kwargs: its keyword arguments, as for `Strategy.run`.
        replay: a failing schedule to repeat, as `explore` and ``aiodist check`` print it.
        timeout: limit in real seconds; None for no limit.

    Returns:
        What the replicas returned, one entry per replica.

    Raises:
        DeadlockError: nothing can run any more.
        CollectiveError: replicas disagreed, or took longer than ``timeout``.
        RuntimeError: an event loop runs already: call it from a plain function, not from a coroutine.
        ValueError: ``n`` is not a number of replicas; ``replay`` is not a schedule.
        Exception: what a replica raised.
    """
    __tracebackhide__ = True
    schedule = Schedule.parse(replay) if replay is not None else Schedule()
    strategy, program = _program(fn, n, args, kwargs)
    exploration = exploring.replay(program, schedule, seconds=timeout)
    if exploration.error is not None:
        raise exploration.error
    return strategy.experimental_local_results(exploration.result.value)


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
    """Run a replica function under many schedules, which are orders of ready tasks; stop at the first that fails.

    The first is asyncio's order, the second its reverse; then random schedules alternate with ones directed at places
    where the order can differ. A failing schedule is reduced to the fewest changes that still fail; notes on the error
    say what they are and how to repeat the run. What a run changes outside the function stays changed for the next.

    Args:
        fn: the replica function.
        n: the number of CPU replicas, or a strategy.
        schedules: how many to run at most.
        seed: seed of the schedules, and of `random` and `numpy.random` in the program.
        args: the function's arguments, as for `Strategy.run`.
        kwargs: its keyword arguments, as for `Strategy.run`.
        replay: the one schedule to run instead.
        timeout: limit of one run in real seconds; None for no limit.

    Raises:
        DeadlockError: nothing can run any more.
        CollectiveError: replicas disagreed, or took longer than ``timeout``.
        RuntimeError: an event loop runs already: call it from a plain function, not from a coroutine.
        ValueError: ``n`` is not a number of replicas; ``schedules`` is less than 1; ``replay`` is not a schedule.
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
    if exploration.error is not None:
        where = "in the schedule given" if replay is not None else f"in schedule {exploration.schedules}"
        for line in exploration.story(where):
            exploration.error.add_note(line)
        exploration.error.add_note(f"to run it again: replay={str(exploration.result.schedule)!r}")
        raise exploration.error
    return Explored(exploration.schedules, strategy.experimental_local_results(exploration.result.value))


def _program(
    fn: Callable[..., Any], n: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Strategy, Program]:
    with suppress(ReplicaContextError):
        current_loop()
        raise RuntimeError(
            "aiodist.testing runs replicas on its own event loop, and another one runs here already: "
            "call it from a plain function, not from a coroutine"
        )
    strategy: Strategy
    if isinstance(n, Strategy):
        strategy = n
    elif isinstance(n, int) and n >= 1:
        strategy = MirroredStrategy(n)
    else:
        raise ValueError(f"n must be a number of replicas, at least 1, or a strategy, got {n!r}")
    return strategy, coroutine_program(partial(strategy.run, fn, args, kwargs))
