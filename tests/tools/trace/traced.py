"""Helpers of the tests of traces: running a program under a trace, and reading the file strictly by its format."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiodist
from aiodist import ReplicaContext
from tests.runtime.programs import mirrored, run

Event = dict[str, Any]

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
}
AWAIT = {
    "collective", "run", "group", "number", "last", "completed", "error",
    "awaited", "replica", "call", "at", "bytes", "wait_ns", "ahead_ns",
}  # fmt: skip


async def traced(path: Path, program: Callable[[ReplicaContext], Awaitable[Any]], replicas: int = 3) -> list[Event]:
    """Run a program under a trace; return the events, checked."""
    with aiodist.trace(path):
        await run(mirrored(replicas), program)
    return events_of(path)


def events_of(path: Path) -> list[Event]:
    """Read a trace file by the rules of the Trace Event format; return its events by time."""
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: 1 / 0)  # no NaN, no Infinity
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] == "ns"
    events: list[Event] = document["traceEvents"]
    for event in events:
        check_event(event)
    events.sort(key=lambda event: (event.get("ts", 0.0), -event.get("dur", 0.0)))
    check_slices(events)
    return events


def check_event(event: Event) -> None:
    """Check that an event has the fields of its phase, of the right types."""
    assert set(event) == REQUIRED[event["ph"]] | {"ph"}
    assert (type(event["pid"]), type(event["tid"]), type(event["name"])) == (int, int, str)
    assert min(event.get("ts", 0.0), event.get("dur", 0.0)) >= 0
    if event["ph"] == "X" and event["cat"] == "collective":
        assert set(event["args"]) == AWAIT
        assert event["args"]["wait_ns"] <= event["dur"] * 1e3 + 1


def check_slices(events: list[Event]) -> None:
    """Check that the slices of a lane are disjoint or nested, and that every lane has a name."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    lanes = defaultdict(list)
    for event in events:
        assert (event["pid"], event["tid"]) in named
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        open_ends: list[float] = []
        for begin, end in slices:
            while open_ends and open_ends[-1] <= begin + 0.0005:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.0015
            open_ends.append(end)


def collectives(events: list[Event]) -> list[Event]:
    """Return the slices of collectives."""
    return [event for event in events if event["ph"] == "X" and event["cat"] == "collective"]
