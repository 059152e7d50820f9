"""Testing programs that run on replicas: on a controlled event loop, under many schedules, with recorded collectives.

Call these functions from plain functions: each call makes its own event loop, on which time is virtual and a deadlock
is an error at once. The pytest plugin ``aiodist.testing.pytest_plugin`` does the same for test functions with a marker;
it is enabled by name, with ``-p`` or ``pytest_plugins``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiodist._checking import explore as exploring
from aiodist._checking.schedule import Schedule
from aiodist._core.errors import ReplicaContextError
from aiodist._core.instrument import Observer, observing
from aiodist._core.ledger import Slot
from aiodist._core.report import CallRecord
from aiodist._core.text import count
from aiodist._runtime.loop import current_loop
from aiodist._strategy.strategy import MirroredStrategy, Strategy

__all__ = ["Explored", "Recording", "assert_same_collectives", "explore", "record_collectives", "run_replicas"]


# Running replicas, once or under many schedules.


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
    timeout: float | None = 60.0,
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
        Exception: the same as from `explore`.
    """
    __tracebackhide__ = True
    return explore(fn, n, 1, 0, args, kwargs, replay=replay, timeout=timeout).results


def explore(
    fn: Callable[..., Any],
    n: int | Strategy,
    schedules: int = 100,
    seed: int = 0,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    replay: str | None = None,
    timeout: float | None = 60.0,
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
    with suppress(ReplicaContextError):
        current_loop()
        raise RuntimeError(
            "aiodist.testing runs replicas on its own event loop, but another one is running here already: "
            "call it from a plain function, not from a coroutine; in a notebook, in a thread: "
            "await asyncio.to_thread(run_replicas, fn, n)"
        )
    strategy = n if isinstance(n, Strategy) else MirroredStrategy(n)
    program = partial(strategy.run, fn, args, kwargs)
    if replay is not None:
        exploration = exploring.replay(program, Schedule.parse(replay), seconds=timeout)
    else:
        exploration = exploring.explore(program, schedules=schedules, seed=seed, seconds=timeout)
    if exploration.error is not None:
        where = "in the schedule given" if replay is not None else f"in schedule {exploration.schedules}"
        for line in exploration.story(where):
            exploration.error.add_note(line)
        exploration.error.add_note(f"to run it again: replay={str(exploration.schedule)!r}")
        raise exploration.error
    return Explored(exploration.schedules, strategy.experimental_local_results(exploration.value))


# Recordings of collectives: which were made, to compare with others or with a list.


class Recording(list[CallRecord]):
    """The collectives that were completed, in order, of the runs that began while it was made.

    It is a list of `CallRecord`: each says what was called and where, at the call site of the replica that called
    first.
    """

    @property
    def calls(self) -> list[str]:
        """The calls as text, e.g. ``all_reduce(SUM, float32[3])``."""
        return [record.call for record in self]


class _Recorder(Observer):
    """The observer that fills a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def completed(self, slot: Slot) -> None:
        """Record a collective that has its result."""
        if slot.error is None and slot.number >= 0:
            first = slot.first
            self._recording.append(CallRecord(slot.number, str(first.call), first.location))


@contextmanager
def record_collectives() -> Iterator[Recording]:
    """Record the collectives of the runs that begin inside the block, on any event loop.

    Yields:
        The recording, which grows while the block runs.
    """
    recording = Recording()
    with observing(_Recorder(recording)):
        yield recording


def assert_same_collectives(
    actual: Recording | Iterable[CallRecord | str], expected: Recording | Iterable[CallRecord | str]
) -> None:
    """Check that two programs made the same collectives in the same order; call sites are not compared.

    Args:
        actual: a recording, its records, or texts as in `Recording.calls`.
        expected: the same.

    Raises:
        AssertionError: they differ; the message is a diff.
    """
    left, right = _texts(expected), _texts(actual)
    if left == right:
        return
    diff = list(difflib.unified_diff(left, right, "expected", "actual", lineterm="", n=2))
    found = count(len(right), "call")
    raise AssertionError("\n".join([f"the collectives differ: {found}, expected {len(left)}", *diff]))


def _texts(calls: Iterable[CallRecord | str]) -> list[str]:
    return [call if isinstance(call, str) else call.call for call in calls]
