"""What a trace adds up to: collectives by kind and call site, who waited, and for whom; as JSON and in the terminal.

Replicas of one event loop take turns, so one of them always comes last, be it only because its turn is the last. Who
comes last is counted; for whom the others waited is decided by the time that each took from its last collective to its
call of the next. The replica that took longest is the straggler of that collective, and what it took beyond the median
replica held up each of the others, by no more than the time that that one was idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.text import Text

from aiodist._core.text import count, duration, size
from aiodist._tools.output import print_report, print_table
from aiodist._tools.trace.reader import TracedCollective, TracedRun, TraceFile

_MOST_ROWS = 12


@dataclass(slots=True)
class SiteRow:
    """The collectives of one call, with its arguments, at one place. Times are in seconds, summed over the replicas."""

    kind: str
    at: str
    call: str
    count: int = 0
    nbytes: int = 0
    wait_seconds: float = 0.0
    largest_wait_seconds: float = 0.0


@dataclass(slots=True)
class ReplicaRow:
    """One replica: how many collectives it took part in, and in how many it came last.

    Its own time is what it took between its collectives; how long it held up the others is summed over them.
    """

    replica: int
    device: str
    collectives: int = 0
    last: int = 0
    own_seconds: float = 0.0
    wait_seconds: float = 0.0
    held_up_seconds: float = 0.0


@dataclass(slots=True)
class Statistics:
    """The sums of a trace: calls by total wait, replicas by how long they held up the others; the most first."""

    sites: list[SiteRow]
    replicas: list[ReplicaRow]


def count_up(trace: TraceFile) -> Statistics:
    """Return the statistics of a trace."""
    sites: dict[tuple[str, str, str], SiteRow] = {}
    rows: dict[int, ReplicaRow] = {}
    for devices in trace.devices.values():
        for replica, device in devices.items():
            rows.setdefault(replica, ReplicaRow(replica, device))
    progress = {
        run.number: {
            replica: _Progress(function.started, function.started, function.started - run.begin)
            for replica, function in run.functions.items()
        }
        for run in trace.runs.values()
    }
    for collective in trace.collectives:
        _count_site(sites, collective)
        _count_replicas(rows, progress[collective.run], collective)
    by_wait = sorted(sites.values(), key=lambda row: (-row.wait_seconds, row.at))
    by_held_up = sorted(rows.values(), key=lambda row: (-row.held_up_seconds, -row.last, row.replica))
    return Statistics(by_wait, by_held_up)


def _count_site(sites: dict[tuple[str, str, str], SiteRow], collective: TracedCollective) -> None:
    kind, call, at = collective.arrivals[0].text
    row = sites.get((kind, at, call))
    if row is None:
        row = sites[kind, at, call] = SiteRow(kind, at, call)
    waits = [arrival.wait / 1e6 for arrival in collective.arrivals]
    row.count += 1
    row.nbytes += sum(arrival.nbytes for arrival in collective.arrivals)
    row.wait_seconds += sum(waits)
    row.largest_wait_seconds = max(row.largest_wait_seconds, *waits)


@dataclass(slots=True)
class _Progress:
    """When a replica last called a collective and resumed from it, and how long after the others could have."""

    called: float
    resumed: float
    late: float


def _count_replicas(rows: dict[int, ReplicaRow], progress: dict[int, _Progress], collective: TracedCollective) -> None:
    """Add how long each replica took to come to a collective, and whom that held up."""
    completed, own, idle = collective.completed, list[float](), list[float]()
    for arrival in collective.arrivals:
        row, last = rows[arrival.replica], progress[arrival.replica]
        had_resumed = last.resumed <= arrival.issued
        own.append(max(0.0, arrival.issued - (max(last.resumed, last.called) if had_resumed else last.called)))
        idle.append(max(0.0, completed - arrival.issued) + (last.late if had_resumed else 0.0))
        row.collectives += 1
        row.wait_seconds += arrival.wait / 1e6
        row.own_seconds += own[-1] / 1e6
        last.called, last.resumed, last.late = arrival.issued, arrival.resumed, max(0.0, arrival.resumed - completed)
    if collective.error is not None:
        return
    rows[collective.last].last += 1
    if len(own) > 1:
        slowest = own.index(max(own))
        beyond, idle[slowest] = own[slowest] - median(own), 0.0
        held_up = sum(min(each, beyond) for each in idle)
        rows[collective.arrivals[slowest].replica].held_up_seconds += held_up / 1e6


def outcome(run: TracedRun) -> str:
    """Say how a run ended."""
    if run.report is not None:
        return f"{run.report['error']} at #{run.report['number']}"
    for replica, function in sorted(run.functions.items()):
        if function.error is not None:
            return f"replica {replica} raised {function.error}"
    ends = {function.end for function in run.functions.values() if function.end != "exited"}
    return ", ".join(sorted(ends)) or "returned"


def as_json(trace: TraceFile) -> dict[str, Any]:
    """Return the summary of a trace as JSON's types."""
    runs = [
        {
            "number": run.number,
            "name": run.name,
            "replicas": len(run.functions),
            "begin_seconds": run.begin / 1e6,
            "seconds": (run.end - run.begin) / 1e6,
            "outcome": outcome(run),
            "report": run.report,
        }
        for run in trace.runs.values()
    ]
    return {"about": trace.about, "runs": runs, **asdict(count_up(trace))}


