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
from dataclasses import replace

from aiodist._checking.loop import ControlledLoop
from aiodist._checking.threads import busy_threads
from aiodist._core import analysis
from aiodist._core.errors import CollectiveError
from aiodist._core.report import CollectiveReport, Reason
from aiodist._core.text import clause, on_a_screen
from aiodist._runtime.inspection import look_at_loop
from aiodist._runtime.scheduler import Run
from aiodist._runtime.stacks import drives_replica, links

_UNWINDING_SECONDS = 5.0
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
    headline = _WHAT[why].format(seconds)
    graph = look_at_loop(loop)
    more = _late() if why is Reason.TIMEOUT else [_PROOF if why is Reason.DEADLOCK else _POLLING]
    if run is None:
        return CollectiveReport(why, 0, (), (), on_a_screen([graph.report(headline, *more)]))
    everyone = tuple(replica.id for replica in run.ledger.replicas)
    report = analysis.analyse(run.snapshot(deadlocked=everyone, circle=graph.report(f"{headline}{_who(run)}", *more)))
    # another reason: what the order check had found, and has not raised yet
    return replace(report, reason=why) if report.reason is Reason.DEADLOCK else report


def _who(run: Run) -> str:
    """Say which replicas wait in a collective, and which elsewhere."""
    in_slots = {
        member.replica_id
        for slot in run.ledger.open_slots()
        for member in slot.group.members
        if slot.waiters[member.position] is not None
    }
    elsewhere = [r.id for r in run.ledger.replicas if r.end is None and r.id not in in_slots]
    others = f", {clause(elsewhere, 'is')} elsewhere" if elsewhere else ""
    return f": {clause(in_slots, 'waits')} in a collective{others}" if in_slots else ""


def _late() -> list[str]:
    """Return what an execution that took too long may have waited for, and what to do when it needs that long."""
    threads = ", ".join(repr(thread.name) for thread in busy_threads(pause=0)[:_MOST_THREADS])
    at_work = [f"At work in threads: {threads}."] if threads else []
    return [*at_work, "If a run needs that long, give it more time: --timeout, or timeout=."]
