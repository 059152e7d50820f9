"""The timeline of runs, and the observer that records it while they go on.

All times are in seconds since the trace began, and None is the time of what has not happened. A clock other than the
machine's (trio's, or a test's own) is aligned with the machine's when it is first seen.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aiodist._core.call import Call, place
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import ObservedRun, Observer
from aiodist._core.ledger import Ledger, Member, Slot
from aiodist._core.terms import ReplicaState
from aiodist._core.text import shown

# The timeline.

Text: TypeAlias = tuple[str, str, str]
"""The kind of a collective, the call, and its place."""


@dataclass(slots=True)
class Function:
    """A replica's function: when it was called and returned, how it ended, and a failure of its own."""

    started: float
    ended: float | None = None
    end: str = "running"
    error: str | None = None


class Arrival(NamedTuple):
    """What one replica did in a collective: what it asked for, and when it called, first awaited, and resumed."""

    replica: int
    text: int  # the position of its `Text` among those of the trace
    nbytes: int  # of its input
    issued: float
    awaited: float | None = None
    resumed: float | None = None

    @property
    def begin(self) -> float:
        """When its await began, or its call where nobody awaited it."""
        return self.issued if self.awaited is None else self.awaited


_WIDTH = len(Arrival._fields)
_ISSUED, _AWAITED, _RESUMED = map(Arrival._fields.index, ("issued", "awaited", "resumed"))


@dataclass(eq=False, slots=True)
class Collective:
    """One collective of a run.

    A trace has a hundred thousand calls and more. So the arrivals are kept as numbers, one after the other: 48 bytes
    each, a fifth of what an object with the same fields takes.
    """

    group: str | None  # None for that of all replicas
    number: int
    completed: float | None = None
    error: str | None = None  # the type of error that it ended with
    _numbers: array[float] = field(default_factory=lambda: array("d"))  # NaN for None

    def add(
        self, replica: int, text: int, nbytes: int, issued: float, awaited: float = math.nan, resumed: float = math.nan
    ) -> int:
        """Add an arrival, and return its position."""
        self._numbers.extend((replica, text, nbytes, issued, awaited, resumed))
        return len(self._numbers) // _WIDTH - 1

    def note(self, position: int, field: int, now: float) -> None:
        """Note the time of something, unless it has happened before."""
        if math.isnan(self._numbers[position * _WIDTH + field]):
            self._numbers[position * _WIDTH + field] = now

    @property
    def arrivals(self) -> list[Arrival]:
        """What the replicas did, in the order in which they came."""
        numbers = iter(self._numbers)
        return [
            Arrival(int(replica), int(text), int(nbytes), issued, _time(awaited), _time(resumed))
            for replica, text, nbytes, issued, awaited, resumed in zip(*[numbers] * _WIDTH, strict=True)
        ]

    @property
    def first(self) -> float:
        """When it was first called."""
        return min(self._numbers[_ISSUED::_WIDTH])

    @property
    def last(self) -> int:
        """Which replica came last."""
        issued = self._numbers[_ISSUED::_WIDTH]
        return int(self._numbers[_WIDTH * issued.index(max(issued))])

    @property
    def complete(self) -> float:
        """When it was complete, or else last called."""
        return max(self._numbers[_ISSUED::_WIDTH]) if self.completed is None else self.completed

    def wait_of(self, arrival: Arrival) -> float:
        """Return how long a replica waited for the others; an await that was cancelled ended before."""
        if arrival.awaited is None:
            return 0.0
        ends = [at for at in (arrival.resumed, self.completed) if at is not None]
        return max(0.0, min(ends, default=arrival.awaited) - arrival.awaited)


def _time(number: float) -> float | None:
    return None if math.isnan(number) else number


@dataclass(eq=False, slots=True)
class Run:
    """One run of a function on replicas."""

    number: int  # in the trace, from 1
    name: str  # of the function
    first: int  # the id of the first of its replicas that this process runs
    devices: Sequence[str]
    begun: float
    over: float
    functions: dict[int, Function] = field(default_factory=dict)  # by replica id
    collectives: list[Collective] = field(default_factory=list)
    report: dict[str, Any] | None = None  # if its replicas disagreed: at, error, number, suspects, text
    pid: int = 0  # of its lanes in the file


# Recording it.

Key: TypeAlias = tuple[int, int | None]  # a group's serial number, and a number in it; a join has none at first


@dataclass(eq=False, slots=True)
class _RunInProgress:
    run: Run
    clock: Callable[[], float]
    shift: float  # what to add to the clock's time to get the seconds since the trace began
    groups: dict[int, str | None] = field(default_factory=dict)  # what each is called, by its serial number
    open: dict[Key, _Open] = field(default_factory=dict)

    def now(self) -> float:
        return self.clock() + self.shift


class _Open(NamedTuple):
    """A collective that goes on, that has failed, or whose result a replica has not got yet."""

    run: _RunInProgress
    collective: Collective
    positions: dict[int, int]  # of the arrivals that have not resumed, by replica id

    def note(self, member: Member, field: int) -> None:
        position = self.positions.get(member.replica_id)
        if position is not None:
            self.collective.note(position, field, self.run.now())

    def close(self, slot: Slot) -> None:
        """Forget it if nothing more is to come of it; to one that has failed replicas may come late."""
        if not self.positions and self.collective.completed is not None and self.collective.error is None:
            self.run.open.pop(_key(slot), None)


