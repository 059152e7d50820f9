"""What a trace records while runs go on: times, and calls as they are.

Nothing is put into text here, since every microsecond spent shows up in the trace itself as somebody's waiting;
`writer` makes the events of a file from it later. Times are in seconds on the clock of the run's event loop, and None
is the time of what has not happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias

from aiodist._core.call import Call
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import ObservedRun, Observer
from aiodist._core.ledger import Ledger, Member, Slot
from aiodist._core.terms import ReplicaState

RawPost: TypeAlias = tuple[Call, Any, int]
"""What a replica asked for, its caller's code, and the offset of the call in it."""
Clock: TypeAlias = Callable[[], float]
Key: TypeAlias = tuple[int, int | None]
"""A group's serial number, and a collective's number there, or None in place of one not known yet, a join's."""

MOST_OPEN = 1024
"""So many collectives of a run stay open; then the oldest complete one is written as one whose handle nobody awaits."""


@dataclass(slots=True)
class Function:
    """A replica's function: when it was called and returned, how it ended, and with what failure of its own."""

    started: float
    ended: float | None = None
    end: str = "running"
    error: BaseException | None = None


class Run:
    """One run: when it began and ended, and its replicas."""

    def __init__(self, number: int, run: ObservedRun, fn: Callable[..., Any], shift: float) -> None:
        self.number = number  # in the trace, from 1
        self.name: str = getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
        self.first = run.ledger.replicas[0].id  # on several workers, of this one's replicas
        self.devices = run.devices
        self.clock = run.clock
        self.shift = shift  # what to add to a time to get the seconds since the trace began
        self.begun = run.clock()
        self.over: float | None = None
        self.functions: dict[int, Function] = {}  # by position in the run's group
        self.report: tuple[float, CollectiveError] | None = None
        self.open: dict[Key, Collective] = {}  # those that are not finished


@dataclass(eq=False, slots=True)
class Arrival:
    """What one replica did in a collective: what it asked for, and when it called, first awaited, and resumed."""

    collective: Collective
    replica: int
    post: RawPost
    nbytes: int | None  # of its input, where the call does not tell them
    issued: float
    awaited: float | None = None
    resumed: float | None = None

    @property
    def begin(self) -> float:
        """When its await began, or its call where nobody awaited it, in seconds since the trace began."""
        return (self.issued if self.awaited is None else self.awaited) + self.collective.run.shift

    @property
    def end(self) -> float:
        """When its await was over, likewise."""
        return self.begin if self.resumed is None else self.resumed + self.collective.run.shift


class Collective:
    """One collective, and the arrivals of its replicas, by position in the group."""

    __slots__ = ("arrivals", "completed", "error", "group", "key", "left", "number", "post", "run", "varies")

    def __init__(self, run: Run, key: Key, slot: Slot) -> None:
        self.run = run
        self.key = key
        self.group = slot.group
        self.number = slot.group.number_of_join() if key[1] is None else slot.number
        self.post: RawPost = slot.call, slot.code, slot.offset  # the first replica's
        self.varies = slot.call.kind == "all_gather" or "slices" in slot.call.arrays  # in size, among replicas
        self.arrivals: dict[int, Arrival] = {}
        self.left = len(slot.group.members)  # so many have yet to resume from it
        self.completed: float | None = None
        self.error: str | None = None  # the type of error that it ended with


def _key(slot: Slot) -> Key:
    return slot.group.serial, None if slot is slot.group.joining else slot.number


def _input_bytes(slot: Any, member: Member) -> int:
    if slot.call.shapes is None:
        return 0
    value = slot.values[member.position]
    return sum(map(_leaf_bytes, value if isinstance(value, list) else [value]))


def _leaf_bytes(leaf: Any) -> int:
    parts = (leaf.values, leaf.indices) if hasattr(leaf, "dense_shape") else (leaf,)
    return sum(int(getattr(part, "nbytes", 8)) for part in parts)


