"""A trace in the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aiodist.collective.wording import count
from aiodist.tools.tracing.reading import TracedRun, TraceFile
from aiodist.tools.tracing.statistics import Statistics, count_up

_MOST_ROWS = 12
_WIDE = 200


def show(trace: TraceFile, console: Console) -> None:
    """Print what a trace comes to: runs, call sites, stragglers, and the disagreement if there is one."""
    if not console.is_terminal:
        console.width = _WIDE  # a pipe has no width: let lines be as long as they are
    statistics = count_up(trace)
    _headline(trace, console)
    _tell_runs(list(trace.runs.values()), trace, console)
    if statistics.sites:
        _tell_sites(statistics, console)
        _tell_replicas(statistics, console)
    for run in trace.runs.values():
        if run.verdict is not None:
            console.print()
            console.print(Text(f"run {run.number}: {run.verdict['error']}: {run.verdict['text']}"), soft_wrap=True)


def as_json(trace: TraceFile) -> str:
    """Return what a trace comes to as JSON."""
    runs = [
        {
            "number": run.number,
            "name": run.name,
            "replicas": len(run.started),
            "begin_seconds": run.begin / 1e6,
            "seconds": (run.end - run.begin) / 1e6,
            "outcome": outcome(run),
            "verdict": run.verdict,
        }
        for run in trace.runs.values()
    ]
    return json.dumps({"about": trace.about, "runs": runs, **count_up(trace).as_json()}, indent=2)


def outcome(run: TracedRun) -> str:
    """Say how a run ended."""
    if run.verdict is not None:
        return f"{run.verdict['error']} at #{run.verdict['number']}"
    if run.errors:
        replica, error = min(run.errors.items())
        return f"replica {replica} raised {error}"
    ends = {end for end in run.ends.values() if end != "exited"}
    return ", ".join(sorted(ends)) or "returned"


def _headline(trace: TraceFile, console: Console) -> None:
    arrivals = sum(len(found.replicas) for found in trace.collectives)
    parts = [
        count(len(trace.runs), "run"),
        count(len(trace.collectives), "collective"),
        count(arrivals, "call"),
    ]
    console.print(Text(f"{', '.join(parts)}; traced {trace.about.get('began', '')}", style="bold"), soft_wrap=True)


def _table(title: str, columns: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, side in columns:
        table.add_column(name, justify="right" if side == ">" else "left", overflow="fold")
    return table


def _print(table: Table, left_out: int, console: Console) -> None:
    console.print(table)
    if left_out:
        console.print(f"… and {left_out} more (--json has them all)")


def _tell_runs(runs: list[TracedRun], trace: TraceFile, console: Console) -> None:
    made: dict[int, int] = {}
    for collective in trace.collectives:
        made[collective.run] = made.get(collective.run, 0) + 1
    table = _table(
        "Runs", [("run", ">"), ("of", "<"), ("replicas", ">"), ("collectives", ">"), ("took", ">"), ("", "<")]
    )
    shown = runs[:_MOST_ROWS]
    odd = [run for run in runs[_MOST_ROWS:] if outcome(run) != "returned"][:_MOST_ROWS]
    for run in [*shown, *odd]:
        cells = str(run.number), run.name, str(len(run.started)), str(made.get(run.number, 0))
        table.add_row(*map(Text, cells), duration((run.end - run.begin) / 1e6), Text(outcome(run)))
    _print(table, len(runs) - len(shown) - len(odd), console)


def _tell_sites(statistics: Statistics, console: Console) -> None:
    columns = [("collective", "<"), ("at", "<"), ("times", ">"), ("bytes", ">"), ("waited", ">"), ("longest", ">")]
    table = _table("Collectives, by all that was waited in them", columns)
    for row in statistics.sites[:_MOST_ROWS]:
        table.add_row(
            Text(row.call),
            Text(row.at),
            str(row.count),
            size(row.nbytes),
            duration(row.wait_seconds),
            duration(row.largest_wait_seconds),
        )
    _print(table, len(statistics.sites) - _MOST_ROWS if len(statistics.sites) > _MOST_ROWS else 0, console)


def _tell_replicas(statistics: Statistics, console: Console) -> None:
    columns = [
        ("replica", ">"),
        ("device", "<"),
        ("held up others", ">"),
        ("came last", ">"),
        ("own time", ">"),
        ("waited", ">"),
    ]
    table = _table("Stragglers, by how long they held up the others", columns)
    for row in statistics.replicas[:_MOST_ROWS]:
        table.add_row(
            str(row.replica),
            Text(row.device),
            duration(row.held_up_seconds),
            f"{row.last} of {row.collectives}",
            duration(row.own_seconds),
            duration(row.wait_seconds),
        )
    _print(table, max(0, len(statistics.replicas) - _MOST_ROWS), console)


def duration(seconds: float) -> str:
    """Return a time as a person reads it: ``1.23 s``, ``45.6 ms``, ``7.89 µs``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale * 0.9995:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def size(nbytes: float) -> str:
    """Return a number of bytes as a person reads it."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{_three_digits(nbytes)} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    raise AssertionError


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(max(value, 1))))}f}"
