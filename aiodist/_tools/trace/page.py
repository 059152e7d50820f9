"""A trace as one self-contained page: the parts under ``page_parts`` and the data, in one file."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any

from aiodist._tools.trace.reader import Arrival, TracedRun, TraceFile
from aiodist._tools.trace.summary import count_up, outcome
from aiodist._tools.trace.writer import AtomicFile

SCRIPTS = ("format.js", "data.js", "view.js", "raster.js", "draw.js", "pick.js", "panel.js", "controls.js", "main.js")
_STATUS = {None: 0, "incomplete": 2}


def write_page(trace: TraceFile, name: str, path: Path) -> None:
    """Write a trace as a page of that name, which is complete or absent; raise an OSError if it cannot be written."""
    with AtomicFile(path) as file:
        file.write(page_of(trace, name))


def page_of(trace: TraceFile, name: str) -> str:
    """Return a trace as a page."""
    # Inside a script element only "<" can end it, or begin a comment; the escape means the same to JSON.
    data = json.dumps(_data(trace, name), separators=(",", ":")).replace("<", "\\u003c")
    page = _part("page.html")
    scripts = "\n".join(_part(script) for script in SCRIPTS)
    for mark, text in (("/*STYLE*/", _part("page.css")), ("/*DATA*/", data), ("/*SCRIPTS*/", scripts)):
        before, after = page.split(mark)
        page = before + text + after
    return page


def _part(name: str) -> str:
    return (files("aiodist._tools.trace") / "page_parts" / name).read_text(encoding="utf-8")


def _data(trace: TraceFile, name: str) -> dict[str, Any]:
    texts: dict[tuple[str, str, str], int] = {}
    return {
        "name": name,
        "about": trace.about,
        "tracks": [{"pid": pid, "base": min(of), "devices": [*of.values()]} for pid, of in trace.devices.items()],
        "runs": [_run(run, min(trace.devices[run.pid])) for run in trace.runs.values()],
        **_collectives(trace, texts),
        "texts": [{"kind": kind, "call": call, "at": at} for kind, call, at in texts],
        "statistics": asdict(count_up(trace)),
    }


def _run(run: TracedRun, base: int) -> dict[str, Any]:
    """Return a run; its replicas are given by lane, from 0, where ids begin at `base`."""
    report, functions = run.report, dict(sorted(run.functions.items()))
    if report is not None:
        report = report | {"suspects": [i - base for i in report["suspects"] if i in functions]}
    return {
        "number": run.number,
        "name": run.name,
        "pid": run.pid,
        "base": base,
        "begin": run.begin,
        "end": run.end,
        "outcome": outcome(run),
        "report": report,
        "started": _packed("d", (each.started for each in functions.values())),
        "ended": _packed("d", (each.ended for each in functions.values())),
        "ends": {replica - base: each.end for replica, each in functions.items() if each.end != "exited"},
        "errors": {replica - base: each.error for replica, each in functions.items() if each.error is not None},
    }


def _collectives(trace: TraceFile, texts: dict[tuple[str, str, str], int]) -> dict[str, Any]:
    """Return the collectives as columns, and a column for each attribute of an arrival.

    Times of arrivals count from the first call of their collective, in numbers of four bytes, which is exact to a
    ten-millionth of the collective's length.
    """
    found = trace.collectives
    bases = [min(trace.devices[trace.runs[one.run].pid]) for one in found]
    groups: dict[str | None, int] = {None: 0}
    firsts = [one.first for one in found]
    lanes = (each.replica - base for one, base in zip(found, bases, strict=True) for each in one.arrivals)
    called = [texts.setdefault(each.text, len(texts)) for one in found for each in one.arrivals]

    def relative(field: Callable[[Arrival], float]) -> str:
        return _packed(
            "f", (field(each) - first for one, first in zip(found, firsts, strict=True) for each in one.arrivals)
        )

    return {
        "collectives": {
            "first": _packed("d", firsts),
            "completed": _packed("d", (one.completed for one in found)),
            "end": _packed("d", (max(one.completed, *(each.resumed for each in one.arrivals)) for one in found)),
            "run": _packed("I", (one.run for one in found)),
            "number": _packed("I", (one.number for one in found)),
            "group": _packed("I", (groups.setdefault(one.group, len(groups)) for one in found)),
            "last": _packed("I", (one.last - base for one, base in zip(found, bases, strict=True))),
            "status": _packed("B", (_STATUS.get(one.error, 1) for one in found)),
            "bytes": _packed("d", (sum(each.nbytes for each in one.arrivals) for one in found)),
            "size": _packed("I", (len(one.arrivals) for one in found)),
        },
        "arrivals": {
            "lane": _packed("I", lanes),
            "text": _packed("I", called),
            "issued": relative(attrgetter("issued")),
            "awaited": relative(attrgetter("awaited")),
            "resumed": relative(attrgetter("resumed")),
            "wait": _packed("f", (each.wait for one in found for each in one.arrivals)),
        },
        "groups": list(groups),
    }


def _packed(typecode: str, values: Iterable[float]) -> str:
    """Return numbers as the base64 of their bytes, little-endian, as every browser's machine has them."""
    packed = array(typecode, values)
    return b64encode(packed.tobytes()).decode("ascii")
