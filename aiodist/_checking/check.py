"""Checking a target: a function that a person names, run under many schedules, with statistics of the first run."""

from __future__ import annotations

import enum
import io
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple, TextIO

from aiodist._checking.explore import Exploration, NewLoop, explore, function_program, replay, who
from aiodist._checking.loop import ControlledLoop, Step, step_of
from aiodist._checking.schedule import Schedule
from aiodist._checking.statistics import Statistics
from aiodist._checking.target import Source, Target, TargetError, TargetExitError
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import observing
from aiodist._core.report import Location
from aiodist._runtime.blocking import BlockedLoop, watch
from aiodist._strategy.strategy import MirroredStrategy

_MOST_SCHEDULES = 20
_MOST_REPLICA_RUNS = 2000
SECONDS = 300.0
"""How long one run may take by default."""


class HeldUp(NamedTuple):
    """A step of a task that held up the event loop for more than a second: about how long, who, and at what line."""

    seconds: float
    who: str
    location: Location


class HeldUpLoop(BlockedLoop):
    """The longest step of each task and line that holds up the controlled loop in this thread."""

    def __init__(self) -> None:
        computed = None if hasattr(time, "pthread_getcpuclockid") else lambda _: time.monotonic()
        super().__init__(lambda: None, lambda *_: None, computed=computed)
        self.found: dict[tuple[str, Location], HeldUp] = {}

    def step_in(self, frame: FrameType) -> tuple[Step | None, Step | None]:
        """Return the step that runs."""
        step = next(filter(None, (step_of(outer) for outer, _ in walk_stack(frame))), None)
        return step, step

    def blocks(self, task: Step, where: Location, seconds: float) -> None:
        """Note a step."""
        key = who(task), where
        if key not in self.found or self.found[key].seconds < seconds:
            self.found[key] = HeldUp(seconds, *key)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be checked, and how.

    Attributes:
        target: the function, as a person names it.
        replicas: on how many replicas it runs; None for a function that makes its own strategies.
        schedules: how many schedules are explored; None for as many as suit the number of replicas.
        seed: what they are drawn from.
        replay: the one schedule to run instead; None to explore.
        seconds: how long a run may take, in real time.
        arguments: the target's own, as on its command line.
    """

    target: str
    replicas: int | None
    schedules: int | None
    seed: int
    replay: Schedule | None
    seconds: float
    arguments: tuple[str, ...]

    def most_schedules(self) -> int:
        """Return how many schedules are explored: by default 20, and fewer of more than 100 replicas."""
        if self.schedules is not None:
            return self.schedules
        return max(1, min(_MOST_SCHEDULES, _MOST_REPLICA_RUNS // (self.replicas or 1)))


class Outcome(enum.StrEnum):
    """How a check ended."""

    AGREED = "agreed"
    DISAGREED = "disagreed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """The schedules of a check, the collectives of the first, and what held up the event loop in it, longest first."""

    request: Request
    exploration: Exploration
    statistics: Statistics
    held_up: tuple[HeldUp, ...]

    @property
    def error(self) -> Exception | None:
        """What the program ended with under the schedule that failed; None when none did."""
        return self.exploration.error

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        if self.error is None:
            return Outcome.AGREED
        return Outcome.DISAGREED if isinstance(self.error, CollectiveError) else Outcome.FAILED


def check(
    request: Request, *, output: TextIO | None = None, before: Callable[[int], object] = lambda _: None
) -> Checked:
    """Check a target.

    Args:
        request: what to check, and how.
        output: where what the target prints in its first schedule goes, its other schedules being silent; None:
            where it would go.
        before: called with the number of each schedule before it is run.

    Raises:
        TargetError: it cannot be checked as requested.
    """
    subject = _Subject(request, output or sys.stdout)
    with subject.source.in_place():
        if request.replay is not None:
            exploration = replay(subject.run, request.replay, seconds=request.seconds)
        else:
            schedules, seed, seconds = request.most_schedules(), request.seed, request.seconds
            exploration = explore(subject.run, schedules=schedules, seed=seed, seconds=seconds, before=before)
    held_up = tuple(sorted(subject.held_up.found.values(), reverse=True))
    checked = Checked(request, exploration, subject.statistics, held_up)
    if isinstance(checked.error, TargetError):
        raise checked.error
    return checked


class _Subject:
    """A target as a program: loaded again for each run, and observed; the first run gives statistics."""

    def __init__(self, request: Request, output: TextIO) -> None:
        self.source = Source(Target.parse(request.target), request.arguments)
        self.statistics = Statistics()
        self.held_up = HeldUpLoop()
        self._output = output
        self._is_first = True
        self._strategy = None if request.replicas is None else MirroredStrategy(request.replicas)

    def run(self, new_loop: NewLoop) -> None:
        """Run it once.

        Raises:
            CollectiveError: replicas disagreed, also where the target caught the error.
            TargetError: it made no run of a strategy.
            TargetExitError: it ended the process.
            Exception: what it raised.
        """
        runs = self.statistics if self._is_first else Statistics(of_runs_alone=True)
        with ExitStack() as meanwhile:
            meanwhile.enter_context(observing(runs))
            if self._is_first:
                meanwhile.enter_context(redirect_stdout(self._output))
                under_way = [self]
                watch(self.held_up, under_way)
                meanwhile.callback(under_way.clear)
            else:
                meanwhile.enter_context(redirect_stdout(io.StringIO()))
                meanwhile.enter_context(redirect_stderr(io.StringIO()))
            self._is_first = False
            try:
                function_program(self._call)(partial(self._new_loop, new_loop))
            except SystemExit as end:
                if end.code not in {None, 0} and not runs.errors:
                    raise TargetExitError(f"the target ended with exit code {end.code}") from end
            except Exception:
                if not (runs.errors or runs.refusal):
                    raise
        if runs.refusal is not None:
            raise runs.refusal
        if runs.errors:
            raise runs.errors[0]
        if not runs.runs:
            raise TargetError(
                "the target ended without a run of a strategy: a function that is to run on replicas needs --replicas"
            )

    def _new_loop(self, new_loop: NewLoop) -> ControlledLoop:
        self.source.loop_is_made()
        return new_loop()

    def _call(self) -> Any:
        function = self.source.load()
        return function() if self._strategy is None else self._strategy.run(function)
