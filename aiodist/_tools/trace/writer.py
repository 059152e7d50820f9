"""Writing a trace to a file, in the Trace Event format that Perfetto and Chrome read.

    process (pid)    replicas of one run; consecutive runs on equal devices share one
      thread 0       the runs
      thread k       its k-th replica: a slice for its function, and inside it one for each collective that it awaits
      thread n + k   that replica's awaits that overlap others of its, from child tasks; and so on

A collective is a flow (``s``, ``t``, ``f``) through the slices of all replicas that awaited it, in the order of their
awaits. A report, and a replica's end other than by returning, are instants (``i``); names of lanes are metadata
(``M``). Times are in microseconds since the trace began, to the nanosecond.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from aiodist._core.call import Call, place
from aiodist._core.text import shown
from aiodist._tools.trace.recording import Arrival, Collective, RawPost, Recording, Run

if TYPE_CHECKING:
    from types import TracebackType

FORMAT = 1
"""The version of what a trace file tells beyond the Trace Event format."""
KEPT_ARRIVALS = 200_000
"""So many arrivals are kept before they are written out, which takes a second or two."""

_PYTHON_NUMBERS = {"int": 8, "float": 8, "complex": 16, "bool": 1}


class AtomicFile:
    """A text file that is complete or absent: written under another name, and moved to its path when it is complete.

    As a context manager it is committed at the end of the block, and discarded where that raises.

    Args:
        path: where it will be; a symbolic link is followed. What is there stays until it is committed.

    Raises:
        OSError: its folder does not exist or cannot be written to, or something other than a file is in its place; at
            the end of the block: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        if self.path.exists() and not self.path.is_file():
            raise OSError(f"cannot write {self.path}: it is not a regular file")
        self._unfinished = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.unfinished")
        try:
            descriptor = os.open(self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise type(error)(error.errno, f"cannot write {self.path}: {error.strerror}") from None
        self._file: IO[str] = open(descriptor, "w", encoding="utf-8", buffering=1 << 20, newline="\n")  # noqa: PTH123, SIM115
        self.write = self._file.write
        self.flush = self._file.flush

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._unfinished.replace(self.path)
        finally:  # leaves nothing behind
            with suppress(OSError):  # what is in the buffer may still not fit on the disk
                self._file.close()
            with suppress(OSError):
                self._unfinished.unlink(missing_ok=True)


class Tracer:
    """A recording, and the file to which it is written as runs go on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.recording = Recording(self._write_out_if_full)
        self._file = AtomicFile(path)
        self._events = EventWriter()
        self._lock = Lock()
        self._problem: OSError | None = None
        self._separator = "\n"
        about = {
            "aiodist_trace": FORMAT,
            "began": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "python": sys.version.partition(" ")[0],
            "command": " ".join(sys.argv),
        }
        self._file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[')
        self._file.flush()  # or a fork of the process would write it once more

    def _write_out_if_full(self) -> None:
        if self.recording.arrivals >= KEPT_ARRIVALS and self._problem is None:
            try:
                self._write_out()
            except OSError as problem:  # raised when the trace ends: the run is not to blame
                self._problem = problem

    def _write_out(self) -> None:
        with self._lock:
            for line in self._events.lines(self.recording.take()):
                self._file.write(self._separator)
                self._file.write(line)
                self._separator = ",\n"
            self._file.flush()

    def close(self) -> None:
        """Write what is left, and put the file in its place; of one that cannot be written, nothing is left behind."""
        self.recording.close()
        with self._file:
            if self._problem is not None:
                raise self._problem
            self._write_out()
            self._file.write("\n]}\n")


class EventWriter:
    """Turns what was recorded into events, as lines of JSON without the commas between them."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._process_of: dict[Run, _Process] = {}
        self._described: dict[tuple[int, int, int], tuple[RawPost, str, int]] = {}
        self._numbers = count(1)

    def lines(self, finished: Sequence[Collective | Run]) -> Iterator[str]:
        """Yield the events of what is finished.

        What encloses others comes first: names of lanes, runs, replicas' functions, and then awaits in their order.
        """
        begun = {item if isinstance(item, Run) else item.run: None for item in finished}
        for run in sorted(begun, key=lambda run: run.begun + run.shift):
            yield from self._assign_process(run)
        ended = [item for item in finished if isinstance(item, Run)]
        for run in ended:
            yield from _run_events(run, self._process_of[run].pid)
        collectives = [item for item in finished if isinstance(item, Collective)]
        numbers = {item: next(self._numbers) for item in collectives}
        common = {item: _common(item, numbers[item]) for item in collectives}
        left = {item: len(item.arrivals) for item in collectives}
        arrivals = [arrival for item in collectives for arrival in item.arrivals.values()]
        for arrival in sorted(arrivals, key=attrgetter("begin")):
            item = arrival.collective
            yield from self._await_events(arrival, numbers[item], common[item], left[item])
            left[item] -= 1
        for run in ended:  # nothing more comes of it
            del self._process_of[run]

    def _assign_process(self, run: Run) -> Iterator[str]:
        """Give a run its process, and yield the names of new lanes."""
        if run in self._process_of:
            return
        process = next((process for process in self._processes if process.fits(run)), None)
        if process is None:
            process = _Process(len(self._processes) + 1, run)
            self._processes.append(process)
            yield from process.names()
        process.run = run
        self._process_of[run] = process

    def _await_events(self, arrival: Arrival, number: int, common: str, left: int) -> Iterator[str]:
        """Yield a slice for an await and, where several replicas await the collective, the flow through it.

        The collective has a number in the file, and fields that are the same in all its awaits, of which some are left.
        """
        process = self._process_of[arrival.collective.run]
        begin, end = arrival.begin * 1e6, arrival.end * 1e6
        tid, names = process.lane(arrival.replica, begin, end)
        yield from names
        call_and_place, nbytes = self._describe(arrival.post)
        if arrival.nbytes is not None:
            nbytes = arrival.nbytes
        args = f'{common},{call_and_place},"bytes":{nbytes},{_waited(arrival)}'
        head = f'"name":"{arrival.post[0].kind}","cat":"collective","pid":{process.pid},"tid":{tid},"ts":{begin:.3f}'
        yield f'{{"ph":"X",{head},"dur":{end - begin:.3f},"args":{{{args}}}}}'
        size = len(arrival.collective.arrivals)
        if left == 1 < size:
            yield f'{{"ph":"f",{head},"id":{number},"bp":"e"}}'
        elif size > 1:
            yield f'{{"ph":"{"s" if left == size else "t"}",{head},"id":{number}}}'

    def _describe(self, post: RawPost) -> tuple[str, int]:
        """Return a call and its place as fields of JSON, and the bytes of its input; each is described only once."""
        call, code, offset = post
        key = id(call), id(code), offset
        found = self._described.get(key)
        if found is None:
            at = json.dumps(shown(place(code, offset).location))
            texts = f'"call":{json.dumps(str(call))},"at":{at}'
            found = self._described[key] = post, texts, _bytes_of(call)  # with the post, whose identity is the key
        return found[1:]


def _bytes_of(call: Call) -> int:
    """Return the bytes of the leaves; those whose size the call does not tell count as none."""
    total = 0
    for shape, dtype, array in call.leaves:
        item = _PYTHON_NUMBERS[dtype] if array == "number" else np.dtype(dtype).itemsize
        total += item * math.prod(size or 0 for size in shape)
    return total


def _common(collective: Collective, number: int) -> str:
    """Return what all awaits of a collective have in common, as fields of JSON."""
    last = max(collective.arrivals.values(), key=attrgetter("issued")).replica
    common = f'"collective":{number},"run":{collective.run.number},"number":{collective.number},"last":{last}'
    group = collective.group.label()
    if group is not None:
        common += f',"group":{json.dumps(group)}'
    if collective.error is not None:
        common += f',"error":{json.dumps(collective.error)}'
    elif collective.completed is None:
        common += ',"incomplete":true'
    return common


def _waited(arrival: Arrival) -> str:
    """Return how long a replica waited for the others, and how long before that it had made the call."""
    awaited, resumed, completed = arrival.awaited, arrival.resumed, arrival.collective.completed
    if awaited is None:
        return '"wait_ns":0,"ahead_ns":0,"awaited":false'
    ends = [at for at in (resumed, completed) if at is not None]  # an await that was cancelled ends before
    wait, ahead = max(0.0, min(ends, default=awaited) - awaited), max(0.0, awaited - arrival.issued)
    return f'"wait_ns":{wait * 1e9:.0f},"ahead_ns":{ahead * 1e9:.0f}'


class _Process:
    """The lanes of one run's replicas."""

    def __init__(self, pid: int, run: Run) -> None:
        self.pid = pid
        self.run = run
        self._first = run.first
        self._devices = run.devices
        self._busy_until: dict[int, float] = {}

    def fits(self, run: Run) -> bool:
        """Whether a run can have these lanes: the last one that had them is over."""
        last = self.run
        same = (self._first, self._devices) == (run.first, run.devices)
        return same and last.over is not None and last.over + last.shift <= run.begun + run.shift

    def names(self) -> Iterator[str]:
        """Yield the names of the process and its lanes."""
        yield _metadata("process_name", self.pid, 0, name=f"{len(self._devices)} replicas")
        yield _metadata("process_sort_index", self.pid, 0, sort_index=self.pid)
        yield from self._name_lane(0, "runs")
        for position, device in enumerate(self._devices):
            yield from self._name_lane(1 + position, f"replica {self._first + position} {device}")

    def _name_lane(self, tid: int, name: str) -> Iterator[str]:
        layer, replica = divmod(tid - 1, len(self._devices))
        yield _metadata("thread_name", self.pid, tid, name=name)
        yield _metadata("thread_sort_index", self.pid, tid, sort_index=1 + replica * 1000 + layer if tid else 0)

    def lane(self, replica_id: int, begin: float, end: float) -> tuple[int, Iterator[str]]:
        """Return the first of a replica's lanes that is free, and its names where it is new."""
        tid = 1 + replica_id - self._first
        names: Iterator[str] = iter(())
        while self._busy_until.get(tid, begin) > begin:
            tid += len(self._devices)
            if tid not in self._busy_until:
                names = self._name_lane(tid, f"replica {replica_id}, other tasks")
        self._busy_until[tid] = end
        return tid, names


def _run_events(run: Run, pid: int) -> Iterator[str]:
    """Yield the slices of a run and of its replicas' functions, and what went wrong."""
    over = run.clock() if run.over is None else run.over
    yield _slice(run, pid, 0, run.begun, over, f"run {run.number}: {run.name}", {"run": run.number})
    for position, function in sorted(run.functions.items()):
        args: dict[str, Any] = {"run": run.number, "end": function.end}
        if function.error is not None:
            args["error"] = f"{type(function.error).__name__}: {function.error}"
        until = over if function.ended is None else function.ended
        yield _slice(run, pid, 1 + position, function.started, until, run.name, args)
        if function.end != "exited":
            yield _instant(run, pid, 1 + position, until, function.end, "t", args)
    if run.report is not None:
        at, error = run.report
        report = error.report
        args = {
            "run": run.number,
            "reason": report.reason,
            "number": report.sequence_number,
            "suspects": report.suspects,
            "text": str(report),
        }
        yield _instant(run, pid, 0, at, type(error).__name__, "p", args)


def _slice(run: Run, pid: int, tid: int, begin: float, end: float, name: str, args: dict[str, Any]) -> str:
    times = {"ts": _microseconds(begin + run.shift), "dur": _microseconds(max(0.0, end - begin))}
    return _compact({"ph": "X", "name": name, "cat": "run", "pid": pid, "tid": tid, **times, "args": args})


def _instant(run: Run, pid: int, tid: int, at: float, name: str, scope: str, args: dict[str, Any]) -> str:
    event = {"ph": "i", "s": scope, "name": name, "cat": "end", "pid": pid, "tid": tid}
    return _compact({**event, "ts": _microseconds(at + run.shift), "args": args})


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata(what: str, pid: int, tid: int, **args: Any) -> str:
    return _compact({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
