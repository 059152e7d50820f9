"""Deadlocks: what is raised, and where, when a run on a controlled loop cannot go on or takes too long; its report.

A **livelock** is a replica in a collective while the others sleep and poll: it is looked for once in a day of virtual
time, and reported when not one collective of the run has moved since the look before.

The error goes the way of every report: it is set in the run, raised at the await of each replica that waits in a
collective, the other replicas are cancelled, and it comes out of ``strategy.run``. With several runs at a time the
youngest goes first, for an older one may be waiting for it; what is freed by that may well let the others go on. Where
no run is left to end, the error comes out of the loop itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from aiodist._checking.loop import ControlledLoop
from aiodist._checking.threads import busy_threads
from aiodist._core import analysis
from aiodist._core.errors import CollectiveError
from aiodist._core.render import source_lines
from aiodist._core.report import CollectiveReport, Location, Reason, ReplicaReport, ReplicaState
from aiodist._core.text import clause, ids, on_a_screen, shown
from aiodist._runtime.inspection import WaitGraph, look_at_loop
from aiodist._runtime.scheduler import Run
from aiodist._runtime.stacks import drives_replica, links
from aiodist._runtime.suspension import Awaited

_UNWINDING_SECONDS = 5.0
_MOST_LINES = 16
_MOST_WAYS = 2
_MOST_PLACES = 6
_MOST_THREADS = 4
_WHAT = {
    Reason.DEADLOCK: "nothing can run any more",
    Reason.LIVELOCK: "no replica has made progress for a day of virtual time",
    Reason.TIMEOUT: "the run has taken longer than {:g} s",
}
_POLLING = "In that time tasks have only slept and woken, at least a thousand times: what they look for does not come."
_PROOF = "No timer is pending, and no thread, subprocess or socket is at work: nothing can wake them."


class StuckRuns:
    """Ends runs that cannot go on, or have taken longer than an execution may."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._error: CollectiveError | None = None
        self._seen: dict[Run, tuple[int, ...]] = {}

    def __call__(self, loop: ControlledLoop, why: Reason) -> None:
        """End the youngest run; with none left, raise its DeadlockError or CollectiveTimeoutError."""
        if why is Reason.LIVELOCK:
            self._end_one_that_polls(loop)
            return
        runs = _runs(loop)
        run = max(runs, key=runs.__getitem__, default=None)
        if run is None and self._error is not None:
            raise self._error  # tasks that the error does not reach, or that ignore it
        error = analysis.error_of(_report(loop, run, why, self._seconds))
        self._error = self._error or error
        if why is Reason.TIMEOUT:
            loop.execution.deadline = time.monotonic() + _UNWINDING_SECONDS
        if run is None:
            raise error
        run.fail(error)

    def _end_one_that_polls(self, loop: ControlledLoop) -> None:
        """End a run in which nothing but sleeping has happened since the last look, while a replica waits."""
        before, self._seen = self._seen, {run: run.ledger.progress() for run in _runs(loop)}
        for run, progress in self._seen.items():
            if before.get(run) == progress and any(slot.has_waiters() for slot in run.ledger.open_slots()):
                run.fail(analysis.error_of(_report(loop, run, Reason.LIVELOCK, None)))
                return


def _runs(loop: ControlledLoop) -> dict[Run, int]:
    """Return the runs whose replicas run on a loop, with the number of the youngest task of each."""
    found: dict[Run, int] = {}
    for task in asyncio.all_tasks(loop):
        for link in links(task.get_coro()):
            frame = link.frame
            run = frame.f_locals.get("run") if frame is not None and drives_replica(frame) is not None else None
            if run is not None and not run.closed:
                found[run] = max(found.get(run, -1), loop.number_of(task))
    return found


def _report(loop: ControlledLoop, run: Run | None, why: Reason, seconds: float | None) -> CollectiveReport:
    """Return the report on what cannot go on: a run, or None where no replica runs."""
    graph = look_at_loop(loop)
    report = CollectiveReport(Reason.DEADLOCK, 0, (), (), "")
    if run is not None:
        everyone = tuple(replica.id for replica in run.ledger.replicas)
        report = analysis.analyse(run.snapshot(deadlocked=everyone))
        if report.reason is not Reason.DEADLOCK:
            return report  # what the order check had found, and has not raised yet
    cycle = graph.cycle_text()
    waits = list(graph.lines())
    more = len(waits) - _MOST_LINES
    waiters = (each for each in graph.waiters if each.replica or each.merging)
    places = dict.fromkeys(at for each in waiters if (at := each.suspension.location) is not None)
    lines = [
        _headline(report.replicas, _WHAT[why].format(seconds)),
        *(f"  {line}" for line in [*waits[:_MOST_LINES], *([f"… and {more} more"] if more > 0 else [])]),
        *source_lines([(at, False) for at in places][:_MOST_PLACES]),
        *_ways(graph),
        *([f"{'The cycle' if graph.is_certain else 'They may be waiting for each other'}: {cycle}."] if cycle else []),
        *(_late() if why is Reason.TIMEOUT else [_PROOF if why is Reason.DEADLOCK else _POLLING]),
    ]
    return replace(report, reason=why, text=on_a_screen(lines))


def _headline(replicas: Sequence[ReplicaReport], what: str) -> str:
    waiting = [r.replica_id for r in replicas if r.state is ReplicaState.WAITING]
    elsewhere = [r.replica_id for r in replicas if r.state is ReplicaState.RUNNING]
    if not waiting:
        return what
    others = f", {clause(elsewhere, 'is')} elsewhere" if elsewhere else ""
    return f"{what}: {clause(waiting, 'waits')} in a collective{others}"


def _ways(graph: WaitGraph) -> list[str]:
    """Return through which awaits replicas got to where they wait outside of collectives, for the first few ways."""
    ways: dict[tuple[Location, ...], list[int]] = {}
    for waiter in graph.waiters:
        way = waiter.suspension.stack[:-1]
        if way and waiter.member is not None and waiter.suspension.kind is not Awaited.COLLECTIVE:
            ways.setdefault(way, []).append(waiter.member.replica_id)
    few = islice(ways.items(), _MOST_WAYS)
    return [f"{ids(who).capitalize()} got there through {', '.join(map(shown, way))}." for way, who in few]


def _late() -> list[str]:
    """Return what an execution that took too long may have waited for, and what to do when it needs that long."""
    threads = ", ".join(repr(thread.name) for thread in busy_threads(pause=0)[:_MOST_THREADS])
    at_work = [f"At work in threads: {threads}."] if threads else []
    return [*at_work, "If a run needs that long, give it more time: --timeout, or timeout=."]