# In the terminal.


def show(trace: TraceFile, console: Console) -> None:
    """Print the summary of a trace: runs, call sites, stragglers, and the disagreement if there is one."""
    statistics, runs = count_up(trace), list(trace.runs.values())
    collectives = Counter(collective.run for collective in trace.collectives)
    arrivals = sum(len(collective.arrivals) for collective in trace.collectives)
    counts = (len(runs), "run"), (len(trace.collectives), "collective"), (arrivals, "call")
    headline = f"{', '.join(count(*each) for each in counts)}; traced {trace.about.get('began', '')}"
    console.print(Text(headline, style="bold"), soft_wrap=True)
    failed = [run for run in runs[_MOST_ROWS:] if outcome(run) != "returned"]
    rows = [_run_row(run, collectives[run.number]) for run in [*runs[:_MOST_ROWS], *failed[:_MOST_ROWS]]]
    _print(console, "Runs", ("run", "of", "replicas", "collectives", "took", "outcome"), rows, len(runs))
    title = "Collectives, by the total time waited in them"
    headings = "collective", "called at", "times", "bytes", "waited", "longest"
    _print(console, title, headings, map(_site_row, statistics.sites[:_MOST_ROWS]), len(statistics.sites))
    title = "Stragglers, by how long they held up the others"
    headings = "replica", "device", "held up others", "came last", "own time", "waited"
    replicas = statistics.replicas if statistics.sites else []
    _print(console, title, headings, map(_replica_row, replicas[:_MOST_ROWS]), len(replicas))
    for run in runs:
        if run.report is not None:
            console.print()
            print_report(console, f"run {run.number}: {run.report['error']}: {run.report['text']}")


def _print(console: Console, title: str, headings: Sequence[str], found: Iterable[Sequence[str]], of: int) -> None:
    rows = list(found)
    print_table(console, headings, rows, of - len(rows), title=title)


def _run_row(run: TracedRun, collectives: int) -> Sequence[str]:
    took = duration((run.end - run.begin) / 1e6)
    return str(run.number), run.name, str(len(run.functions)), str(collectives), took, outcome(run)


def _site_row(row: SiteRow) -> Sequence[str]:
    waits = duration(row.wait_seconds), duration(row.largest_wait_seconds)
    return row.call, row.at, str(row.count), size(row.nbytes), *waits


def _replica_row(row: ReplicaRow) -> Sequence[str]:
    times = duration(row.own_seconds), duration(row.wait_seconds)
    came_last = f"{row.last} of {row.collectives}"
    return str(row.replica), row.device, duration(row.held_up_seconds), came_last, *times
