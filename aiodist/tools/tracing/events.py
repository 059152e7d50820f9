"""The events of a trace file, in the Trace Event format that Perfetto and Chrome read.

    process (pid)    replicas that run in step; runs on equal devices share one where they follow each other
      thread 0       the runs
      thread k       its k-th replica: a slice for its function, and inside it one for each collective that it awaits
      thread n + k   awaits of that replica that overlap others of its, from child tasks; and so on

A collective is a flow (``s``, ``t``, ``f``) through the slices of all replicas that awaited it, in the order in which
they came. A verdict, and a replica's end other than by returning, are instants (``i``); names of lanes are metadata
(``M``). Times are in microseconds since the trace began, to the nanosecond.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from aiodist.tools.tracing.recording import Call, Collective, Run, came
from aiodist.tools.tracing.texts import Wording

if TYPE_CHECKING:
    from aiodist._core.errors import CollectiveError

_RUN, _REPLICA, _AWAIT, _FLOW, _INSTANT = range(5)
_Event = tuple[float, int, str]
"""An event as a line, and before it its place in the file: by time, what encloses others first."""
_Await = tuple[float, int, int, float, "_Shared"]
"""A replica's await of a collective: its begin, the flow, the position in the group, its end, what all share."""


class _Shared:
    """What the awaits of one collective have in common."""

    def __init__(self, collective: Collective, flow: int, process: _Process, wording: Wording) -> None:
        self.collective = collective
        self.process = process
        self.flow = flow
        self.left = 0
        self.begun = False
        self._wording = wording
        times = [moment if came(moment) else -1.0 for moment in collective.issued]
        last = collective.replicas[times.index(max(times))]
        self._tail = f',"run":{collective.run.number},"number":{collective.number},"last":{last}'
        label = collective.run.labels[collective.serial]
        if label is not None:
            self._tail += f',"group":{json.dumps(label)}'
        if collective.error is not None:
            self._tail += f',"error":{json.dumps(collective.error)}'
        elif not came(collective.completed):
            self._tail += ',"incomplete":true'
        self.kind, self._common = self._call(collective.call)

    def _call(self, call: Call) -> tuple[str, str]:
        texts = self._wording.of(call)
        args = f'"collective":{self.flow},"call":{json.dumps(texts.call)},"at":{json.dumps(texts.at)}'
        if self.collective.nbytes is None:
            args += f',"bytes":{texts.nbytes}'
        return texts.kind, args + self._tail

    def awaits(self) -> Iterator[_Await]:
        """Yield the awaits, in microseconds since the trace began; for a handle left alone, its call."""
        collective, shift = self.collective, self.collective.run.shift
        for position, issued in enumerate(collective.issued):
            if came(issued):
                begin = collective.awaited[position] if came(collective.awaited[position]) else issued
                end = collective.resumed[position] if came(collective.resumed[position]) else begin
                self.left += 1
                yield (begin + shift) * 1e6, self.flow, position, (end + shift) * 1e6, self

    def args(self, position: int) -> tuple[str, str]:
        """Return the kind of what a replica asked for, and what is told of its part, as JSON."""
        collective = self.collective
        kind, args = self.kind, self._common
        other = (collective.others or {}).get(collective.replicas[position])
        if other is not None:
            kind, args = self._call(other)
        if collective.nbytes is not None:
            args += f',"bytes":{collective.nbytes.get(position, 0)}'
        awaited = collective.awaited[position]
        if not came(awaited):
            return kind, f'{{{args},"wait_ns":0,"ahead_ns":0,"awaited":false}}'
        until = collective.resumed[position]
        if came(collective.completed):  # which comes after the await of one that was cancelled out of it
            until = min(until, collective.completed) if came(until) else collective.completed
        wait, ahead = max(0.0, until - awaited), max(0.0, awaited - collective.issued[position])
        return kind, f'{{{args},"wait_ns":{wait * 1e9:.0f},"ahead_ns":{ahead * 1e9:.0f}}}'

    def phase(self) -> str:
        """Return the phase of the flow's next event; empty where there is nothing to link."""
        self.left -= 1
        if self.begun:
            return "t" if self.left else "f"
        self.begun = True
        return "s" if self.left else ""


class _Process:
    """The lanes of replicas that run in step."""

    def __init__(self, pid: int, run: Run) -> None:
        self.pid = pid
        self.first = run.first
        self.devices = run.devices
        self.run = run
        self._busy: dict[int, float] = {}

    def fits(self, run: Run) -> bool:
        """Whether a run can have these lanes: the one that had them is over."""
        last = self.run
        same = (self.first, self.devices) == (run.first, run.devices)
        return same and came(last.over) and last.over + last.shift <= run.begun + run.shift

    def names(self) -> Iterator[str]:
        """Yield what names the process and its lanes."""
        yield _named("process_name", self.pid, 0, name=f"{len(self.devices)} replicas")
        yield _named("process_sort_index", self.pid, 0, sort_index=self.pid)
        yield from self._lane(0, "runs")
        for position, device in enumerate(self.devices):
            yield from self._lane(1 + position, f"replica {self.first + position} {device}")

    def _lane(self, tid: int, name: str) -> Iterator[str]:
        size = len(self.devices)
        layer, replica = divmod(tid - 1, size)
        yield _named("thread_name", self.pid, tid, name=name)
        yield _named("thread_sort_index", self.pid, tid, sort_index=1 + replica * 1000 + layer if tid else 0)

    def lane(self, replica_id: int, begin: float, end: float, names: list[str]) -> int:
        """Return the first of a replica's lanes that is free, naming it if it is new."""
        tid = 1 + replica_id - self.first
        while self._busy.get(tid, begin) > begin:
            tid += len(self.devices)
            if tid not in self._busy:
                names.extend(self._lane(tid, f"replica {replica_id}, other tasks"))
        self._busy[tid] = end
        return tid


