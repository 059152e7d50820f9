"""One run of a program under a schedule, on a controlled loop; how it ended, and how to repeat it."""

from __future__ import annotations

import asyncio
import inspect
import random
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from aiodist._core.errors import CollectiveError
from aiodist.checking.course import Course, OnPoint
from aiodist.checking.loop import ControlledLoop
from aiodist.checking.schedule import Order, Schedule
from aiodist.checking.standstill import Standstill

NewLoop: TypeAlias = Callable[[], ControlledLoop]
Program: TypeAlias = Callable[[NewLoop], Any]
"""What can be run again and again: given a way to make loops, it runs, and returns or raises."""


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """How a run ended.

    Attributes:
        value: what the program returned.
        error: what it raised; None when it returned.
        schedule: how to repeat it.
        points: how many points there were at which the order could be another.
        loops: how many controlled loops it made.
    """

    value: Any
    error: Exception | None
    schedule: Schedule
    points: int
    loops: int

    @property
    def kind(self) -> object:
        """What makes two failures the same: the error's type, and for replicas that did not meet the reason."""
        reason = self.error.report.reason if isinstance(self.error, CollectiveError) else None
        return type(self.error), reason


def run(program: Program, order: Order, *, seed: int, seconds: float | None, on_point: OnPoint | None = None) -> Ended:
    """Run a program once.

    Args:
        program: the program.
        order: who runs next.
        seed: of the random numbers that it draws from `random` and `numpy.random`; who seeded them before finds them
            as they were.
        seconds: how long it may take, in real time; None: as long as it likes.
        on_point: told of the points.

    Raises:
        BaseException: what is no `Exception` comes out as itself: KeyboardInterrupt, SystemExit.
    """
    loops: list[ControlledLoop] = []
    deadline = None if seconds is None else time.monotonic() + seconds
    course = Course(order, Standstill(seconds), on_point=on_point, deadline=deadline)

    def new_loop() -> ControlledLoop:
        loops.append(ControlledLoop(course))
        return loops[-1]

    value, error = None, None
    with _seeded(seed):
        try:
            value = program(new_loop)
        except Exception as raised:  # noqa: BLE001  (whatever it is, it is how the run ended)
            error = raised
    return Ended(value, error, Schedule(seed, tuple(course.changes)), course.points, len(loops))


def coroutine_program(main: Callable[[], Coroutine[Any, Any, Any]]) -> Program:
    """Return a program that runs a coroutine function as its main task."""
    return partial(_run_main, main)


def _run_main(main: Callable[[], Coroutine[Any, Any, Any]], new_loop: NewLoop) -> Any:
    runner = asyncio.Runner(loop_factory=new_loop)
    try:
        value = runner.run(main())
    except BaseException as error:
        _close_after(runner, error)
        raise
    runner.close()
    return value


def _close_after(runner: asyncio.Runner, error: BaseException) -> None:
    """Cancel what is left; that it stands still, too, is an echo of the first error."""
    try:
        runner.close()
    except CollectiveError:
        if not isinstance(error, CollectiveError):
            raise


def function_program(main: Callable[[], Any]) -> Program:
    """Return a program that calls a function: a coroutine function, or one that makes loops by `asyncio.run`."""
    return partial(_call_main, main)


def _call_main(main: Callable[[], Any], new_loop: NewLoop) -> Any:
    with _loops_made_by(new_loop):
        value = main()
        if inspect.iscoroutine(value):
            return _run_main(lambda: value, new_loop)
        return value


@contextmanager
def _loops_made_by(new_loop: NewLoop) -> Iterator[None]:
    """Let `asyncio.new_event_loop`, and what stands on it, make loops of ours."""
    with warnings.catch_warnings():  # Python 3.14 has deprecated policies; up to 3.15 they do what they did
        warnings.simplefilter("ignore", DeprecationWarning)
        before = asyncio.get_event_loop_policy()

        class Policy(type(before)):  # type: ignore[misc]
            def new_event_loop(self) -> asyncio.AbstractEventLoop:
                return new_loop()

        asyncio.set_event_loop_policy(Policy())
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            asyncio.set_event_loop_policy(before)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002  (what programs draw from)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
