"""Checking a target: a function that the user names, run under many schedules; the result as text and as JSON."""

from __future__ import annotations

import asyncio
import io
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from traceback import format_exception
from types import CodeType
from typing import Any, TextIO

from aiodist._checking.explore import Result, explore, replay, took_too_long, value_of
from aiodist._checking.loop import ControlledLoop, HeldUpLoop
from aiodist._checking.schedule import Schedule
from aiodist._checking.target import Source, TargetError, TargetExitError
from aiodist._core.call import place
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import ObservedRun, Observer, observing
from aiodist._core.terms import Location
from aiodist._core.text import count, duration, full_place, size
from aiodist._core.wire import named
from aiodist._runtime.blocking import watch
from aiodist._runtime.outcome import without_frames_before
from aiodist._strategy.strategy import MirroredStrategy

_MOST_SCHEDULES = 20
_MOST_REPLICA_RUNS = 2000
_MOST_ROWS = 20
SECONDS = 300.0
"""How long one run may take by default."""


@dataclass(slots=True, eq=False)
class Site:
    """The collectives of one kind at one place of the program; its fields are those of the JSON.

    Bytes are those that all replicas contributed, as far as sizes are known. Waiting is from the first post to the
    last, in seconds of the loop's clock; ``last_to_come`` counts, by replica id, who arrived last while others waited.
    """

    kind: str
    call: str
    location: Location
    times: int = 0
    bytes: int = 0
    waited_seconds: float = 0.0
    last_to_come: Counter[int] = field(default_factory=Counter)

    def row(self) -> list[str]:
        """Return its row of the table."""
        row = [self.call, full_place(self.location), str(self.times), size(self.bytes)]
        if not self.waited_seconds:
            return [*row, "", ""]
        (replica_id, times), *others = self.last_to_come.most_common() or [(-1, 0)]
        last = f"replica {replica_id}" if times else ""
        often = f" ({times} of {self.last_to_come.total()})" if others else ""
        return [*row, duration(self.waited_seconds), last + often]


class Statistics(Observer):
    """An observer that counts a program's runs and, unless it is of runs alone, their collectives."""

    def __init__(self, *, of_runs_alone: bool = False) -> None:
        self.of_runs_alone = of_runs_alone
        self.runs = 0
        self.replicas = 0  # the most that a run had
        self.sites: dict[tuple[str, CodeType, int], Site] = {}  # in the order of their first collectives
        self.errors: list[Exception] = []  # of runs that disagreed or were refused, even if the program caught them
        self._clock: Callable[[], float] = float

    def run_begun(self, run: ObservedRun, name: str) -> None:
        """Count a run; refuse one on a loop that is not controlled."""
        try:
            is_controlled = isinstance(asyncio.get_running_loop(), ControlledLoop)
        except RuntimeError:  # trio
            is_controlled = False
        if not is_controlled:
            error = TargetError(
                f"{name} runs on an event loop that the target chose itself (trio, uvloop); "
                "only asyncio's own can be controlled: leave the choice to asyncio.run or anyio.run"
            )
            self.errors.append(error)
            raise error
        self.runs += 1
        self.replicas = max(self.replicas, len(run.ledger.replicas))
        self._clock = run.clock

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:  # noqa: ARG002
        """Note that replicas disagreed."""
        self.errors.append(error)

    def completed(self, slot: Any) -> None:
        """Count a collective."""
        if self.of_runs_alone or slot.error is not None or slot.number < 0:
            return
        call, members = slot.call, slot.group.members
        key = call.kind, slot.code, slot.offset
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = Site(call.kind, str(call), place(slot.code, slot.offset).location)
        site.times += 1
        nbytes = call.nbytes
        site.bytes += _size_of(slot.result) if nbytes is None else len(members) * nbytes
        waited = self._clock() - slot.started
        if waited > 0:
            site.waited_seconds = round(site.waited_seconds + waited, 9)
            if slot.last >= 0:
                site.last_to_come[members[slot.last].replica_id] += 1


def _size_of(result: Any) -> int:
    """Return how many bytes a result has, which stand for those contributed where sizes differ, as in all_gather."""
    return sum(int(getattr(leaf, "nbytes", 0)) for leaf in (result if isinstance(result, list) else [result]))