class Recording(Observer):
    """An observer that records every run; see `Observer` for its methods."""

    def __init__(self) -> None:
        self.began = datetime.now(UTC)
        self.runs: list[Run] = []
        self.texts: dict[Text, int] = {}  # with their positions
        self._zero = time.monotonic()
        self._shifts: dict[Callable[[], float], float] = {}
        self._in_progress: dict[Ledger, _RunInProgress] = {}
        self._described: dict[tuple[int, int, int], tuple[Any, int, int]] = {}
        self._lock = Lock()  # runs of several threads may begin, and the trace end, at once
        self._closed = False

    def run_begun(self, run: ObservedRun, fn: Callable[..., Any]) -> None:
        with self._lock:
            if self._closed:
                return
            shift = self._shifts.setdefault(run.clock, time.monotonic() - self._zero - run.clock())
            name: str = getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
            begun = run.clock() + shift
            begins = Run(len(self.runs) + 1, name, run.ledger.replicas[0].id, run.devices, begun, begun)
            self.runs.append(begins)
            self._in_progress[run.ledger] = _RunInProgress(begins, run.clock, shift)

    def started(self, member: Member) -> None:
        found = self._in_progress.get(member.group.ledger)
        if found is not None:
            found.run.functions[member.replica_id] = Function(found.now())

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:
        found = self._in_progress.get(run.ledger)
        if found is not None:
            found.run.report = {
                "at": found.now(),
                "error": type(error).__name__,
                "number": error.report.sequence_number,
                "suspects": list(error.report.suspects),
                "text": error.report.text,
            }

    def ended(self, member: Member, end: ReplicaState, error: BaseException | None) -> None:
        found = self._in_progress.get(member.group.ledger)
        function = None if found is None else found.run.functions.get(member.replica_id)
        if found is not None and function is not None:
            function.ended, function.end = found.now(), str(end)
            function.error = None if error is None else f"{type(error).__name__}: {error}"

    def run_ended(self, run: ObservedRun) -> None:
        found = self._in_progress.pop(run.ledger, None)
        if found is not None:
            found.run.over = found.now()

    def close(self) -> None:
        """Record nothing more; what still goes on ends here."""
        with self._lock:
            self._closed = True
            in_progress, self._in_progress = self._in_progress, {}
        for found in list(in_progress.values()):
            found.run.over = found.now()

    # Collectives.

    def posted(self, member: Member, slot: Slot) -> None:
        found = self._in_progress.get(slot.group.ledger)
        if found is None or slot.number < 0:  # a group that is being made
            return
        key = _key(slot)
        opened = found.open.get(key)
        if opened is None:
            if key[0] not in found.groups:
                found.groups[key[0]] = slot.group.label()
            number = slot.group.number_of_join() if key[1] is None else slot.number
            opened = found.open[key] = _Open(found, Collective(found.groups[key[0]], number), {})
            found.run.collectives.append(opened.collective)
        call, code, offset, _ = slot.raw_post_of(member.position)
        _, text, nbytes = self._described.get((id(call), id(code), offset)) or self._describe(call, code, offset)
        if call.kind == "all_gather" or "slices" in call.arrays:
            nbytes = _input_bytes(slot, member)
        replica = member.replica_id
        opened.positions[replica] = opened.collective.add(replica, text, nbytes, found.now())

    def _describe(self, call: Call, code: Any, offset: int) -> tuple[Any, int, int]:
        """Return the position of a call's text, and the bytes of its input; this is done once, for it takes a while."""
        text = call.kind, str(call), shown(place(code, offset).location)
        kept = call, code  # whose ids are the key
        found = kept, self.texts.setdefault(text, len(self.texts)), _bytes_of(call)
        return self._described.setdefault((id(call), id(code), offset), found)

    def waits(self, member: Member, slot: Slot) -> None:
        opened = self._find(slot)
        if opened is not None:
            opened.note(member, _AWAITED)

    def resumed(self, member: Member, slot: Slot) -> None:
        opened = self._find(slot)
        if opened is not None:
            opened.note(member, _RESUMED)
            opened.positions.pop(member.replica_id, None)
            opened.close(slot)

    def completed(self, slot: Slot) -> None:
        found = self._in_progress.get(slot.group.ledger)
        joined = slot.group.serial, None
        if found is not None and slot.call.kind == "join" and joined in found.open:
            join = found.open[_key(slot)] = found.open.pop(joined)  # now it has a number
            if slot.error is None:
                join.collective.number = slot.number
        opened = self._find(slot)
        if opened is not None:
            opened.collective.completed = opened.run.now()
            opened.collective.error = None if slot.error is None else type(slot.error).__name__
            opened.close(slot)

    def _find(self, slot: Slot) -> _Open | None:
        found = self._in_progress.get(slot.group.ledger)
        return None if found is None else found.open.get(_key(slot))


def _key(slot: Slot) -> Key:
    return slot.group.serial, None if slot is slot.group.joining else slot.number


def _bytes_of(call: Call) -> int:
    """Return the bytes of the leaves; those whose size the call does not tell count as none."""
    leaves = ((shape, np.dtype(dtype)) for shape, dtype, _ in call.leaves)
    return sum(dtype.itemsize * math.prod(size or 0 for size in shape) for shape, dtype in leaves)


def _input_bytes(slot: Any, member: Member) -> int:
    """Return the bytes of a replica's input where they may differ among replicas."""
    value = slot.values[member.position]
    leaves = value if isinstance(value, list) else [value]
    parts = [part for leaf in leaves for part in ((leaf.values, leaf.indices) if hasattr(leaf, "indices") else (leaf,))]
    return sum(int(getattr(part, "nbytes", 8)) for part in parts)