class EventWriter:
    """Turns what was recorded into events, as lines of JSON without the commas between them."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._process_of: dict[Run, _Process] = {}
        self._wording = Wording()
        self._flows = count(1)

    def lines(self, done: Sequence[Collective | Run]) -> Iterator[str]:
        """Yield the events of what is done with, ordered by time; names of new lanes come before."""
        names: list[str] = []
        runs = {item if isinstance(item, Run) else item.run: None for item in done}
        for run in sorted(runs, key=lambda run: run.begun + run.shift):
            names += self._settle(run)
        events: list[_Event] = []
        awaits: list[_Await] = []
        for item in done:
            if isinstance(item, Run):
                events += _run_events(item, self._process_of[item].pid)
            else:
                awaits += _Shared(item, next(self._flows), self._process_of[item.run], self._wording).awaits()
        awaits.sort(key=itemgetter(0, 1, 2))
        for found in awaits:
            events += _await_events(found, names)
        for item in done:
            if isinstance(item, Run):  # the last that comes of a run
                del self._process_of[item]
        events.sort(key=itemgetter(0, 1))
        yield from names
        for _, _, line in events:
            yield line

    def _settle(self, run: Run) -> Iterator[str]:
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


def _await_events(found: _Await, names: list[str]) -> Iterator[_Event]:
    """Yield a slice for an await and, where several replicas await the collective, the flow through it."""
    begin, flow, position, end, shared = found
    process = shared.process
    tid = process.lane(shared.collective.replicas[position], begin, end, names)
    kind, args = shared.args(position)
    head = f'"name":"{kind}","cat":"collective","pid":{process.pid},"tid":{tid},"ts":{begin:.3f}'
    yield begin, _AWAIT, f'{{"ph":"X",{head},"dur":{end - begin:.3f},"args":{args}}}'
    phase = shared.phase()
    if phase:
        bind = ',"bp":"e"' if phase == "f" else ""
        yield begin, _FLOW, f'{{"ph":"{phase}",{head},"id":{flow}{bind}}}'


def _run_events(run: Run, pid: int) -> Iterator[_Event]:
    """Yield the slices of a run and of its replicas' functions, and what went wrong."""
    over = run.over if came(run.over) else run.clock()
    yield _slice(run, pid, 0, (run.begun, over), _RUN, f"run {run.number}: {run.name}", {"run": run.number})
    for position, started in enumerate(run.started):
        ended = run.ended[position]
        state, error = run.ends.get(position, ("running", None))
        if came(started):
            args: dict[str, Any] = {"run": run.number, "end": state}
            if error is not None:
                args["error"] = f"{type(error).__name__}: {error}"
            until = ended if came(ended) else over
            yield _slice(run, pid, 1 + position, (started, until), _REPLICA, run.name, args)
            if state != "exited":
                yield _instant(run, pid, 1 + position, until, state, "t", args)
    if run.verdict is not None:
        yield _verdict(run, pid, *run.verdict)


def _verdict(run: Run, pid: int, at: float, verdict: CollectiveError) -> _Event:
    report = verdict.report
    args = {
        "run": run.number,
        "reason": report.reason,
        "number": report.sequence_number,
        "suspects": report.suspects,
        "text": str(report),
    }
    return _instant(run, pid, 0, at, type(verdict).__name__, "p", args)


def _slice(
    run: Run, pid: int, tid: int, span: tuple[float, float], rank: int, name: str, args: dict[str, Any]
) -> _Event:
    begin, end = ((moment + run.shift) * 1e6 for moment in span)
    event = {"ph": "X", "name": name, "cat": "run", "pid": pid, "tid": tid}
    return begin, rank, _json(event, f'"ts":{begin:.3f},"dur":{max(0.0, end - begin):.3f}', args)


def _instant(run: Run, pid: int, tid: int, at: float, name: str, scope: str, args: dict[str, Any]) -> _Event:
    ts = (at + run.shift) * 1e6
    event = {"ph": "i", "s": scope, "name": name, "cat": "end", "pid": pid, "tid": tid}
    return ts, _INSTANT, _json(event, f'"ts":{ts:.3f}', args)


def _json(event: dict[str, Any], times: str, args: dict[str, Any]) -> str:
    return f'{_compact(event)[:-1]},{times},"args":{_compact(args)}}}'


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _named(what: str, pid: int, tid: int, **args: Any) -> str:
    return _compact({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})
