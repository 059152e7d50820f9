"""Trace files: how they are written and read back, in the Trace Event format that Perfetto and Chrome understand.

    process (pid)    the replicas of one run; consecutive runs on equal devices share one
      thread 0       the runs
      thread k       its k-th replica: a slice for its function, and within it one for each collective that it awaits
      thread n + k   that replica's awaits that overlap others, from child tasks; and so on

A report is an instant (``i``); names of lanes are metadata (``M``). Times are in microseconds since the trace began, to
the nanosecond.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from aiodist._tools.trace.recording import Arrival, Collective, Function, Recording, Run, Text

Event: TypeAlias = dict[str, Any]

FORMAT = 2  # the version of the fields beyond those of the Trace Event format


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with its links followed, after checking that a file can be written there.

    Raises:
        OSError: its folder does not exist or cannot be written to, or the path is not that of a regular file.
    """
    found = Path(os.path.realpath(path))
    if found.exists() and not found.is_file():
        raise OSError(f"cannot write {found}: it is not a regular file")
    if not os.access(found.parent, os.W_OK):
        raise OSError(f"cannot write {found}: its folder does not exist or cannot be written to")
    return found


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Write a text file that is complete or absent: it is moved to its path once it is complete."""
    final = check_path(path)
    unfinished = final.with_name(f".{final.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(final)
    except OSError as error:
        error.filename = str(final)  # a full disk's error has none
        raise
    finally:
        unfinished.unlink(missing_ok=True)


# Writing.


def write_trace(recording: Recording, path: Path) -> None:
    """Write a closed recording; if that fails, raise an OSError and leave nothing behind."""
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
    """Yield the events of all runs; enclosing slices come first."""
    processes: list[_Process] = []
    numbers, texts = count(1), [*recording.texts]
    for run in sorted(recording.runs, key=lambda run: run.begun):
        process = next((process for process in processes if process.is_free_for(run)), None)
        if process is None:
            process = _Process(len(processes) + 1, run)
            processes.append(process)
            yield from process.names()
        calls = [call for one in run.collectives for call in _calls(run, one, next(numbers), texts)]
        yield from process.events_of(run, calls)


def _calls(
    run: Run, collective: Collective, number: int, texts: Sequence[Text]
) -> Iterator[tuple[Arrival, str, Event]]:
    """Yield each arrival at a collective, with the name and arguments of its slice; `number` is unique in the file."""
    shared = {
        "collective": number,
        "run": run.number,
        "group": collective.group,
        "number": collective.number,
        "last": collective.last,
        "completed": None if collective.completed is None else _microseconds(collective.completed),
        "error": collective.error,
    }
    for arrival in collective.arrivals:
        if arrival.awaited is not None and arrival.resumed is None:
            arrival = arrival._replace(resumed=run.over)  # noqa: PLW2901
        kind, call, at = texts[arrival.text]
        yield arrival, kind, shared | {
            "awaited": arrival.awaited is not None,
            "replica": arrival.replica,
            "call": call,
            "at": at,
            "bytes": arrival.nbytes,
            "wait_ns": round(collective.wait_of(arrival) * 1e9),
            "ahead_ns": round((arrival.begin - arrival.issued) * 1e9),
        }  # fmt: skip


class _Process:
    """The lanes of the replicas of one run, or of several one after the other."""

    def __init__(self, pid: int, run: Run) -> None:
        self._pid = pid
        self._run = run  # the latest
        self._busy_until: dict[int, float] = {}

    def is_free_for(self, run: Run) -> bool:
        """Whether a run can use these lanes: it has the same devices, and the latest run is over."""
        latest = self._run
        return (latest.first, latest.devices) == (run.first, run.devices) and latest.over <= run.begun

    def names(self) -> Iterator[Event]:
        """Yield the names of the process and its lanes."""
        devices, first = self._run.devices, self._run.first
        yield self._name("process_name", 0, name=f"{len(devices)} replicas")
        yield self._name("thread_name", 0, name="runs")
        for position, device in enumerate(devices):
            name = f"replica {first + position} {device}"
            yield self._name("thread_name", 1 + position, name=name, replica=first + position, device=device)

    def events_of(self, run: Run, calls: Sequence[tuple[Arrival, str, Event]]) -> Iterator[Event]:
        """Yield a run, its replicas' functions, the report if there is one, and its collectives."""
        self._run = run
        yield self._slice(f"run {run.number}: {run.name}", "run", 0, run.begun, run.over, {"run": run.number})
        for replica, function in sorted(run.functions.items()):
            args: Event = {"run": run.number, "replica": replica, "end": function.end, "error": function.error}
            ended = run.over if function.ended is None else function.ended
            yield self._slice(run.name, "run", 1 + replica - run.first, function.started, ended, args)
        if run.report is not None:
            args = {"run": run.number} | run.report
            event = {"ph": "i", "s": "p", "name": args.pop("error"), "cat": "end", "pid": self._pid, "tid": 0}
            yield event | {"ts": _microseconds(args.pop("at")), "args": args}
        for arrival, kind, args in sorted(calls, key=lambda call: call[0].begin):
            begin = arrival.begin
            end = begin if arrival.resumed is None else arrival.resumed
            tid = 1 + arrival.replica - run.first
            while self._busy_until.get(tid, begin) > begin:
                tid += len(run.devices)
                if tid not in self._busy_until:
                    yield self._name("thread_name", tid, name=f"replica {arrival.replica}, other tasks")
            self._busy_until[tid] = end
            yield self._slice(kind, "collective", tid, begin, end, args)

    def _slice(self, name: str, category: str, tid: int, begin: float, end: float, args: Event) -> Event:
        times = {"ts": _microseconds(begin), "dur": _microseconds(max(0.0, end - begin))}
        return {"ph": "X", "name": name, "cat": category, "pid": self._pid, "tid": tid, **times, "args": args}

    def _name(self, what: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "args": args}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


# Reading.


class Trace(NamedTuple):
    """The content of a trace file: when and how it was made, the runs, and the texts of their calls."""

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

    def read(self, found: Event) -> Event | None:
        """Read an event and drop it, since there can be millions; return other objects as they are."""
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
        collective = self.collectives.get(args["collective"])
        if collective is None:
            completed = None if args["completed"] is None else args["completed"] / 1e6
            collective = Collective(args["group"], args["number"], completed, args["error"])
            self.collectives[args["collective"]] = collective
            self.runs[args["run"]].collectives.append(collective)
        text = self.texts.setdefault((kind, args["call"], args["at"]), len(self.texts))
        times = (begin, end) if args["awaited"] else ()
        collective.add(args["replica"], text, args["bytes"], begin - args["ahead_ns"] / 1e9, *times)


def read_trace(path: str | Path) -> Trace:
    """Read a trace file.

    Raises:
        OSError: the file cannot be read.
        Exception: aiodist did not write it.
    """
    reader = _Reader()
    about = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=reader.read)["otherData"]
    for run in reader.runs.values():
        run.collectives.sort(key=lambda collective: collective.first)
    return Trace(about, [*reader.runs.values()], [*reader.texts])
