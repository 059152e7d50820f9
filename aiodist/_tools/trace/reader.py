"""Reads a trace file: runs, and collectives with what each replica did in them. Times are in microseconds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from aiodist._tools.trace.writer import FORMAT

Event: TypeAlias = dict[str, Any]
_LANE = re.compile(r"replica (\d+)(?: (\S+)|, other tasks)")


class TraceFileError(Exception):
    """A file is not a trace that can be read; the text is for a person."""


class Function(NamedTuple):
    """A replica's function: when it was called and returned, how it ended, and a failure of its own."""

    started: float
    ended: float
    end: str
    error: str | None


@dataclass(slots=True)
class TracedRun:
    """One run: its number from 1, its function's name, its lanes, and by replica id what became of the function.

    The report of a run whose replicas disagreed has at, error, reason, number, suspects and text.
    """

    number: int
    name: str
    pid: int
    begin: float
    end: float
    functions: dict[int, Function] = field(default_factory=dict)
    report: dict[str, Any] | None = None


class Arrival(NamedTuple):
    """What one replica did in a collective: when it called, awaited and resumed, and how long it waited for others.

    `text` is the kind of collective it asked for, the call, and its place; `nbytes` are those of its input.
    """

    replica: int
    text: tuple[str, str, str]
    nbytes: int
    issued: float
    awaited: float
    resumed: float
    wait: float


@dataclass(slots=True)
class TracedCollective:
    """One collective of a run: its group (None for all replicas), its number there, and the replica that came last.

    `error` is what it ended with; "incomplete" where it never did.
    """

    run: int
    group: str | None
    number: int
    last: int
    error: str | None
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def first(self) -> float:
        """When it was first called."""
        return min(arrival.issued for arrival in self.arrivals)

    @property
    def completed(self) -> float:
        """When it was complete: the end of every wait, or the last call where nobody waited."""
        ends = [arrival.awaited + arrival.wait for arrival in self.arrivals if arrival.wait > 0]
        return max(ends) if ends else max(arrival.issued for arrival in self.arrivals)


@dataclass(slots=True)
class TraceFile:
    """A trace file: when and by what it was made, devices by pid and replica id, runs by number, and collectives."""

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
    except (ValueError, RecursionError) as error:  # JSON's, or Unicode's; nested too deeply
        raise TraceFileError(f"{path} is not a trace that aiodist wrote: it is not complete JSON ({error})") from error


class _UnknownFileError(Exception):
    pass


_Field: TypeAlias = tuple[set[type], float]
_TIME: _Field = {int, float}, 1e15
_NATURAL: _Field = {int}, 1 << 31
_TEXT: _Field = {str}, 0
_FIELDS: dict[str, _Field] = {
    **dict.fromkeys(("ts", "dur", "wait_ns", "ahead_ns"), _TIME),
    **dict.fromkeys(("pid", "tid", "run", "collective", "number", "last"), _NATURAL),
    **dict.fromkeys(("name", "call", "at", "group", "error", "end", "reason", "text"), _TEXT),
    "bytes": ({int}, 1 << 60),
    "suspects": ({list}, 0),
}
"""The types of the fields of events and of their arguments, and where numbers end; none is negative."""


def _is_well_formed(found: dict[str, Any]) -> bool:
    for name, value in found.items():
        types, most = _FIELDS.get(name, (None, 0))
        if types is not None and (type(value) not in types or (most and not 0 <= value < most)):  # NaN is not either
            return False
    return True


