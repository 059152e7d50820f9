"""The timeline of runs, and the observer that records it.

All times are in seconds since the trace began; None stands for what has not happened. An event loop's own clock
(trio's, or the virtual one of a test) is aligned with the machine's when it is first seen.
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

from aiodist._core.call import Call, place
from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import ObservedRun, Observer
from aiodist._core.ledger import Ledger, Member, Slot
from aiodist._core.terms import ReplicaState
from aiodist._core.text import full_place

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
    """One replica in a collective: what it requested, and when it called, first awaited, and resumed."""

    replica: int
    text: int  # the position of its `Text` among those of the trace
    nbytes: int  # of its input
    issued: float
    awaited: float | None = None
    resumed: float | None = None

    @property
    def begin(self) -> float:
        """When its await began, or its call if it was never awaited."""
        return self.issued if self.awaited is None else self.awaited


_WIDTH = len(Arrival._fields)
_ISSUED, _AWAITED, _RESUMED = map(Arrival._fields.index, ("issued", "awaited", "resumed"))


@dataclass(eq=False, slots=True)
class Collective:
    """One collective of a run.

    A trace can have hundreds of thousands of calls, so arrivals are kept as rows of numbers: 48 bytes each, a fifth of
    an object with the same fields.
    """

    group: str | None  # None for the group of all replicas
    number: int
    completed: float | None = None
    error: str | None = None  # the type of the error that it ended with
    _numbers: array[float] = field(default_factory=lambda: array("d"))  # NaN for None

    def add(
        self, replica: int, text: int, nbytes: int, issued: float, awaited: float = math.nan, resumed: float = math.nan
    ) -> int:
        """Add an arrival, and return its position."""
        self._numbers.extend((replica, text, nbytes, issued, awaited, resumed))
        return len(self._numbers) // _WIDTH - 1

    def note(self, position: int, field: int, now: float) -> None:
        """Set a time of an arrival, unless it is set already."""
        if math.isnan(self._numbers[position * _WIDTH + field]):
            self._numbers[position * _WIDTH + field] = now

    @property
    def arrivals(self) -> list[Arrival]:
        """The arrivals, in order."""
        numbers = iter(self._numbers)
        return [
            Arrival(int(replica), int(text), int(nbytes), issued, _time(awaited), _time(resumed))
            for replica, text, nbytes, issued, awaited, resumed in zip(*[numbers] * _WIDTH, strict=True)
        ]

    @property
    def _issued(self) -> array[float]:
        return self._numbers[_ISSUED::_WIDTH]

    @property
    def first(self) -> float:
        """When it was first called."""
        return min(self._issued)

    @property
    def last(self) -> int:
        """The id of the replica that called last."""
        issued = self._issued
        return int(self._numbers[_WIDTH * issued.index(max(issued))])

    @property
    def complete(self) -> float:
        """When it was complete; if it never was, when it was last called."""
        return max(self._issued) if self.completed is None else self.completed

    def wait_of(self, arrival: Arrival) -> float:
        """Return how long a replica waited for the others; a cancelled await ended earlier."""
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
    first: int  # the id of the first replica in this process
    devices: Sequence[str]
    begun: float
    over: float
    functions: dict[int, Function] = field(default_factory=dict)  # by replica id
    collectives: list[Collective] = field(default_factory=list)
    report: dict[str, Any] | None = None  # if its replicas disagreed: at, error, number, suspects, text
    pid: int = 0  # of its lanes in the file


# The observer.

Key: TypeAlias = tuple[int, int | None]  # a group's serial number, and a number in it; a join has none until it matches


class _RunInProgress(NamedTuple):
    run: Run
    now: Callable[[], float]
    open: dict[Key, _Open]


class _Open(NamedTuple):
    """A collective that is incomplete, has failed, or has a result that some replica has not received yet."""

    run: _RunInProgress
    collective: Collective
    positions: dict[int, int]  # of the arrivals that have not resumed, by replica id

    def note(self, member: Member, field: int) -> None:
        position = self.positions.get(member.replica_id)
        if position is not None:
            self.collective.note(position, field, self.run.now())

    def close(self, slot: Slot) -> None:
        """Forget it if nothing can happen to it any more. After a failure, replicas may still arrive."""
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
        self._described: dict[tuple[int, int, int], tuple[Any, int, int | None]] = {}
        self._lock = Lock()  # runs in several threads may begin, and the trace end, at the same time
        self._closed = False

    def run_begun(self, run: ObservedRun, name: str) -> None:
        with self._lock:
            if self._closed:
                return
            clock = run.clock
            shift = self._shifts.setdefault(clock, time.monotonic() - self._zero - clock())
            begun = clock() + shift
            recorded = Run(len(self.runs) + 1, name, run.ledger.replicas[0].id, run.devices, begun, begun)
            self.runs.append(recorded)
            self._in_progress[run.ledger] = _RunInProgress(recorded, lambda: clock() + shift, {})

    def started(self, member: Member) -> None:
        if (found := self._in_progress.get(member.group.ledger)) is not None:
            found.run.functions[member.replica_id] = Function(found.now())

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:
        if (found := self._in_progress.get(run.ledger)) is not None:
            found.run.report = {
                "at": found.now(),
                "error": type(error).__name__,
                "number": error.report.sequence_number,
                "suspects": list(error.report.suspects),
                "text": error.report.text,
            }

    def ended(self, member: Member, end: ReplicaState, error: BaseException | None) -> None:
        found = self._in_progress.get(member.group.ledger)
        if found is not None and member.replica_id in found.run.functions:
            function = found.run.functions[member.replica_id]
            function.ended, function.end = found.now(), str(end)
            function.error = None if error is None else f"{type(error).__name__}: {error}"

    def run_ended(self, run: ObservedRun) -> None:
        if (found := self._in_progress.pop(run.ledger, None)) is not None:
            found.run.over = found.now()

    def close(self) -> None:
        """Stop recording; runs in progress end here."""
        with self._lock:
            self._closed = True
            in_progress, self._in_progress = self._in_progress, {}
        for found in list(in_progress.values()):
            found.run.over = found.now()

    # Collectives.

    def posted(self, member: Member, slot: Slot) -> None:
        found = self._in_progress.get(slot.group.ledger)
        if found is None or slot.number < 0:  # a negative number: the creation of a group
            return
        key = _key(slot)
        opened = found.open.get(key)
        if opened is None:
            number = slot.group.number_of_join() if key[1] is None else slot.number
            opened = found.open[key] = _Open(found, Collective(slot.group.label(), number), {})
            found.run.collectives.append(opened.collective)
        call, code, offset, _ = slot.raw_post_of(member.position)
        described = self._described.get((id(call), id(code), offset)) or self._describe(call, code, offset)
        _, text, nbytes = described
        if nbytes is None:
            nbytes = _input_bytes(slot, member)
        replica = member.replica_id
        opened.positions[replica] = opened.collective.add(replica, text, nbytes, found.now())

    def _describe(self, call: Call, code: Any, offset: int) -> tuple[Any, int, int | None]:
        """Return the position of a call's text, and the bytes of its input, which are slow to find."""
        text = call.kind, str(call), full_place(place(code, offset).location)
        alive = call, code  # so that nothing else gets their ids
        described = alive, self.texts.setdefault(text, len(self.texts)), call.nbytes
        return self._described.setdefault((id(call), id(code), offset), described)

    def waits(self, member: Member, slot: Slot) -> None:
        if (opened := self._find(slot)) is not None:
            opened.note(member, _AWAITED)

    def resumed(self, member: Member, slot: Slot) -> None:
        if (opened := self._find(slot)) is not None:
            opened.note(member, _RESUMED)
            opened.positions.pop(member.replica_id, None)
            opened.close(slot)

    def completed(self, slot: Slot) -> None:
        found = self._in_progress.get(slot.group.ledger)
        joining = slot.group.serial, None
        if found is not None and slot.call.kind == "join" and joining in found.open:
            join = found.open[_key(slot)] = found.open.pop(joining)  # it has a number now
            if slot.error is None:
                join.collective.number = slot.number
        if (opened := self._find(slot)) is not None:
            opened.collective.completed = opened.run.now()
            opened.collective.error = None if slot.error is None else type(slot.error).__name__
            opened.close(slot)

    def _find(self, slot: Slot) -> _Open | None:
        found = self._in_progress.get(slot.group.ledger)
        return None if found is None else found.open.get(_key(slot))


def _key(slot: Slot) -> Key:
    return slot.group.serial, None if slot is slot.group.joining else slot.number


def _input_bytes(slot: Any, member: Member) -> int:
    """Return the bytes of a replica's own input, 0 if they are not known."""
    if not hasattr(slot, "values"):  # a rank of a torch.distributed script
        return 0
    value = slot.values[member.position]
    leaves = value if isinstance(value, list) else [value]
    parts = [part for leaf in leaves for part in ((leaf.values, leaf.indices) if hasattr(leaf, "indices") else (leaf,))]
    return sum(int(getattr(part, "nbytes", 8)) for part in parts)
