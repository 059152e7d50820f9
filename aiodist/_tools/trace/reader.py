"""Reads a trace file: runs, and collectives with what each replica did in them. Times are in microseconds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiodist._tools.trace.writer import FORMAT

Event = dict[str, Any]
_LANE = re.compile(r"replica (\d+)(?: (\S+)|, other tasks)")
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[\s,]*")


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
    try:
        text = Path(path).read_text(encoding="utf-8")
        events, about = _split(text)
        return _Reader(about).read(events)
    except OSError as error:
        raise TraceFileError(f"cannot read {path}: {error.strerror}") from error
    except _UnknownFileError as error:
        raise TraceFileError(f"{path} is no trace that aiodist wrote: {error}") from error
    except ValueError as error:  # JSON's, or Unicode's
        raise TraceFileError(f"{path} is no trace that aiodist wrote: it is not complete JSON ({error})") from error
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise TraceFileError(f"{path} is no trace that aiodist wrote: an event lacks what it should have") from error


class _UnknownFileError(Exception):
    pass


def _split(text: str) -> tuple[Iterator[Event], dict[str, Any]]:
    """Return the events, which are decoded one by one because there can be millions, and what else is in the file."""
    found = re.search(r'"traceEvents"\s*:\s*\[', text)
    if found is None:
        json.loads(text)
        raise _UnknownFileError("it has no traceEvents")
    end = _end_of_events(text, found.end())
    rest = json.loads(text[: found.end()] + text[end:])
    about = rest.get("otherData", {})
    if not isinstance(about, dict) or "aiodist_trace" not in about:
        raise _UnknownFileError("other programs' traces open in https://ui.perfetto.dev")
    if about["aiodist_trace"] != FORMAT:
        raise _UnknownFileError(f"its version is {about['aiodist_trace']}, and this aiodist reads version {FORMAT}")
    return _decode(text, found.end()), about


def _end_of_events(text: str, begin: int) -> int:
    """Return where the list of events ends: at the last bracket in our own files, else where decoding arrives."""
    end = text.rfind("]")
    if end > begin and text[end + 1 :].strip() == "}":
        return end
    *_, (_, end) = _decode_with_ends(text, begin)
    return end


def _decode(text: str, begin: int) -> Iterator[Event]:
    return (event for event, _ in _decode_with_ends(text, begin) if event is not None)


def _decode_with_ends(text: str, at: int) -> Iterator[tuple[Event | None, int]]:
    """Yield events, and the position after each; at last None, and the position of the bracket."""
    while True:
        space = _SPACE.match(text, at)
        at = space.end() if space else at
        if text[at : at + 1] == "]":
            yield None, at
            return
        event, at = _DECODER.raw_decode(text, at)
        yield event, at


class _Reader:
    def __init__(self, about: dict[str, Any]) -> None:
        self._trace = TraceFile(about, {}, {}, [])
        self._replicas: dict[tuple[int, int], int] = {}
        self._collectives: dict[int, TracedCollective] = {}
        self._verdicts: list[Event] = []
        self._lives: list[Event] = []

    def read(self, events: Iterator[Event]) -> TraceFile:
        for event in events:
            if event["ph"] == "X":
                self._slice(event)
            elif event["ph"] == "M" and event["name"] == "thread_name":
                self._lane(event)
            elif event["ph"] == "i" and event["s"] == "p":
                self._verdicts.append(event)
        for event in self._lives:
            self._life(event)
        for event in self._verdicts:
            self._trace.runs[event["args"]["run"]].verdict = {
                "at": event["ts"], "error": event["name"], **event["args"],
            }  # fmt: skip
        self._trace.collectives = sorted(self._collectives.values(), key=lambda found: min(found.issued))
        self._trace.runs = dict(sorted(self._trace.runs.items()))
        return self._trace

    def _lane(self, event: Event) -> None:
        found = _LANE.fullmatch(event["args"]["name"])
        if found is not None:
            self._replicas[event["pid"], event["tid"]] = int(found[1])
            if found[2]:
                self._trace.devices.setdefault(event["pid"], {})[int(found[1])] = found[2]

    def _slice(self, event: Event) -> None:
        if event["cat"] == "collective":
            self._await(event)
        elif event["tid"]:
            self._lives.append(event)
        else:
            number = event["args"]["run"]
            name = event["name"].partition(": ")[2]
            run = TracedRun(number, name, event["pid"], event["ts"], event["ts"] + event["dur"])
            self._trace.runs[number] = run

    def _life(self, event: Event) -> None:
        run, replica = self._trace.runs[event["args"]["run"]], self._replicas[event["pid"], event["tid"]]
        run.started[replica] = event["ts"]
        run.ended[replica] = event["ts"] + event["dur"]
        run.ends[replica] = event["args"]["end"]
        if "error" in event["args"]:
            run.errors[replica] = event["args"]["error"]

    def _await(self, event: Event) -> None:
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
