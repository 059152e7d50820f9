"""Testing programs that run on replicas: on a controlled event loop, under many schedules, with recorded collectives.

Call these functions from plain functions: each call makes its own event loop, on which time is virtual and a deadlock
is an error at once. The pytest plugin ``aiodist.testing.pytest_plugin`` does the same for test functions with a marker.
Enable it by name, with ``-p`` or ``pytest_plugins``.
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
        schedules: the number of schedules that were run; fewer than requested if the program leaves no choice.
        results: what the replicas returned in the first schedule, one entry per replica.
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

    Time is virtual: sleeps take no time, and a timeout expires only when nothing else can happen before it.

    Args:
        fn: the replica function.
        n: the number of CPU replicas, or a strategy.
        args: the function's arguments, as for `Strategy.run`.
        kwargs: its keyword arguments, as for `Strategy.run`.
        replay: a failing schedule to repeat, as `explore` and ``aiodist check`` print it.
        timeout: the limit in real seconds; None for no limit.

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

    The first schedule is asyncio's order, the second its reverse. Then random schedules alternate with ones that target
    places where the order can differ. A failing schedule is reduced to the fewest changes that still fail; notes on the
    error list them and say how to repeat the run. State outside the function is not reset between runs.

    Args:
        fn: the replica function.
        n: the number of CPU replicas, or a strategy.
        schedules: the largest number of schedules to run.
        seed: the seed of the schedules, and of `random` and `numpy.random` in the program.
        args: the function's arguments, as for `Strategy.run`.
        kwargs: its keyword arguments, as for `Strategy.run`.
        replay: the one schedule to run instead.
        timeout: the limit for each run in real seconds; None for no limit.

    Returns:
        The number of schedules, and the results of the first.

    Raises:
        DeadlockError: nothing can run any more.
        CollectiveError: the replicas disagreed, or took longer than ``timeout``.
        RuntimeError: an event loop is running already. Call this from a plain function, not from a coroutine.
        ValueError: ``n`` is not a number of replicas; ``schedules`` is less than 1; ``replay`` is not a schedule.
        Exception: whatever a replica raised.
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
        for line in exploration.describe_changes(where):
            exploration.error.add_note(line)
        exploration.error.add_note(f"to run it again: replay={str(exploration.schedule)!r}")
        raise exploration.error
    return Explored(exploration.schedules, strategy.experimental_local_results(exploration.value))


# Recordings of collectives, to compare with each other or with a list.


class Recording(list[CallRecord]):
    """The completed collectives of recorded runs, in order.

    It is a list of `CallRecord`. Each has the call, and the call site of the replica that called first.
    """

    @property
    def calls(self) -> list[str]:
        """The calls as text, e.g. ``all_reduce(SUM, float32[3])``."""
        return [record.call for record in self]


class _Recorder(Observer):
    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def completed(self, slot: Slot) -> None:
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


def assert_same_collectives(actual: Iterable[CallRecord | str], expected: Iterable[CallRecord | str]) -> None:
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
    diff = difflib.unified_diff(left, right, "expected", "actual", lineterm="", n=2)
    headline = f"the collectives differ: {count(len(right), 'call')}, expected {len(left)}"
    raise AssertionError("\n".join([headline, *diff]))


def _texts(calls: Iterable[CallRecord | str]) -> list[str]:
    return [call if isinstance(call, str) else call.call for call in calls]
