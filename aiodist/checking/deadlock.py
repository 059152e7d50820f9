"""The report on a run that cannot go on: what each replica waits for, where, and the cycle if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from aiodist._core.analysis import replica_reports
from aiodist._core.report import CollectiveReport, Location, Reason, ReplicaReport, ReplicaState
from aiodist._core.text import ids, shown
from aiodist._runtime.inspection import Waiter, WaitGraph, look_at_loop
from aiodist._runtime.waits import Awaited
from aiodist.checking.threads import busy_threads

if TYPE_CHECKING:
    from aiodist._runtime.scheduler import Run
    from aiodist.checking.loop import ControlledLoop

_MOST_LINES = 16
_MOST_WAYS = 2
_PROOF = "No timer is pending, and no thread, subprocess or socket is at work: nothing can wake them."


def report_on(loop: ControlledLoop, run: Run | None, seconds: float | None) -> CollectiveReport:
    """Return the report on a run that cannot go on.

    Args:
        loop: the loop on which it stands still.
        run: the run; None when no replica runs.
        seconds: how long it took, when that was too long; None when it is proved that nothing can run.
    """
    graph = look_at_loop(loop)
    replicas = _replicas(graph, run) if run is not None else ()
    number, suspects = _where(run, replicas)
    reason = Reason.DEADLOCK if seconds is None else Reason.TIMEOUT
    lines = [_headline(replicas, seconds), *_shortened([f"  {line}" for line in graph.lines()]), *_ways(graph)]
    cycle = graph.cycle_text()
    if cycle:
        lines.append(f"The cycle: {cycle}.")
    lines += [_PROOF] if seconds is None else _late()
    return CollectiveReport(reason, number, replicas, suspects, "\n".join(lines))


def _ways(graph: WaitGraph) -> list[str]:
    """Return by which awaits replicas came to where they wait outside of collectives, for the first few ways."""
    ways: dict[tuple[Location, ...], list[int]] = {}
    for waiter in graph.waiters:
        way = waiter.suspension.stack[:-1]
        if way and waiter.member is not None and waiter.suspension.kind is not Awaited.COLLECTIVE:
            ways.setdefault(way, []).append(waiter.member.replica_id)
    few = islice(ways.items(), _MOST_WAYS)
    return [f"{ids(who).capitalize()} came there by {', '.join(map(shown, way))}." for way, who in few]


def _late() -> list[str]:
    """Return what a run that took too long may have waited for, and what to do when it needs that long."""
    threads = ", ".join(repr(thread.name) for thread in busy_threads(pause=0.0)[:4])
    at_work = [f"At work in threads: {threads}."] if threads else []
    return [*at_work, "Where a run needs that long, give it more time: --timeout, or timeout=."]


def _replicas(graph: WaitGraph, run: Run) -> tuple[ReplicaReport, ...]:
    """Return what every replica does; one that waits in a collective of some group waits in that."""
    mine = {id(replica): replica.id for replica in run.ledger.replicas}
    waiters = {
        mine[id(w.member.replica)]: w for w in graph.waiters if w.member is not None and id(w.member.replica) in mine
    }
    snapshot = run.snapshot()
    reports = replica_reports(snapshot, snapshot.groups[0])
    return tuple(_replica(report, waiters.get(report.replica_id)) for report in reports)


def _replica(report: ReplicaReport, waiter: Waiter | None) -> ReplicaReport:
    if waiter is None or waiter.suspension.kind is not Awaited.COLLECTIVE:
        return report
    handle = waiter.suspension.things[0]
    post = handle.slot.post_of(handle.member.position)
    return replace(report, state=ReplicaState.WAITING, call=str(post.call), location=post.location)


def _where(run: Run | None, replicas: Sequence[ReplicaReport]) -> tuple[int, tuple[int, ...]]:
    """Return the number of the first collective that is missing someone, and who; all where none is begun."""
    if run is None:
        return 0, ()
    root = run.ledger.root
    number = min(min(root.open, default=root.number_of_join()), root.number_of_join())
    elsewhere = tuple(r.replica_id for r in replicas if r.state is not ReplicaState.WAITING)
    return number, elsewhere or tuple(replica.id for replica in run.ledger.replicas)


def _headline(replicas: Sequence[ReplicaReport], seconds: float | None) -> str:
    what = "nothing can run any more" if seconds is None else f"the run has taken longer than {seconds:g} s"
    waiting = [r.replica_id for r in replicas if r.state is ReplicaState.WAITING]
    elsewhere = [r.replica_id for r in replicas if r.state is ReplicaState.RUNNING]
    if not waiting:
        return what
    parts = [f"{ids(waiting)} wait{'s' * (len(waiting) == 1)} in a collective"]
    if elsewhere:
        parts.append(f"{ids(elsewhere)} {'is' if len(elsewhere) == 1 else 'are'} elsewhere")
    return f"{what}: {', '.join(parts)}"


def _shortened(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"  … and {more} more"] if more > 0 else [])]