class _Reader:
    """Reads the events of one file in their order: lanes, runs, and what stands in them."""

    def __init__(self) -> None:
        self._devices: dict[int, dict[int, str]] = {}
        self._runs: dict[int, TracedRun] = {}
        self._replicas: dict[tuple[int, int], int] = {}
        self._collectives: dict[int, TracedCollective] = {}
        self._complete = True

    def take(self, found: dict[str, Any]) -> dict[str, Any] | None:
        """Read an event, which is then done with; return other objects of the file, such as arguments, as they are."""
        if "ph" not in found:
            self._complete = self._complete and _is_well_formed(found)
            return found
        try:
            self._take(found)
        except (LookupError, TypeError, ValueError, AttributeError):
            self._complete = False
        return None

    def _take(self, event: Event) -> None:
        phase, category = event["ph"], event.get("cat")
        if category == "collective" and phase in ("s", "t", "f"):
            return
        if not _is_well_formed(event):
            raise TypeError
        match phase, category:
            case "X", "collective":
                self._read_await(event)
            case "X", "run" if event["tid"]:
                args, started = event["args"], event["ts"]
                run, replica = self._runs[args["run"]], self._replicas[event["pid"], event["tid"]]
                run.functions[replica] = Function(started, started + event["dur"], args["end"], args.get("error"))
            case "X", "run":
                number, begin = event["args"]["run"], event["ts"]
                name = event["name"].partition(": ")[2]
                self._runs[number] = TracedRun(number, name, event["pid"], begin, begin + event["dur"])
            case "M", _:
                self._read_lane(event)
            case "i", "end":
                if event["s"] == "p":
                    args = event["args"]
                    report = {name: args[name] for name in ("number", "reason", "text", "suspects")}
                    self._runs[args["run"]].report = {**report, "at": event["ts"], "error": event["name"]}
                    self._complete = self._complete and all(type(suspect) is int for suspect in args["suspects"])
            case _:
                raise TypeError(phase)

    def _read_lane(self, event: Event) -> None:
        found = _LANE.fullmatch(event["args"]["name"]) if event["name"] == "thread_name" else None
        if found is not None:
            pid, replica = event["pid"], int(found[1])
            self._replicas[pid, event["tid"]] = replica
            if found[2]:
                self._devices.setdefault(pid, {})[replica] = found[2]

    def _read_await(self, event: Event) -> None:
        args, begin = event["args"], event["ts"]
        key = args["collective"]
        found = self._collectives.get(key)
        if found is None:
            error = "incomplete" if args.get("incomplete") else args.get("error")
            found = TracedCollective(args["run"], args.get("group"), args["number"], args["last"], error)
            self._collectives[key] = found
        text = event["name"], args["call"], args["at"]
        issued, resumed = begin - args["ahead_ns"] / 1e3, begin + event["dur"]
        replica, wait = self._replicas[event["pid"], event["tid"]], args["wait_ns"] / 1e3
        found.arrivals.append(Arrival(replica, text, args["bytes"], issued, begin, resumed, wait))

    def finish(self, document: Any) -> TraceFile:
        """Return the trace, of a file without its events.

        Raises:
            _UnknownFileError: it is not one of ours.
        """
        events = document.get("traceEvents") if isinstance(document, dict) else None
        if not isinstance(events, list):
            raise _UnknownFileError("it has no traceEvents")
        about = document.get("otherData")
        if not isinstance(about, dict) or "aiodist_trace" not in about:
            raise _UnknownFileError("other programs' traces open in https://ui.perfetto.dev")
        if about["aiodist_trace"] != FORMAT:
            raise _UnknownFileError(f"its version is {about['aiodist_trace']}, and this aiodist reads version {FORMAT}")
        fits = (
            self._complete
            and not any(event is not None for event in events)
            and all(map(self._has_lanes, self._runs.values()))
            and all(map(self._is_of_run, self._collectives.values()))
        )
        if not fits:
            raise _UnknownFileError("an event lacks what it should have")
        collectives = sorted(self._collectives.values(), key=lambda found: found.first)
        return TraceFile(about, self._devices, dict(sorted(self._runs.items())), collectives)

    def _has_lanes(self, run: TracedRun) -> bool:
        """Whether the replicas of a run have lanes: those that follow its first."""
        devices = self._devices.get(run.pid)
        return devices is not None and (
            run.functions.keys() <= devices.keys() == set(range(min(devices), min(devices) + len(devices)))
        )

    def _is_of_run(self, collective: TracedCollective) -> bool:
        replicas = {arrival.replica for arrival in collective.arrivals}
        whole = len(replicas) == len(collective.arrivals) and collective.last in replicas
        run = self._runs.get(collective.run)
        return whole and run is not None and replicas <= run.functions.keys()
