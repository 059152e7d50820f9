"""What a trace records while runs go on: times, as numbers in arrays, and calls as they are.

Nothing is put into text here, since every microsecond spent shows up in the trace itself as somebody's waiting: an
arrival costs three numbers of eight bytes. `writer` makes the events of a file from it later.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, TypeAlias

from aiodist._core.call import Call
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import ObservedRun, Observer
from aiodist._core.ledger import Ledger, Member, Slot
from aiodist._core.report import ReplicaState

RawPost: TypeAlias = tuple[Call, Any, int]
Clock: TypeAlias = Callable[[], float]

NEVER = float("nan")
"""The time of what has not happened."""
MOST_OPEN = 1024
"""So many collectives of a run stay open; then the oldest complete one is written as one whose handle nobody awaits."""


def times(count: int) -> array[float]:
    """Return that many times of what has not happened."""
    return array("d", (NEVER,)) * count


def happened(at: float) -> bool:
    """Whether this is a time at all."""
    return at == at  # noqa: PLR0124  (NEVER differs from itself)


class Run:
    """One run: when it began and ended, and its replicas. Times are in seconds on its own clock.

    Attributes:
        number: its number in the trace, from 1.
        name: the name of the replicas' function.
        first: the id of its first replica: on several workers, of the first of this process.
        devices: the replicas' devices.
        clock: the clock of its event loop.
        shift: what to add to a time to get the seconds since the trace began.
        begun, over: when it began and ended.
        started, ended: by position in the run's group, when a replica's function was called and returned.
        ends: by position, how it ended, and with what failure of its own.
        report: when the replicas were found to disagree, and the error.
        groups: by serial number, the ids of a group's members, and its name in reports.
        open: collectives that are not finished, by their keys.
    """

    def __init__(self, number: int, run: ObservedRun, fn: Callable[..., Any], shift: float) -> None:
        self.number = number
        self.name: str = getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
        self.first = run.ledger.replicas[0].id
        self.devices = run.devices
        self.clock = run.clock
        self.shift = shift
        self.begun = run.clock()
        self.over = NEVER
        self.started = times(len(self.devices))
        self.ended = times(len(self.devices))
        self.ends: dict[int, tuple[str, BaseException | None]] = {}
        self.report: tuple[float, CollectiveError] | None = None
        self.groups: dict[int, tuple[Sequence[int], str | None]] = {}
        self.open: dict[tuple[int, int | None], Collective] = {}


class Collective:
    """One collective: which replica did what, and when.

    Attributes:
        run, number: its run, and its number in its group.
        key: the group's serial number and that number, or None in place of one that is not known yet, a join's.
        replicas, group: by position in the group, the members' ids; and the group's name.
        post: what the first replica asked for, its caller's code, and the offset of the call in it.
        others: by position, those that are not literally the first one's.
        issued, awaited, resumed: by position, when it was called, first awaited, and that await over.
        completed: when it was complete.
        error: the type of error that it ended with.
        nbytes: by position, the bytes of the input, where the call does not tell.
        left: how many replicas have yet to resume from it.
    """

    __slots__ = (
        "awaited", "completed", "error", "group", "issued", "key", "left", "nbytes", "number", "others", "post",
        "replicas", "resumed", "run",
    )  # fmt: skip

    def __init__(self, run: Run, key: tuple[int, int | None], slot: Slot) -> None:
        self.run = run
        self.key = key
        self.number = slot.group.number_of_join() if key[1] is None else slot.number
        if key[0] not in run.groups:
            run.groups[key[0]] = [member.replica_id for member in slot.group.members], slot.group.label()
        self.replicas, self.group = run.groups[key[0]]
        self.post: RawPost = slot.call, slot.code, slot.offset
        self.others: dict[int, RawPost] = {}
        self.left = len(self.replicas)
        self.issued, self.awaited, self.resumed = (times(self.left) for _ in range(3))
        self.completed = NEVER
        self.error: str | None = None
        varies = slot.call.kind == "all_gather" or "slices" in slot.call.arrays
        self.nbytes: dict[int, int] | None = {} if varies else None


def _key(slot: Slot) -> tuple[int, int | None]:
    group = slot.group
    return group.serial, None if slot is group.joining else slot.number


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
            run.started[member.position] = run.clock()

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:
        """Note the report."""
        found = self._runs.get(run.ledger)
        if found is not None:
            found.report = found.clock(), error

    def ended(self, member: Member, end: ReplicaState, error: BaseException | None) -> None:
        """Note when and how a replica ended."""
        run = self._runs.get(member.group.ledger)
        if run is not None:
            run.ended[member.position] = run.clock()
            run.ends[member.position] = str(end), error

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
                oldest = next((found for found in run.open.values() if happened(found.completed)), None)
                if oldest is not None:
                    self._finish(oldest)
            found = run.open[key] = Collective(run, key, slot)
        found.issued[member.position] = run.clock()
        if found.nbytes is not None:
            found.nbytes[member.position] = _input_bytes(slot, member)

    def _find(self, slot: Slot) -> Collective | None:
        run = self._runs.get(slot.group.ledger)
        return None if run is None else run.open.get(_key(slot))

    def waits(self, member: Member, slot: Slot) -> None:
        """Note when a replica first awaited a collective."""
        found = self._find(slot)
        if found is not None and not happened(found.awaited[member.position]):
            found.awaited[member.position] = found.run.clock()

    def resumed(self, member: Member, slot: Slot) -> None:
        """Note when a replica resumed from a collective; the last one finishes it."""
        found = self._find(slot)
        if found is not None and not happened(found.resumed[member.position]):
            found.resumed[member.position] = found.run.clock()
            found.left -= 1
            if not found.left:
                self._finish(found)

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
            found.others = {position: other[:3] for position, other in (slot.others or {}).items()}
            found.error = None if slot.error is None else type(slot.error).__name__

    # The end.

    def _finish(self, found: Collective) -> None:
        with self._lock:
            if found.run.open.pop(found.key, None) is None:
                return
            self._finished.append(found)
            self.arrivals += len(found.replicas)
        self._on_finished()

    def _end(self, run: Run) -> None:
        for found in list(run.open.values()):
            for position, awaited in enumerate(found.awaited):
                if happened(awaited) and not happened(found.resumed[position]):
                    found.resumed[position] = run.clock()
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
