"""A trace file, in the Trace Event format that Perfetto and Chrome read: how it is written, and how it is read back.

    process (pid)    replicas of one run; consecutive runs on equal devices share one
      thread 0       the runs
      thread k       its k-th replica: a slice for its function, and inside it one for each collective that it awaits
      thread n + k   that replica's awaits that overlap others of its, from child tasks; and so on

A report is an instant (``i``); names of lanes are metadata (``M``). Times are in microseconds since the trace began, to
the nanosecond.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from aiodist._tools.trace.recording import Arrival, Collective, Function, Recording, Run, Text

Event: TypeAlias = dict[str, Any]

FORMAT = 2  # the version of what a trace file tells beyond the Trace Event format


def check_place(path: str | os.PathLike[str]) -> Path:
    """Return where a file will be, links followed, before a program runs for nothing.

    Raises:
        OSError: its folder does not exist or cannot be written to, or something other than a file is in its place.
    """
    found = Path(os.path.realpath(path))
    if found.exists() and not found.is_file():
        raise OSError(f"cannot write {found}: it is not a regular file")
    if not os.access(found.parent, os.W_OK):
        raise OSError(f"cannot write {found}: its folder does not exist or cannot be written to")
    return found


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Write a text file that is complete or absent: under another name, and moved to its path when it is complete."""
    final = check_place(path)
    unfinished = final.with_name(f".{final.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(final)
    finally:
        unfinished.unlink(missing_ok=True)


# Writing.


def write_trace(recording: Recording, path: Path) -> None:
    """Write a recording that is closed; raise an OSError, with nothing left behind, if that fails."""
    about = {
        "aiodist_trace": FORMAT,
        "began": recording.began.isoformat(timespec="milliseconds"),
        "python": sys.version.partition(" ")[0],
        "command": " ".join(sys.argv),
    }
    with replacing(path) as file:
        file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[')
        separator = "\n"
        for event in _events(recording):
            file.write(separator)
            file.write(json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _events(recording: Recording) -> Iterator[Event]:
    """Yield the events of all runs; what encloses others comes first."""
    processes: list[_Process] = []
    numbers, texts = count(1), [*recording.texts]
    for run in sorted(recording.runs, key=lambda run: run.begun):
        process = next((process for process in processes if process.fits(run)), None)
        if process is None:
            process = _Process(len(processes) + 1, run)
            processes.append(process)
            yield from process.names()
        process.run = run
        yield from _run_events(run, process.pid)
        calls = [call for one in run.collectives for call in _calls(run, one, next(numbers), texts)]
        for arrival, name, args in sorted(calls, key=lambda call: call[0].begin):
            end = arrival.begin if arrival.resumed is None else arrival.resumed
            tid, names = process.lane(arrival.replica, arrival.begin, end)
            yield from names
            yield _slice(name, "collective", process.pid, tid, arrival.begin, end, args)


def _calls(run: Run, collective: Collective, number: int, texts: list[Text]) -> Iterator[tuple[Arrival, str, Event]]:
    """Yield what each replica did in a collective, whose number is the only one in the file."""
    of_all = {
        "collective": number,
        "run": run.number,
        "group": collective.group,
        "number": collective.number,
        "last": collective.last,
        "completed": None if collective.completed is None else _microseconds(collective.completed),
        "error": collective.error,
    }
    for found in collective.arrivals:
        waits = found.awaited is not None and found.resumed is None
        arrival = found._replace(resumed=run.over) if waits else found
        kind, call, at = texts[arrival.text]
        yield (
            arrival,
            kind,
            of_all
            | {
                "awaited": arrival.awaited is not None,
                "replica": arrival.replica,
                "call": call,
                "at": at,
                "bytes": arrival.nbytes,
                "wait_ns": round(collective.wait_of(arrival) * 1e9),
                "ahead_ns": round((arrival.begin - arrival.issued) * 1e9),
            },
        )


class _Process:
    """The lanes of one run's replicas."""

    def __init__(self, pid: int, run: Run) -> None:
        self.pid = pid
        self.run = run  # the last one that has them
        self._busy_until: dict[int, float] = {}

    def fits(self, run: Run) -> bool:
        """Whether a run can have these lanes: the last one that had them is over."""
        last = self.run
        return (last.first, last.devices) == (run.first, run.devices) and last.over <= run.begun

    def names(self) -> Iterator[Event]:
        """Yield the names of the process and its lanes."""
        devices, first = self.run.devices, self.run.first
        yield _metadata("process_name", self.pid, 0, name=f"{len(devices)} replicas")
        yield _metadata("thread_name", self.pid, 0, name="runs")
        for position, device in enumerate(devices):
            name = f"replica {first + position} {device}"
            yield _metadata("thread_name", self.pid, 1 + position, name=name, replica=first + position, device=device)

    def lane(self, replica: int, begin: float, end: float) -> tuple[int, list[Event]]:
        """Return the first of a replica's lanes that is free, and its name where it is new."""
        tid = 1 + replica - self.run.first
        names: list[Event] = []
        while self._busy_until.get(tid, begin) > begin:
            tid += len(self.run.devices)
            if tid not in self._busy_until:
                names = [_metadata("thread_name", self.pid, tid, name=f"replica {replica}, other tasks")]
        self._busy_until[tid] = end
        return tid, names


def _run_events(run: Run, pid: int) -> Iterator[Event]:
    """Yield the slices of a run and of its replicas' functions, and what went wrong."""
    yield _slice(f"run {run.number}: {run.name}", "run", pid, 0, run.begun, run.over, {"run": run.number})
    for replica, function in sorted(run.functions.items()):
        args: Event = {"run": run.number, "replica": replica, "end": function.end, "error": function.error}
        until = run.over if function.ended is None else function.ended
        yield _slice(run.name, "run", pid, 1 + replica - run.first, function.started, until, args)
    if run.report is not None:
        args = {"run": run.number} | run.report
        event = {"ph": "i", "s": "p", "name": args.pop("error"), "cat": "end", "pid": pid, "tid": 0}
        yield event | {"ts": _microseconds(args.pop("at")), "args": args}


def _slice(name: str, category: str, pid: int, tid: int, begin: float, end: float, args: Event) -> Event:
    times = {"ts": _microseconds(begin), "dur": _microseconds(max(0.0, end - begin))}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# Reading.


class Trace(NamedTuple):
    """What is in a trace file: when and by what it was made, the runs, and the texts of their calls."""

    about: dict[str, Any]
    runs: list[Run]
    texts: list[Text]


class _Reader:
    """Reads the events of one file in their order."""

    def __init__(self) -> None:
        self.devices: dict[int, list[str]] = {}  # by pid
        self.first: dict[int, int] = {}
        self.runs: dict[int, Run] = {}
        self.collectives: dict[int, Collective] = {}
        self.texts: dict[Text, int] = {}

    def take(self, found: Event) -> Event | None:
        """Read an event, which is then done with, since there can be millions; return other objects as they are."""
        if "ph" not in found:
            if found.get("aiodist_trace", FORMAT) != FORMAT:
                raise ValueError(f"its version is {found['aiodist_trace']}, and this aiodist reads version {FORMAT}")
            return found
        args, pid, name = found["args"], found["pid"], found["name"]
        begin = found.get("ts", 0.0) / 1e6
        end = begin + found.get("dur", 0.0) / 1e6
        match found["ph"], found.get("cat"):
            case "M", _ if "device" in args:
                self.first.setdefault(pid, args["replica"])
                self.devices.setdefault(pid, []).append(args["device"])
            case "X", "run" if found["tid"] == 0:
                number, name = args["run"], name.partition(": ")[2]
                self.runs[number] = Run(number, name, self.first[pid], self.devices[pid], begin, end, pid=pid)
            case "X", "run":
                function = Function(begin, end, args["end"], args["error"])
                self.runs[args["run"]].functions[args["replica"]] = function
            case "X", "collective":
                self._read_await(name, begin, end, args)
            case "i", "end":
                self.runs[args["run"]].report = args | {"at": begin, "error": name}
        return None

    def _read_await(self, kind: str, begin: float, end: float, args: Event) -> None:
        found = self.collectives.get(args["collective"])
        if found is None:
            completed = None if args["completed"] is None else args["completed"] / 1e6
            found = Collective(args["group"], args["number"], completed, args["error"])
            self.collectives[args["collective"]] = found
            self.runs[args["run"]].collectives.append(found)
        text = self.texts.setdefault((kind, args["call"], args["at"]), len(self.texts))
        times = (begin, end) if args["awaited"] else ()
        found.add(args["replica"], text, args["bytes"], begin - args["ahead_ns"] / 1e9, *times)


def read_trace(path: str | Path) -> Trace:
    """Read a trace file; one that cannot be read raises an OSError, and one that aiodist did not write any other."""
    reader = _Reader()
    about = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=reader.take)["otherData"]
    for run in reader.runs.values():
        run.collectives.sort(key=lambda collective: collective.first)
    return Trace(about, [*reader.runs.values()], [*reader.texts])
