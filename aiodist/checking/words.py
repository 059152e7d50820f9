"""What a check came to, in words: the summary of what agreed, or the report on what did not and how to see it again."""

from __future__ import annotations

import asyncio
import importlib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import TracebackException

import anyio

import aiodist
import aiodist_kernels
from aiodist._core.errors import CollectiveError
from aiodist._core.text import count, shown
from aiodist.checking.check import SECONDS, Checked
from aiodist.checking.ledger import Ledger, Site
from aiodist.checking.target import TargetExitError

_MODULES = (aiodist, aiodist_kernels, asyncio, anyio, importlib)
_PLUMBING = (*(str(Path(module.__file__ or "").parent) for module in _MODULES), "<frozen importlib")
_MOST_ROWS = 20


def agreement(checked: Checked) -> str:
    """Return the sentence on a check in which all replicas agreed."""
    ledger, done = checked.ledger, checked.exploration.schedules
    runs = "" if ledger.runs == 1 else f" in {ledger.runs} runs"
    order = "the schedule that was given" if checked.request.replay is not None else count(done, "schedule")
    only = " (it leaves no choice)" if done == 1 < checked.request.most_schedules() else ""
    if checked.request.replay is not None:
        only = ""
    return f"{ledger.replicas} replicas agreed in {count(ledger.collectives, 'collective')}{runs}, in {order}{only}."


def table(ledger: Ledger) -> tuple[list[str], list[list[str]], int]:
    """Return the summary of collectives: headings, rows, and how many rows were left out.

    Where replicas waited, those rows come first that they waited longest in.
    """
    waited = any(site.waited for site in ledger.sites)
    headings = ["collective", "called at", "times", "bytes", *(["waited", "longest", "last to come"] if waited else [])]
    ordered = sorted(ledger.sites, key=lambda site: -site.waited)
    rows = [_row(site, waited=waited) for site in ordered[:_MOST_ROWS]]
    return headings, rows, len(ordered) - len(rows)


def _row(site: Site, *, waited: bool) -> list[str]:
    row = [site.call, shown(site.location), str(site.times), _size(site.bytes)]
    if waited:
        row += [_time(site.waited), _time(site.longest), _last(site)]
    return row


def _last(site: Site) -> str:
    if not site.last:
        return ""
    (replica_id, times), *others = site.last.most_common()
    return f"replica {replica_id}" if not others else f"replica {replica_id} ({times} of {site.last.total()})"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}" if unit != "B" else f"{number} B"
        number /= 1000
    return f"{number:.3g} TB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds else ""


def failure_text(checked: Checked) -> str:
    """Return the report on what went wrong: the error as the program would see it."""
    assert checked.exploration.failure is not None
    error = checked.exploration.failure.error
    assert error is not None
    if isinstance(error, CollectiveError):
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    if isinstance(error, TargetExitError) and error.__cause__ is not None:
        return "".join([*_program_traceback(error.__cause__), str(error)])
    return "".join(_program_traceback(error)).rstrip()


def _program_traceback(error: BaseException) -> Iterator[str]:
    """Yield a traceback without the frames of event loops and of ours that the error passed through."""
    account = TracebackException.from_exception(error)
    for part in _parts(account):
        own = [frame for frame in part.stack if not frame.filename.startswith(_PLUMBING)]
        if own or hasattr(part, "text"):  # a SyntaxError, which has its place in its text
            part.stack[:] = own
    return account.format()


def _parts(account: TracebackException) -> Iterator[TracebackException]:
    yield account
    for inner in (account.__cause__, account.__context__, *(getattr(account, "exceptions", None) or ())):
        if inner is not None:
            yield from _parts(inner)


def schedule_lines(checked: Checked) -> list[str]:
    """Return in which schedule it failed, what is different in that, and the command that repeats it."""
    exploration = checked.exploration
    assert exploration.failure is not None
    changes = exploration.failure.schedule.changes
    if checked.request.replay is not None:
        where = "In the schedule that was given"
    elif changes:
        where = f"Found in schedule {exploration.schedules} of {checked.request.most_schedules()}"
    else:
        where = "Found in the plain order"
    if not changes:
        return [f"{where}.", f"Again:  {replay_command(checked)}"]
    difference = f"{count(len(changes), 'change')} to the plain order, in which all goes well"
    lines = [f"{where}, with {difference}:", *(f"  {line}" for line in exploration.story)]
    return [*lines, f"Again:  {replay_command(checked)}"]


def replay_command(checked: Checked) -> str:
    """Return the command that runs the failing schedule again."""
    request, failure = checked.request, checked.exploration.failure
    assert failure is not None
    words: Sequence[str] = ["aiodist", "check", request.text]
    if request.replicas is not None:
        words = [*words, "--replicas", str(request.replicas)]
    if request.seconds != SECONDS:
        words = [*words, "--timeout", f"{request.seconds:g}"]
    words = [*words, "--replay", str(failure.schedule)]
    return shlex.join([*words, "--", *request.arguments] if request.arguments else words)
