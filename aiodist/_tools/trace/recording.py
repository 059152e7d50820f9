"""The timeline of runs, and the observer that records it while they go on.

All times are in seconds since the trace began, and None is the time of what has not happened. A clock other than the
machine's (trio's, or a test's own) is aligned with the machine's when it is first seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock
from typing import Any, TypeAlias

import numpy as np

from aiodist._core.call import Call, place
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import ObservedRun, Observer
from aiodist._core.ledger import Ledger, Member, Slot
from aiodist._core.terms import ReplicaState
from aiodist._core.text import shown

# The timeline.


@dataclass(slots=True)
class Function:
    """A replica's function: when it was called and returned, how it ended, and a failure of its own."""

    started: float
    ended: float | None = None
    end: str = "running"
    error: str | None = None


@dataclass(eq=False, slots=True)
class Arrival:
    """What one replica did in a collective: what it asked for, and when it called, first awaited, and resumed."""

    replica: int
    text: tuple[str, str, str]  # the kind of collective, the call, and its place
    nbytes: int  # of its input
    issued: float
    awaited: float | None = None
    resumed: float | None = None

    @property
    def begin(self) -> float:
        """When its await began, or its call where nobody awaited it."""
        return self.issued if self.awaited is None else self.awaited


@dataclass(eq=False, slots=True)
class Collective:
    """One collective of a run."""

    group: str | None  # None for that of all replicas
    number: int
    completed: float | None = None
    error: str | None = None  # the type of error that it ended with
    arrivals: dict[int, Arrival] = field(default_factory=dict)  # by replica id

    @property
    def first(self) -> float:
        """When it was first called."""
        return min(arrival.issued for arrival in self.arrivals.values())

    @property
    def last(self) -> int:
        """Which replica came last."""
        return max(self.arrivals.values(), key=lambda arrival: arrival.issued).replica

    @property
    def complete(self) -> float:
        """When it was complete, or else last called."""
        return self.arrivals[self.last].issued if self.completed is None else self.completed

    def wait_of(self, arrival: Arrival) -> float:
        """Return how long a replica waited for the others; an await that was cancelled ended before."""
        if arrival.awaited is None:
            return 0.0
        ends = [at for at in (arrival.resumed, self.completed) if at is not None]
        return max(0.0, min(ends, default=arrival.awaited) - arrival.awaited)


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
    met: dict[Key, Collective] = field(default_factory=dict)

    def now(self) -> float:
        return self.clock() + self.shift


class Recording(Observer):
    """An observer that records every run; see `Observer` for its methods."""

    def __init__(self) -> None:
        self.began = datetime.now(UTC)
        self.runs: list[Run] = []
        self._zero = time.monotonic()
        self._shifts: dict[Callable[[], float], float] = {}
        self._in_progress: dict[Ledger, _RunInProgress] = {}
        self._described: dict[tuple[int, int, int], tuple[Any, tuple[str, str, str], int]] = {}
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
        found = self._in_progress.get(member.group.ledger)
        if found is None or slot.number < 0:  # a group that is being made
            return
        key = _key(slot)
        collective = found.met.get(key)
        if collective is None:
            if key[0] not in found.groups:
                found.groups[key[0]] = slot.group.label()
            number = slot.group.number_of_join() if key[1] is None else slot.number
            collective = found.met[key] = Collective(found.groups[key[0]], number)
            found.run.collectives.append(collective)
        call, code, offset = slot.call, slot.code, slot.offset
        if slot.others is not None and member.position in slot.others:
            call, code, offset, _ = slot.others[member.position]
        _, text, nbytes = self._described.get((id(call), id(code), offset)) or self._describe(call, code, offset)
        if call.kind == "all_gather" or "slices" in call.arrays:
            nbytes = _input_bytes(slot, member)
        now = found.clock() + found.shift
        collective.arrivals[member.replica_id] = Arrival(member.replica_id, text, nbytes, now)

    def _describe(self, call: Call, code: Any, offset: int) -> tuple[Any, tuple[str, str, str], int]:
        """Return what a call is in text, and the bytes of its input; this is done once, for it takes a while."""
        texts = call.kind, str(call), shown(place(code, offset).location)
        kept = call, code  # whose ids are the key
        return self._described.setdefault((id(call), id(code), offset), (kept, texts, _bytes_of(call)))

    def waits(self, member: Member, slot: Slot) -> None:
        found, arrival = self._find(member, slot)
        if found is not None and arrival is not None and arrival.awaited is None:
            arrival.awaited = found.clock() + found.shift

    def resumed(self, member: Member, slot: Slot) -> None:
        found, arrival = self._find(member, slot)
        if found is not None and arrival is not None and arrival.resumed is None:
            arrival.resumed = found.clock() + found.shift

    def _find(self, member: Member, slot: Slot) -> tuple[_RunInProgress | None, Arrival | None]:
        found = self._in_progress.get(slot.group.ledger)
        collective = None if found is None else found.met.get(_key(slot))
        return found, None if collective is None else collective.arrivals.get(member.replica_id)

    def completed(self, slot: Slot) -> None:
        found = self._in_progress.get(slot.group.ledger)
        if found is None:
            return
        key, joined = _key(slot), (slot.group.serial, None)  # a join gets its number
        if slot.call.kind == "join" and key not in found.met and joined in found.met:
            found.met[key] = found.met.pop(joined)
            if slot.error is None:
                found.met[key].number = slot.number
        collective = found.met.get(key)
        if collective is not None:
            collective.completed = found.now()
            collective.error = None if slot.error is None else type(slot.error).__name__


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
