"""The result of a check as text and as JSON: a summary of what agreed, or the report on what did not."""

from __future__ import annotations

import asyncio
import importlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from traceback import TracebackException
from typing import Any

import anyio

import aiodist_kernels
from aiodist import _checking
from aiodist._checking.check import SECONDS, Checked, Site, Statistics
from aiodist._checking.target import TargetExitError
from aiodist._core.errors import CollectiveError
from aiodist._core.text import count, duration, shown, size
from aiodist._core.wire import named

_PLUMBING = (
    str(Path(_checking.__file__).parent.parent),
    *(str(Path(module.__file__ or "").parent) for module in (aiodist_kernels, asyncio, anyio, importlib)),
    "<frozen importlib",
)
_MOST_ROWS = 20
_MOST_HELD_UP = 5


# What agreed.


def agreement(checked: Checked) -> str:
    """Return the sentence on a check in which all replicas agreed."""
    statistics, done = checked.statistics, checked.exploration.schedules
    runs = "" if statistics.runs == 1 else f" in {statistics.runs} runs"
    if checked.request.replay is not None:
        order = "the given schedule"
    else:
        only = " (it leaves no choice)" if done == 1 < checked.request.most_schedules() else ""
        order = f"{count(done, 'schedule')}{only}"
    replicas = count(statistics.replicas, "replica")
    return f"{replicas} agreed in {count(statistics.collectives, 'collective')}{runs}, in {order}."


def held_up_lines(checked: Checked) -> list[str]:
    """Return who held up the event loop for more than a second, and where."""
    return [
        f"{one.who} held up the event loop for {duration(one.seconds)} at {shown(one.location)}: meanwhile no other "
        "replica goes on (await ctx.run_sync(function) runs it in a thread)"
        for one in checked.held_up[:_MOST_HELD_UP]
    ]


def table(statistics: Statistics) -> tuple[list[str], list[list[str]], int]:
    """Return headings, rows, and how many rows were left out; where replicas waited, the longest waits come first."""
    waited = any(site.waited_seconds for site in statistics.sites)
    headings = ["collective", "called at", "times", "bytes", *(["waited", "longest", "last to come"] if waited else [])]
    ordered = sorted(statistics.sites, key=lambda site: -site.waited_seconds)
    rows = [_row(site)[: len(headings)] for site in ordered[:_MOST_ROWS]]
    return headings, rows, len(ordered) - len(rows)


def _row(site: Site) -> list[str]:
    row = [site.call, shown(site.location), str(site.times), size(site.bytes)]
    if not site.waited_seconds:
        return [*row, "", "", ""]
    last = ""
    if site.last_to_come:
        (replica_id, times), *others = site.last_to_come.most_common()
        last = f"replica {replica_id}" + (f" ({times} of {site.last_to_come.total()})" if others else "")
    return [*row, duration(site.waited_seconds), duration(site.longest_wait_seconds), last]


# What failed.


def failure_text(checked: Checked) -> str:
    """Return the report on what went wrong: the error as the program would see it."""
    error = checked.error
    assert error is not None
    if isinstance(error, CollectiveError):
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    if isinstance(error, TargetExitError) and error.__cause__ is not None:
        return "".join([*_program_traceback(error.__cause__), str(error)])
    return "".join(_program_traceback(error)).rstrip()


def _program_traceback(error: BaseException) -> Iterator[str]:
    """Yield a traceback without the frames of event loops and of ours that the error passed through."""
    traceback = TracebackException.from_exception(error)
    for part in _parts(traceback):
        own = [frame for frame in part.stack if not frame.filename.startswith(_PLUMBING)]
        if own or hasattr(part, "text"):  # a SyntaxError, which has its place in its text
            part.stack[:] = own
    return traceback.format()


def _parts(traceback: TracebackException) -> Iterator[TracebackException]:
    yield traceback
    for inner in (traceback.__cause__, traceback.__context__, *(getattr(traceback, "exceptions", None) or ())):
        if inner is not None:
            yield from _parts(inner)


def schedule_lines(checked: Checked) -> list[str]:
    """Return in which schedule it failed, what is different in that, and the command that repeats it."""
    exploration = checked.exploration
    where = "Found in the default order"
    if checked.request.replay is not None:
        where = "In the given schedule"
    elif exploration.result.schedule.changes:
        where = f"Found in schedule {exploration.schedules} of {checked.request.most_schedules()}"
    story = exploration.story(where, ", in which nothing fails:") or [f"{where}."]
    return [*story, f"Again:  {replay_command(checked)}"]


def replay_command(checked: Checked) -> str:
    """Return the command that runs the failing schedule again."""
    request = checked.request
    words = ["aiodist", "check", request.target]
    if request.replicas is not None:
        words += ["--replicas", str(request.replicas)]
    if request.seconds != SECONDS:
        words += ["--timeout", f"{request.seconds:g}"]
    words += ["--replay", str(checked.exploration.result.schedule)]
    return shlex.join([*words, "--", *request.arguments] if request.arguments else words)


# As JSON.


def as_json(checked: Checked) -> dict[str, Any]:
    """Return a check as a dict of strings, numbers, lists and dicts, as JSON has them."""
    request, statistics, error = checked.request, checked.statistics, checked.error
    found: dict[str, Any] = {
        "target": request.target,
        "outcome": str(checked.outcome),
        "replicas": statistics.replicas,
        "runs": statistics.runs,
        "seed": request.replay.seed if request.replay is not None else request.seed,
        "schedules": checked.exploration.schedules,
        "held_up": [
            {"who": one.who, "seconds": round(one.seconds, 1), "location": shown(one.location)}
            for one in checked.held_up
        ],
        "collectives": named(tuple(statistics.sites)),
    }
    if error is not None:
        found["failure"] = {
            "error": type(error).__name__,
            "text": failure_text(checked),
            "report": error.report.to_dict() if isinstance(error, CollectiveError) else None,
            "schedule": str(checked.exploration.result.schedule),
            "changes": list(checked.exploration.changes),
            "replay": replay_command(checked),
        }
    return found
