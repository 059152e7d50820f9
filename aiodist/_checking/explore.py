"""Exploring: runs a program under one schedule after another until one fails, and reduces that one."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread, get_ident
from typing import Any, TypeAlias, TypeVar

import numpy as np

from aiodist._checking.loop import ControlledLoop, Execution, OnPoint, Step, making_loops
from aiodist._checking.schedule import Change, Order, Schedule, default_order, other_orders, replayed
from aiodist._checking.threads import at_work, executors_watched
from aiodist._core import analysis
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import ObservedRun, Observer, observing
from aiodist._core.report import CollectiveReport
from aiodist._core.terms import Reason
from aiodist._core.text import capitalised, count, full_place, on_a_screen
from aiodist._runtime.inspection import inspect_loop, replica_of
from aiodist._runtime.scheduler import Run
from aiodist._runtime.stacks import await_chain, frames_of, is_plumbing

T = TypeVar("T")
R = TypeVar("R")
Program: TypeAlias = Callable[[], Any]
"""What can be run again and again: a coroutine function, or a function that makes loops by `asyncio.run`."""

_REDUCING_SECONDS = 30.0
_MOST_LINES = 8
_UNWINDING_SECONDS = 5.0
_MOST_THREADS = 4
_WHAT = {
    Reason.DEADLOCK: "nothing can run any more",
    Reason.LIVELOCK: "no replica has made progress for a day of virtual time",
    Reason.TIMEOUT: "the run has taken longer than {:g} s",
}
_MORE = {
    Reason.DEADLOCK: "No timer is pending, and no thread, subprocess or socket is at work: nothing can wake them.",
    Reason.LIVELOCK: "In that time, tasks have only slept and polled, at least a thousand times.",
}
_MORE_TIME = "If a run needs that long, give it more time: --timeout, or timeout=."


class StuckRuns(Observer):
    """Ends runs that cannot continue, or have taken longer than ``seconds`` (None: no limit).

    The youngest of several is ended first, because an older one may be waiting for it. Once in a day of virtual time it
    looks for runs in which no collective has moved since the look before: their replicas only sleep and poll while
    another waits in a collective.
    """

    of_runs_alone = True

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._running: list[Any] = []  # the scheduler's `Run`, the youngest last
        self._error: CollectiveError | None = None
        self._seen: dict[Run, tuple[int, ...]] = {}

    def run_begun(self, run: ObservedRun, name: str) -> None:  # noqa: ARG002
        """Note a run."""
        self._running.append(run)

    def run_ended(self, run: ObservedRun) -> None:
        """Forget a run."""
        self._running.remove(run)

    def __call__(self, loop: ControlledLoop, why: Reason) -> None:
        """End the youngest run, or the youngest that polls; with none left, raise the error."""
        runs = [run for run in self._running if run.thread == get_ident() and not run.closed]
        if why is Reason.LIVELOCK:
            before, self._seen = self._seen, {run: run.ledger.progress() for run in runs}
            runs = [run for run in runs if before.get(run) == self._seen[run]]
            runs = [run for run in runs if any(slot.has_waiters() for slot in run.ledger.open_slots())]
            if not runs:
                return
        run = runs[-1] if runs else None
        if run is None and self._error is not None:
            raise self._error  # tasks that the error does not reach, or that ignore it
        error = analysis.error_of(_report(loop, run, why, self._seconds))
        self._error = self._error or error
        if why is Reason.TIMEOUT:
            loop.execution.deadline = time.monotonic() + _UNWINDING_SECONDS
        if run is None:
            raise error
        run.fail(error)


def _report(loop: ControlledLoop, run: Run | None, why: Reason, seconds: float | None) -> CollectiveReport:
    """Return the report on a run that cannot continue, or on the loop's tasks if there is none."""
    more = _MORE.get(why, "")
    if why is Reason.TIMEOUT:
        busy = [each for each in at_work(pause=0) if isinstance(each, Thread)]
        threads = ", ".join(repr(thread.name) for thread in busy[:_MOST_THREADS])
        more = (f"At work in threads: {threads}. " if threads else "") + _MORE_TIME
    cycle_text = inspect_loop(loop).report(_WHAT[why].format(seconds), more)
    if run is None:
        return CollectiveReport(why, 0, (), (), on_a_screen([cycle_text]))
    everyone = tuple(replica.id for replica in run.ledger.replicas)
    report = analysis.analyse(run.snapshot(deadlocked=everyone, cycle_text=cycle_text))
    # Another reason is that of an error which the order check has found, and not raised yet
    return replace(report, reason=why) if report.reason is Reason.DEADLOCK else report


def took_too_long(seconds: float, why: Iterable[str]) -> CollectiveError:
    """Return the error for a run that its loop could not end in time, with what held it up."""
    text = on_a_screen([_WHAT[Reason.TIMEOUT].format(seconds), *map(capitalised, why), _MORE_TIME])
    return analysis.error_of(CollectiveReport(Reason.TIMEOUT, 0, (), (), text))


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """How an execution ended: what the program returned or raised, and the schedule that repeats it."""

    value: Any
    error: BaseException | None
    schedule: Schedule
    changes: tuple[str, ...] = ()  # what the schedule's changes do, a line each; of a replay
    schedules: int = 1  # how many were explored, without those that reduced a failing one

    @property
    def kind(self) -> object:
        """What makes two failures the same: the error's type, and the reason of its report, if it has one."""
        reason = self.error.report.reason if isinstance(self.error, CollectiveError) else None
        return type(self.error), reason

    def describe_changes(self, where: str, end: str = ":") -> list[str]:
        """Return lines that say how many changes to the default order there are, and what they do, if there are any."""
        changes = self.schedule.changes
        if not changes:
            return []
        head = f"{where}, with {count(len(changes), 'change')} to the default order{end}"
        return [head, *(f"  {line}" for line in self.changes)]