class Recording(Observer):
    """An observer that keeps the times of every run; see `Observer` for its methods.

    Args:
        on_finished: called whenever another collective is finished.
    """

    def __init__(self, on_finished: Callable[[], None]) -> None:
        self.began = time.monotonic()
        self.arrivals = 0
        self._on_finished = on_finished
        self._finished: list[Collective | Run] = []
        self._runs: dict[Ledger, Run] = {}
        self._begun = 0
        self._shifts: dict[Clock, float] = {}
        self._lock = Lock()
        self._closed = False

    # Runs.

    def run_begun(self, run: ObservedRun, fn: Callable[..., Any]) -> None:
        """Begin a run."""
        with self._lock:
            if not self._closed:
                self._begun += 1
                self._runs[run.ledger] = Run(self._begun, run, fn, self._shift_of(run.clock))

    def _shift_of(self, clock: Clock) -> float:
        """Return what to add to that clock's time to get the seconds since the trace began.

        A clock other than the machine's (trio's, or a test's own) is aligned with the machine's when it is first seen.
        """
        if clock not in self._shifts:
            ahead = 0.0 if clock is time.monotonic else clock() - time.monotonic()
            self._shifts[clock] = -ahead - self.began
        return self._shifts[clock]

    def started(self, member: Member) -> None:
        """Note when a replica's function is called."""
        run = self._runs.get(member.group.ledger)
        if run is not None:
            run.functions[member.position] = Function(run.clock())

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:
        """Note the report."""
        found = self._runs.get(run.ledger)
        if found is not None:
            found.report = found.clock(), error

    def ended(self, member: Member, end: ReplicaState, error: BaseException | None) -> None:
        """Note when and how a replica ended."""
        run = self._runs.get(member.group.ledger)
        if run is not None and member.position in run.functions:
            function = run.functions[member.position]
            function.ended, function.end, function.error = run.clock(), str(end), error

    def run_ended(self, run: ObservedRun) -> None:
        """End a run and its collectives."""
        found = self._runs.pop(run.ledger, None)
        if found is not None:
            found.over = found.clock()
            self._end(found)

    # Collectives.

    def posted(self, member: Member, slot: Slot) -> None:
        """Note when a replica called a collective."""
        run = self._runs.get(member.group.ledger)
        if run is None or slot.number < 0:  # a group that is being made
            return
        key = _key(slot)
        found = run.open.get(key)
        if found is None:
            if len(run.open) >= MOST_OPEN:
                oldest = next((found for found in run.open.values() if found.completed is not None), None)
                if oldest is not None:
                    self._finish(oldest)
            found = run.open[key] = Collective(run, key, slot)
        other = None if slot.others is None else slot.others.get(member.position)
        post = found.post if other is None else other[:3]
        nbytes = _input_bytes(slot, member) if found.varies else None
        found.arrivals[member.position] = Arrival(found, member.replica_id, post, nbytes, run.clock())

    def _find(self, member: Member, slot: Slot) -> Arrival | None:
        run = self._runs.get(slot.group.ledger)
        found = None if run is None else run.open.get(_key(slot))
        return None if found is None else found.arrivals.get(member.position)

    def waits(self, member: Member, slot: Slot) -> None:
        """Note when a replica first awaited a collective."""
        arrival = self._find(member, slot)
        if arrival is not None and arrival.awaited is None:
            arrival.awaited = arrival.collective.run.clock()

    def resumed(self, member: Member, slot: Slot) -> None:
        """Note when a replica resumed from a collective; the last one finishes it."""
        arrival = self._find(member, slot)
        if arrival is not None and arrival.resumed is None:
            collective = arrival.collective
            arrival.resumed = collective.run.clock()
            collective.left -= 1
            if not collective.left:
                self._finish(collective)

    def completed(self, slot: Slot) -> None:
        """Note when a collective was complete, and with what error; a join gets its number."""
        run = self._runs.get(slot.group.ledger)
        if run is None:
            return
        key = _key(slot)
        found = run.open.get(key)
        if found is None and slot.call.kind == "join" and (slot.group.serial, None) in run.open:
            found = run.open[key] = run.open.pop((slot.group.serial, None))
            found.key = key
            found.number = slot.number if slot.error is None else found.number
        if found is not None:
            found.completed = run.clock()
            found.error = None if slot.error is None else type(slot.error).__name__

    # The end.

    def _finish(self, found: Collective) -> None:
        with self._lock:
            if found.run.open.pop(found.key, None) is None:
                return
            self._finished.append(found)
            self.arrivals += len(found.arrivals)
        self._on_finished()

    def _end(self, run: Run) -> None:
        for found in list(run.open.values()):
            for arrival in found.arrivals.values():
                if arrival.awaited is not None and arrival.resumed is None:
                    arrival.resumed = run.clock()
            self._finish(found)
        self._finished.append(run)

    def take(self) -> list[Collective | Run]:
        """Return what is finished, in the order in which it was, and forget it."""
        with self._lock:
            finished, self._finished, self.arrivals = self._finished, [], 0
        return finished

    def close(self) -> None:
        """Record nothing more; what still goes on is left as it is."""
        with self._lock:
            self._closed = True
            runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            self._end(run)