@dataclass(frozen=True, slots=True)
class Request:
    """What to check, and how."""

    target: str  # the function, as the user names it
    replicas: int | None  # None for a function that makes its own strategies
    schedules: int | None  # how many to explore; None for as many as suit the number of replicas
    seed: int  # of schedules and random numbers
    replay: Schedule | None  # the one schedule to run instead
    seconds: float  # the limit of a run, in real time
    arguments: tuple[str, ...]  # the target's own, as on its command line

    def most_schedules(self) -> int:
        """Return how many schedules to explore: by default 20, and fewer with more than 100 replicas."""
        if self.schedules is not None:
            return self.schedules
        return max(1, min(_MOST_SCHEDULES, _MOST_REPLICA_RUNS // (self.replicas or 1)))


@dataclass(frozen=True, slots=True, eq=False)
class Checked:
    """The result of a check; the collectives of its first schedule, and what held up the event loop in it."""

    request: Request
    result: Result
    statistics: Statistics
    held_up: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """``agreed``, ``disagreed`` or, if the target raised an exception of its own, ``failed``."""
        if self.result.error is None:
            return "agreed"
        return "disagreed" if isinstance(self.result.error, CollectiveError) else "failed"

    @property
    def text(self) -> str:
        """A sentence if all replicas agreed, or what went wrong and how to repeat it."""
        request, statistics, done = self.request, self.statistics, self.result.schedules
        if self.result.error is not None:
            where = "Found in the default order"
            if request.replay is not None:
                where = "In the given schedule"
            elif self.result.schedule.changes:
                where = f"Found in schedule {done} of {request.most_schedules()}"
            lines = self.result.describe_changes(where, ", in which nothing fails:") or [f"{where}."]
            return "\n".join([self.failure(), "", *lines, f"Again:  {self.command()}"])
        collectives = count(sum(site.times for site in statistics.sites.values()), "collective")
        runs = "" if statistics.runs == 1 else f" in {statistics.runs} runs"
        only = " (it leaves no choice)" if done == 1 < request.most_schedules() else ""
        order = f"{count(done, 'schedule')}{only}" if request.replay is None else "the given schedule"
        return f"{count(statistics.replicas, 'replica')} agreed in {collectives}{runs}, in {order}."

    def table(self) -> tuple[list[str], list[list[str]], int]:
        """Return headings, rows, and how many rows were left out; the longest waits come first."""
        sites = sorted(self.statistics.sites.values(), key=lambda site: -site.waited_seconds)
        headings = ["collective", "called at", "times", "bytes", "waited", "last to arrive"]
        if not any(site.waited_seconds for site in sites):
            del headings[4:]
        return headings, [site.row()[: len(headings)] for site in sites[:_MOST_ROWS]], len(sites[_MOST_ROWS:])

    def failure(self) -> str:
        """Return what went wrong: the error as the program would see it."""
        error = self.result.error
        assert error is not None
        if isinstance(error, CollectiveError):
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        if isinstance(error, TargetExitError):
            return str(error)
        return "".join(format_exception(without_frames_before(error))).rstrip()

    def command(self) -> str:
        """Return the command that runs the failing schedule again."""
        request = self.request
        words = ["aiodist", "check", request.target]
        if request.replicas is not None:
            words += ["--replicas", str(request.replicas)]
        if request.seconds != SECONDS:
            words += ["--timeout", f"{request.seconds:g}"]
        words += ["--replay", str(self.result.schedule)]
        return shlex.join([*words, "--", *request.arguments] if request.arguments else words)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the JSON."""
        request, statistics, error = self.request, self.statistics, self.result.error
        found: dict[str, Any] = {
            "target": request.target,
            "outcome": self.outcome,
            "replicas": statistics.replicas,
            "runs": statistics.runs,
            "seed": request.replay.seed if request.replay is not None else request.seed,
            "schedules": self.result.schedules,
            "held_up": list(self.held_up),
            "collectives": named(tuple(statistics.sites.values())),
        }
        if error is not None:
            found["failure"] = {
                "error": type(error).__name__,
                "text": self.failure(),
                "report": error.report.to_dict() if isinstance(error, CollectiveError) else None,
                "schedule": str(self.result.schedule),
                "changes": list(self.result.changes),
                "replay": self.command(),
            }
        return found


def check(request: Request, *, output: TextIO | None = None) -> Checked:
    """Check a target; a TargetError if that cannot be done as requested.

    The target prints to the output in its first schedule (None: as usual), and nothing in the others.
    """
    source = Source(request.target, request.arguments)
    strategy = None if request.replicas is None else MirroredStrategy(request.replicas)
    statistics, held_up = Statistics(), HeldUpLoop(request.seconds)

    def call() -> Any:
        function = source.load()
        return function() if strategy is None else strategy.run(function)

    def program() -> None:
        is_first = not statistics.runs and not statistics.errors
        with ExitStack() as meanwhile:
            meanwhile.enter_context(redirect_stdout((output or sys.stdout) if is_first else io.StringIO()))
            if not is_first:
                meanwhile.enter_context(redirect_stderr(io.StringIO()))
            elif hasattr(time, "pthread_getcpuclockid"):  # else nobody knows how long a thread has computed
                runs = [source]
                watch(held_up, runs)
                meanwhile.callback(runs.clear)
            _run_observed(call, statistics if is_first else Statistics(of_runs_alone=True))

    try:
        with source.in_place(), held_up.ending_steps():
            if request.replay is not None:
                result = replay(program, request.replay, seconds=request.seconds)
            else:
                most = request.most_schedules()
                result = explore(program, schedules=most, seed=request.seed, seconds=request.seconds)
    except KeyboardInterrupt:
        if not held_up.ended_step:
            raise
        result = Result(None, took_too_long(request.seconds, held_up.found), request.replay or Schedule(request.seed))
    if isinstance(result.error, TargetError):
        raise result.error
    return Checked(request, result, statistics, tuple(held_up.found))


def _run_observed(call: Callable[[], Any], statistics: Statistics) -> None:
    """Run a target once; an error of the order check is raised even if the target caught it."""
    try:
        with observing(statistics):
            value_of(call)
    except SystemExit as end:
        if end.code not in (None, 0) and not statistics.errors:  # which may be unhashable
            raise TargetExitError(f"SystemExit: {end}\nthe target ended with exit code {end.code}") from end
    except BaseException as error:
        if not statistics.errors or isinstance(error, KeyboardInterrupt):
            raise
    if statistics.errors:
        raise statistics.errors[0]
    if not statistics.runs:
        raise TargetError("the target ended without running a strategy: a replica function needs --replicas")
