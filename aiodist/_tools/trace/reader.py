"""Reads a trace file: runs, and collectives with what each replica did in them. Times are in microseconds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiodist._tools.trace.writer import FORMAT

Event = dict[str, Any]
_LANE = re.compile(r"replica (\d+)(?: (\S+)|, other tasks)")


class TraceFileError(Exception):
    """A file is not a trace that can be read; the text is for a person."""


@dataclass(slots=True)
class TracedRun:
    """One run.

    Attributes:
        number, name: its number in the trace, from 1, and its function's name.
        pid: the lanes that it uses.
        begin, end: when it began and ended.
        started, ended: by replica id, when its function was called and returned.
        ends: by replica id, how that ended.
        errors: by replica id, a failure of its own.
        verdict: of a run whose replicas disagreed: reason, number, suspects, text, at.
    """

    number: int
    name: str
    pid: int
    begin: float
    end: float
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    verdict: dict[str, Any] | None = None


@dataclass(slots=True)
class TracedCollective:
    """One collective; lists have an item for each replica that took part, in the order of `replicas`.

    Attributes:
        run, group, number: its run, its group (None for all replicas), and its number there.
        last: the id of the replica that came last.
        error: what it ended with; "incomplete" where it never did.
        replicas: ids.
        calls, places, kinds: what each asked for, and where.
        nbytes: the bytes of each one's input.
        issued, awaited, resumed: when each called, awaited, and resumed.
        waits: how long each waited for the others.
    """

    run: int
    group: str | None
    number: int
    last: int
    error: str | None
    replicas: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    issued: list[float] = field(default_factory=list)
    awaited: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def completed(self) -> float:
        """When it was complete: the end of every wait, or the last call where nobody waited."""
        ends = [at + wait for at, wait in zip(self.awaited, self.waits, strict=True) if wait > 0]
        return max(ends) if ends else max(self.issued)


@dataclass(slots=True)
class TraceFile:
    """A trace file.

    Attributes:
        about: when and by what it was made.
        devices: by pid, the replicas' devices, by their ids.
        runs: by number.
        collectives: in the order in which they began.
    """

    about: dict[str, Any]
    devices: dict[int, dict[int, str]]
    runs: dict[int, TracedRun]
    collectives: list[TracedCollective]


def read_trace(path: str | Path) -> TraceFile:
    """Read a trace file.

    Raises:
        TraceFileError: it cannot be read, or is not a trace.
    """
    reader = _Reader()
    try:
        # There can be millions of events: each is read as it is decoded, and None takes its place.
        document = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=reader.take)
        return reader.finish(document)
    except OSError as error:
        raise TraceFileError(f"cannot read {path}: {error.strerror}") from error
    except _UnknownFileError as error:
        raise TraceFileError(f"{path} is not a trace that aiodist wrote: {error}") from error
    except ValueError as error:  # JSON's, or Unicode's
        raise TraceFileError(f"{path} is not a trace that aiodist wrote: it is not complete JSON ({error})") from error


class _UnknownFileError(Exception):
    pass


class _Reader:
    """Reads the events of one file in their order; those that need later ones wait for the end."""

    def __init__(self) -> None:
        self._devices: dict[int, dict[int, str]] = {}
        self._runs: dict[int, TracedRun] = {}
        self._replicas: dict[tuple[int, int], int] = {}
        self._collectives: dict[int, TracedCollective] = {}
        self._verdicts: list[Event] = []
        self._functions: list[Event] = []
        self._complete = True

    def take(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """Read an event, which is then done with; return other objects of the file, such as arguments, as they are."""
        if "ph" not in found:
            return found
        try:
            self._take(found)
        except (KeyError, TypeError, AttributeError):
            self._complete = False
        return None

    def _take(self, event: Event) -> None:
        if event["ph"] == "X" and event["cat"] == "collective":
            self._read_await(event)
        elif event["ph"] == "X" and event["tid"]:
            self._functions.append(event)
        elif event["ph"] == "X":
            number, name = event["args"]["run"], event["name"].partition(": ")[2]
            self._runs[number] = TracedRun(number, name, event["pid"], event["ts"], event["ts"] + event["dur"])
        elif event["ph"] == "M" and event["name"] == "thread_name":
            self._read_lane(event)
        elif event["ph"] == "i" and event["s"] == "p":
            self._verdicts.append(event)

    def _read_lane(self, event: Event) -> None:
        found = _LANE.fullmatch(event["args"]["name"])
        if found is not None:
            self._replicas[event["pid"], event["tid"]] = int(found[1])
            if found[2]:
                self._devices.setdefault(event["pid"], {})[int(found[1])] = found[2]

    def _read_await(self, event: Event) -> None:
        args, begin = event["args"], event["ts"]
        found = self._collectives.get(args["collective"])
        if found is None:
            error = "incomplete" if args.get("incomplete") else args.get("error")
            found = TracedCollective(args["run"], args.get("group"), args["number"], args["last"], error)
            self._collectives[args["collective"]] = found
        found.replicas.append(self._replicas[event["pid"], event["tid"]])
        found.kinds.append(event["name"])
        found.calls.append(args["call"])
        found.places.append(args["at"])
        found.nbytes.append(args["bytes"])
        found.issued.append(begin - args["ahead_ns"] / 1e3)
        found.awaited.append(begin)
        found.resumed.append(begin + event["dur"])
        found.waits.append(args["wait_ns"] / 1e3)

    def finish(self, document: Any) -> TraceFile:
        """Return the trace, of a file without its events.

        Raises:
            _UnknownFileError: it is not one of ours.
        """
        if not isinstance(document, dict) or "traceEvents" not in document:
            raise _UnknownFileError("it has no traceEvents")
        about = document.get("otherData")
        if not isinstance(about, dict) or "aiodist_trace" not in about:
            raise _UnknownFileError("other programs' traces open in https://ui.perfetto.dev")
        if about["aiodist_trace"] != FORMAT:
            raise _UnknownFileError(f"its version is {about['aiodist_trace']}, and this aiodist reads version {FORMAT}")
        try:
            self._finish_runs()
        except (KeyError, TypeError):
            self._complete = False
        if not self._complete or any(event is not None for event in document["traceEvents"]):
            raise _UnknownFileError("an event lacks what it should have")
        collectives = sorted(self._collectives.values(), key=lambda found: min(found.issued))
        return TraceFile(about, self._devices, dict(sorted(self._runs.items())), collectives)

    def _finish_runs(self) -> None:
        for event in self._functions:
            run, replica = self._runs[event["args"]["run"]], self._replicas[event["pid"], event["tid"]]
            run.started[replica] = event["ts"]
            run.ended[replica] = event["ts"] + event["dur"]
            run.ends[replica] = event["args"]["end"]
            if "error" in event["args"]:
                run.errors[replica] = event["args"]["error"]
        for event in self._verdicts:
            self._runs[event["args"]["run"]].verdict = {"at": event["ts"], "error": event["name"], **event["args"]}
