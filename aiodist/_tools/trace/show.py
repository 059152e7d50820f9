"""`aiodist trace`: collectives by call, how long replicas waited and for which ones; in the terminal and as a page.

Replicas of one event loop take turns, so one of them always arrives last, perhaps only because its turn is the last.
Last arrivals are counted, but stragglers are found by the time that each replica took from its last collective to its
call of the next. The replica that took longest is the straggler of that collective. The time that it took beyond the
median replica is how long it held up each of the others, but at most the time for which that one was idle.

The page is self-contained: ``page.html`` with the data in it.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from aiodist._core.text import count, duration, size
from aiodist._tools.trace.file import Trace, read_trace, replacing
from aiodist._tools.trace.recording import Arrival, Collective, Run
from aiodist._tools.usage import Commands, Exit, UsageError, print_help

if TYPE_CHECKING:
    from rich.console import Console

_MOST_ROWS = 12


# The commands.

_DESCRIPTION = """\
Show the timeline of a program's replicas: their collectives, and which replicas waited for which. A trace is a file
that the block `with aiodist.trace("run.json"):` writes, or a whole process if the environment variable is set to
AIODIST_TRACE=run.json. https://ui.perfetto.dev also shows it.
"""


def add_trace(commands: Commands) -> None:
    """Add the `trace` command with its subcommands."""
    trace = commands.add_parser("trace", help="show the timeline of a run", description=_DESCRIPTION)
    traces = trace.add_subparsers(title="commands", metavar="COMMAND")
    trace.set_defaults(command=partial(print_help, trace))
    show = traces.add_parser(
        "show",
        help="print a summary",
        description="Print runs, collectives by call site, which replicas held up the others, and any disagreement.",
    )
    html = traces.add_parser(
        "html",
        help="write one page with the timeline, for any browser",
        description="Write one self-contained page: a lane for each replica, waits shaded, a line for each collective.",
    )
    for parser, command in ((show, _show), (html, _html)):
        parser.add_argument("file", metavar="FILE", help="the trace, such as run.json")
        parser.set_defaults(command=command)
    html.add_argument("-o", "--output", metavar="PAGE", help="where to write it (default: FILE ending in .html)")


def _show(arguments: Namespace) -> Exit:
    from aiodist._tools.output import open_console

    with _reading(arguments.file) as trace:
        print_summary(trace, open_console())
    return Exit.DONE


def _html(arguments: Namespace) -> Exit:
    with _reading(arguments.file) as trace:
        page = page_of(trace, Path(arguments.file).name)
    path = arguments.output or Path(arguments.file).with_suffix(".html")
    if os.path.realpath(path) == os.path.realpath(arguments.file):
        raise UsageError(f"the page would replace the trace {path}: name another file by --output")
    try:
        with replacing(path) as file:
            file.write(page)
    except OSError as error:
        raise UsageError(str(error)) from error
    print(f"wrote {path}")
    return Exit.DONE


@contextmanager
def _reading(path: str) -> Iterator[Trace]:
    """Read a trace. Damage is reported also if it is found only when the trace is used, inside the block."""
    try:
        try:
            trace = read_trace(path)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        yield trace
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a trace that this aiodist wrote ({type(error).__name__}: {error}); "
            "traces of other programs open in https://ui.perfetto.dev"
        ) from error


# Statistics.


@dataclass(slots=True)
class SiteRow:
    """The collectives of one call, with its arguments, at one place. Times are in seconds, summed over the replicas."""

    kind: str
    call: str
    at: str
    count: int = 0
    nbytes: int = 0
    wait_seconds: float = 0.0
    largest_wait_seconds: float = 0.0


@dataclass(slots=True)
class ReplicaRow:
    """One replica: its collectives, in how many of them it arrived last, and its times, summed over them."""

    replica: int
    device: str
    collectives: int = 0
    last: int = 0
    own_seconds: float = 0.0  # between its collectives
    wait_seconds: float = 0.0
    held_up_seconds: float = 0.0  # for which it held up the others, summed over them


class Statistics(NamedTuple):
    """The sums of a trace, largest first: calls by total wait, replicas by how long they held up the others."""

    sites: list[SiteRow]
    replicas: list[ReplicaRow]


def count_up(trace: Trace) -> Statistics:
    """Return the statistics of a trace."""
    sites: dict[int, SiteRow] = {}
    rows: dict[int, ReplicaRow] = {}
    for run in trace.runs:
        for replica, device in enumerate(run.devices, run.first):
            rows.setdefault(replica, ReplicaRow(replica, device))
        # When each replica last called a collective, when it resumed, and how long after the completion that was:
        progress = {
            replica: (function.started, function.started, function.started - run.begun)
            for replica, function in run.functions.items()
        }
        for collective in run.collectives:
            arrivals = collective.arrivals
            text = arrivals[0].text
            row = sites.get(text) or sites.setdefault(text, SiteRow(*trace.texts[text]))
            row.count += 1
            _count(row, rows, progress, collective, arrivals)
    by_wait = sorted(sites.values(), key=lambda row: (-row.wait_seconds, row.at))
    by_held_up = sorted(rows.values(), key=lambda row: (-row.held_up_seconds, -row.last, row.replica))
    return Statistics(by_wait, by_held_up)


def _count(
    site: SiteRow,
    rows: dict[int, ReplicaRow],
    progress: dict[int, tuple[float, float, float]],
    collective: Collective,
    arrivals: Sequence[Arrival],
) -> None:
    """Add how long each replica took to reach a collective and waited in it, and how long the straggler held it up."""
    completed, own, idle = collective.complete, dict[int, float](), dict[int, float]()
    for arrival in arrivals:
        replica = arrival.replica
        called, resumed, late = progress[replica]
        had_resumed = resumed <= arrival.issued
        own[replica] = max(0.0, arrival.issued - (max(resumed, called) if had_resumed else called))
        idle[replica] = max(0.0, completed - arrival.issued) + (late if had_resumed else 0.0)
        resumed = arrival.issued if arrival.resumed is None else arrival.resumed
        progress[replica] = arrival.issued, resumed, max(0.0, resumed - completed)
        row, wait = rows[replica], collective.wait_of(arrival)
        row.collectives += 1
        row.own_seconds += own[replica]
        row.wait_seconds += wait
        site.nbytes += arrival.nbytes
        site.wait_seconds += wait
        site.largest_wait_seconds = max(site.largest_wait_seconds, wait)
    if collective.error is not None or collective.completed is None:
        return
    rows[collective.last].last += 1
    if len(own) > 1:
        slowest = max(own, key=own.__getitem__)
        beyond, idle[slowest] = own[slowest] - median(own.values()), 0.0
        rows[slowest].held_up_seconds += sum(min(each, beyond) for each in idle.values())


def outcome(run: Run) -> str:
    """Say how a run ended."""
    if run.report is not None:
        return f"{run.report['error']} at #{run.report['number']}"
    for replica, function in run.functions.items():
        if function.error is not None:
            return f"replica {replica} raised {function.error}"
    ends = {function.end for function in run.functions.values() if function.end != "exited"}
    return ", ".join(sorted(ends)) or "returned"


# In the terminal.


def print_summary(trace: Trace, console: Console) -> None:
    """Print the summary of a trace: runs, collectives by call, stragglers, and reports on disagreements."""
    from aiodist._tools.output import print_report, print_table

    def print_rows(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        print_table(console, headings, rows[:_MOST_ROWS], max(0, len(rows) - _MOST_ROWS), title=title)

    sites, replicas = count_up(trace)
    counts = (
        count(len(trace.runs), "run"),
        count(sum(len(run.collectives) for run in trace.runs), "collective"),
        count(sum(row.collectives for row in replicas), "call"),
    )
    console.print(f"{', '.join(counts)}; traced {trace.about['began']}", style="bold", soft_wrap=True)
    print_rows(
        "Runs",
        ("run", "of", "replicas", "collectives", "took", "outcome"),
        [
            (str(run.number), run.name, str(len(run.functions)), str(len(run.collectives)),
             duration(run.over - run.begun), outcome(run))
            for run in trace.runs
        ],
    )  # fmt: skip
    print_rows(
        "Collectives, by the total time waited in them",
        ("collective", "called at", "times", "bytes", "waited", "longest"),
        [
            (site.call, site.at, str(site.count), size(site.nbytes), duration(site.wait_seconds),
             duration(site.largest_wait_seconds))
            for site in sites
        ],
    )  # fmt: skip
    print_rows(
        "Stragglers, by how long they held up the others",
        ("replica", "device", "held up others", "came last", "own time", "waited"),
        [
            (str(row.replica), row.device, duration(row.held_up_seconds), f"{row.last} of {row.collectives}",
             duration(row.own_seconds), duration(row.wait_seconds))
            for row in replicas
            if sites
        ],
    )  # fmt: skip
    for run in trace.runs:
        if run.report is not None:
            console.print()
            print_report(console, f"run {run.number}: {run.report['error']}: {run.report['text']}")


# As a page.


def page_of(trace: Trace, name: str) -> str:
    """Return a trace as a page of that name."""
    tracks = {run.pid: {"pid": run.pid, "base": run.first, "devices": run.devices} for run in trace.runs}
    runs = [asdict(replace(run, collectives=[], devices=())) | {"outcome": outcome(run)} for run in trace.runs]
    data = {
        "name": name,
        "about": trace.about,
        "tracks": list(tracks.values()),
        "runs": runs,
        "collectives": [_collective(run, one) for run in trace.runs for one in run.collectives],
        "texts": [{"kind": kind, "call": call, "at": at} for kind, call, at in trace.texts],
        "statistics": {of: list(map(asdict, rows)) for of, rows in count_up(trace)._asdict().items()},
    }
    # Only "<" can end a script element or begin a comment in it; the escape means the same to JSON.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (files("aiodist._tools.trace") / "page.html").read_text(encoding="utf-8").replace("/*DATA*/", text)


def _collective(run: Run, one: Collective) -> dict[str, Any]:
    """Return a collective, with a row for each arrival, by lane; times are in microseconds since its first call."""
    first = one.first

    def since(at: float) -> float:
        return round((at - first) * 1e6, 3)

    return {
        "run": run.number,
        "number": one.number,
        "group": one.group,
        "last": one.last - run.first,
        "status": 2 if one.completed is None else int(one.error is not None),
        "first": first,
        "completed": since(one.complete),
        "arrivals": [
            (
                each.replica - run.first, each.text, each.nbytes, since(each.issued), since(each.begin),
                since(each.issued if each.resumed is None else each.resumed), round(one.wait_of(each) * 1e6, 3),
            )
            for each in one.arrivals
        ],
    }  # fmt: skip