def run(program: Program, order: Order, *, seed: int, seconds: float | None, on_point: OnPoint | None = None) -> Result:
    """Run a program once, with a seed for `random` and `numpy.random`, for some seconds (None: no limit).

    The result has its exception, but a KeyboardInterrupt or SystemExit is raised.
    """
    stuck = StuckRuns(seconds)
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    execution = Execution(order, stuck, on_point=on_point, deadline=deadline)
    value, error = None, None
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002  (what programs draw from)
    try:
        with observing(stuck), making_loops(partial(ControlledLoop, execution)), executors_watched():
            value = value_of(program)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:  # noqa: BLE001  (whatever it is, the execution has ended with it)
        error = raised
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
    return Result(value, error, Schedule(seed, tuple(execution.changes)))


def value_of(program: Program) -> Any:
    """Return what a program returns; a coroutine runs as the main task of a loop."""
    value = program()
    if not inspect.iscoroutine(value):
        return value
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    try:
        found = runner.run(value)
    except BaseException:
        with suppress(CollectiveError), warnings.catch_warnings():  # the tasks that are left are stuck, too
            warnings.simplefilter("ignore", RuntimeWarning)  # about threads that do not end
            runner.close()
        raise
    runner.close()
    return found


def explore(program: Program, *, schedules: int, seed: int, seconds: float | None) -> Result:
    """Run a program under schedules until one fails; a program that leaves no choice has only one.

    The seed is that of the schedules and of the program's random numbers. The result is that of the default order or of
    the same failure with the fewest changes.
    """
    points: defaultdict[object, list[int]] = defaultdict(list)

    def note(point: int, first: Step, _: Step | None) -> None:
        points[_place_of(first)].append(point)

    default = run(program, default_order, seed=seed, seconds=seconds, on_point=note if schedules > 1 else None)
    if default.error is not None or not points:
        return default
    orders = other_orders(seed, sum(map(len, points.values())), tuple(points.values()))
    for number, order in zip(range(2, schedules + 1), orders, strict=False):
        result = run(program, order, seed=seed, seconds=seconds)
        if result.error is not None:
            return replace(_reduce(program, result, seconds=seconds), schedules=number)
    return replace(default, schedules=schedules)


def replay(program: Program, schedule: Schedule, *, seconds: float | None) -> Result:
    """Run a program under one schedule; the result says what its changes do."""
    lines: list[str] = []

    def describe(_: int, first: Step, instead: Step | None) -> None:
        if instead is first:
            lines.append(f"{_who(first)} is deferred until nothing else can run, {_where(first)}")
        elif instead is not None:
            lines.append(f"{_who(instead)}, {_where(instead)}, goes before {_who(first)}, {_where(first)}")

    result = run(program, replayed(schedule.changes), seed=schedule.seed, seconds=seconds, on_point=describe)
    more = len(lines) - _MOST_LINES
    changes = (*lines[:_MOST_LINES], *([f"… and {more} more"] if more > 0 else []))
    return replace(result, changes=changes)


def _place_of(step: Step) -> object:
    """Return where a task will continue: in its innermost frame that is the program's."""
    frames = (frame for frame in reversed(frames_of(step.task.get_coro())) if not is_plumbing(frame))
    return next(((frame.f_code, frame.f_lasti) for frame in frames), None)


_REPLICA = re.compile(r"replica \d+(?= of )")


def _who(step: Step) -> str:
    """Return whose step it is."""
    own = _REPLICA.match(step.task.get_name())  # the name of a replica's own task
    if own is not None:
        return own[0]
    replica = replica_of(step.task)
    return "a task" if replica is None else f"a task of replica {replica.id}"


def _where(step: Step) -> str:
    places = await_chain(step.task.get_coro())
    return f"at {full_place(places[-1])}" if places else "at its start"


def _reduce(program: Program, failed: Result, *, seconds: float | None) -> Result:
    """Return the same failure with the fewest changes, and what these do."""

    def failure_of(changes: Sequence[Change]) -> Result | None:
        result = run(program, replayed(changes), seed=failed.schedule.seed, seconds=seconds)
        return result if result.error is not None and result.kind == failed.kind else None

    best = minimise(failed.schedule.changes, failure_of) or failed
    again = replay(program, best.schedule, seconds=seconds)
    # A program that depends on threads, sockets or a clock may not fail again
    return again if again.error is not None and again.kind == failed.kind else best


def minimise(items: Sequence[T], failure_of: Callable[[Sequence[T]], R | None]) -> R | None:
    """Return the failure of some of the items, none of which can be left out; None if only all of them fail.

    Large pieces are left out first, as in delta debugging (Zeller and Hildebrandt, 2002). After half a minute, return
    the failure of the fewest items found so far.
    """
    until, best = time.monotonic() + _REDUCING_SECONDS, None
    left, size = list(items), (len(items) + 1) // 2
    while size and len(left) > 1:
        before, begin = len(left), 0
        while begin < len(left):
            if time.monotonic() > until:
                return best
            rest = [*left[:begin], *left[begin + size :]]
            failure = failure_of(rest) if rest else None
            if failure is not None:
                best, left = failure, rest
            else:
                begin += size
        if size > 1 or len(left) == before:
            size //= 2
    return best
