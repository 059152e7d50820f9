"""What a trace records while runs go on: moments, as numbers in arrays, and calls as they are.

Nothing is put into words here, for every microsecond spent shows up in the trace itself as somebody's waiting: an
arrival costs three numbers of eight bytes. `events` makes the events of a file out of it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from threading import Lock
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

from aiodist._arrays.leaves import LeafType
from aiodist.collective.joining import number_of_join
from aiodist.collective.member import JOIN
from aiodist.collective.signature import KIND, SHAPES, STRUCTURE, TYPES, Signature

if TYPE_CHECKING:
    from aiodist._core.errors import CollectiveError
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.member import Member
    from aiodist.collective.rendezvous import Rendezvous

Call: TypeAlias = tuple[Signature, CodeType, int]
Clock: TypeAlias = Callable[[], float]

NEVER = float("nan")
"""The moment of what has not happened."""
MOST_OPEN = 1024
"""So many collectives of a run are waited for; then the oldest counts as one whose handle nobody awaits."""


class Run:
    """One run: when it began and ended, and its replicas. Moments are in seconds on its own clock.

    Attributes:
        number: its number in the trace, from 1.
        name: the name of the replicas' function.
        first: the id of its first replica: on several workers, of the first of this process.
        devices: the replicas' devices.
        shift: what to add to a moment to get the seconds since the trace began.
        begun, over: when it began and ended.
        started, ended: by position in the run's group, when a replica's function was called and was over.
        ends: by position, how it ended, and with what failure of its own.
        verdict: when the replicas were found not to meet, and the error.
        members, labels: by its groups' serial numbers, their members' ids, and their names in reports.
        open: by a group's serial number and the number in it, collectives that are not done with.
    """

    def __init__(self, number: int, group: SyncGroup, fn: Callable[..., Any], clock: Clock, shift: float) -> None:
        self.number = number
        self.name: str = getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
        self.first = group.members[0].replica_id
        self.devices = tuple(member.device for member in group.members)
        self.clock = clock
        self.shift = shift
        self.begun = clock()
        self.over = NEVER
        self.started = moments(group.size)
        self.ended = moments(group.size)
        self.ends: dict[int, tuple[str, BaseException | None]] = {}
        self.verdict: tuple[float, CollectiveError] | None = None
        self.members: dict[int, Sequence[int]] = {}
        self.labels: dict[int, str | None] = {}
        self.open: dict[tuple[int, int], Collective] = {}

    def begin(self, group: SyncGroup, meeting: Rendezvous) -> Collective:
        """Return a record for a meeting of one of its groups, which is open from now on."""
        serial = group.serial
        if serial not in self.members:
            self.members[serial] = [member.replica_id for member in group.members]
            self.labels[serial] = group.label
        found = self.open[serial, meeting.number] = Collective(self, serial, meeting)
        if meeting.number == JOIN:
            found.number = number_of_join(group)
        return found


class Collective:
    """One collective: who came when.

    Attributes:
        run, serial, number: its run, its group's serial number there, and its number in the group.
        key: what it is known by among the open ones of the run.
        replicas: by position in the group, the members' ids.
        call: signature, code and offset of the first arrival.
        others: by replica id, those of arrivals that are not literally the first one's.
        issued, awaited, resumed: by position, when it was called for, first awaited, and that await over.
        completed: when it was complete.
        error: what kind of error it ended with.
        nbytes: by position, what was brought, where the signature does not tell.
        left: how many have yet to come back from it.
    """

    __slots__ = (
        "awaited", "call", "completed", "error", "issued", "key", "left", "nbytes", "number", "others", "replicas",
        "resumed", "run", "serial",
    )  # fmt: skip

    def __init__(self, run: Run, serial: int, meeting: Rendezvous) -> None:
        self.run = run
        self.serial = serial
        self.number = meeting.number
        self.key = serial, meeting.number
        self.replicas = replicas = run.members[serial]
        self.call: Call = meeting.signature, meeting.code, meeting.offset
        self.others: dict[int, Call] | None = None
        self.issued = moments(len(replicas))
        self.awaited = moments(len(replicas))
        self.resumed = moments(len(replicas))
        self.completed = NEVER
        self.error: str | None = None
        self.nbytes: dict[int, int] | None = {} if _varies(meeting.signature) else None
        self.left = len(replicas)


def moments(count: int) -> array[float]:
    """Return that many moments that have not come."""
    return array("d", (NEVER,)) * count


def came(moment: float) -> bool:
    """Whether that moment has come."""
    return moment == moment  # noqa: PLR0124  (NEVER differs from itself)


def _varies(signature: Signature) -> bool:
    """Whether replicas may bring different amounts to a collective of that signature."""
    types = signature[TYPES] if isinstance(signature[TYPES], tuple) else (signature[TYPES],)
    return signature[KIND].name == "all_gather" or LeafType.INDEXED_SLICES in types


def _size_brought(meeting: Rendezvous, member: Member) -> int:
    signature, value = meeting.call_of(member.replica_id)[0], meeting.values[member.position]
    if signature[SHAPES] is None:
        return 0
    return sum(map(_size_of, [value] if signature[STRUCTURE] is None else value))


def _size_of(leaf: Any) -> int:
    parts = (leaf.values, leaf.indices) if hasattr(leaf, "dense_shape") else (leaf,)
    return sum(int(getattr(part, "nbytes", 8)) for part in parts)


class Recording:
    """An observer that keeps the moments of every run; see `Observer` for its methods.

    Args:
        fuller: called whenever another collective is done with.
    """

    def __init__(self, fuller: Callable[[], None]) -> None:
        self.began = time.monotonic()
        self.arrivals = 0
        self._fuller = fuller
        self._done: list[Collective | Run] = []
        self._runs: dict[SyncGroup, Run] = {}
        self._begun = 0
        self._shifts: dict[Clock, float] = {}
        self._lock = Lock()
        self._closed = False

    # Runs.

    def run_begun(self, group: SyncGroup, fn: Callable[..., Any]) -> None:
        """Begin a run."""
        with self._lock:
            if not self._closed:
                clock = group.engine.fine_clock
                self._begun += 1
                self._runs[group] = Run(self._begun, group, fn, clock, self._shift_of(clock))

    def _shift_of(self, clock: Clock) -> float:
        """Return what to add to that clock's time to get the seconds since the trace began.

        A clock that is not the machine's (trio's, or a test's own) is set by the machine's where it is first seen.
        """
        if clock not in self._shifts:
            ahead = 0.0 if clock is time.monotonic else clock() - time.monotonic()
            self._shifts[clock] = -ahead - self.began
        return self._shifts[clock]

    def started(self, member: Member) -> None:
        """Note when a replica's function is called."""
        run = self._runs.get(member.group)
        if run is not None:
            run.started[member.position] = run.clock()

    def judged(self, group: SyncGroup, verdict: CollectiveError) -> None:
        """Note the verdict."""
        run = self._runs.get(group)
        if run is not None:
            run.verdict = run.clock(), verdict

    def ended(self, member: Member, error: BaseException | None) -> None:
        """Note when and how a replica ended."""
        run = self._runs.get(member.group)
        if run is not None:
            run.ended[member.position] = run.clock()
            run.ends[member.position] = str(member.end), error

    def run_ended(self, group: SyncGroup) -> None:
        """End a run; its collectives are done with."""
        run = self._runs.pop(group, None)
        if run is not None:
            run.over = run.clock()
            self._end(run)

    # Collectives.

    def arrived(self, member: Member, meeting: Rendezvous) -> None:
        """Note when a replica called for a collective."""
        group = member.group
        run = self._runs.get(group.root)
        if run is None or meeting.number < 0:  # a group in the making
            return
        found = run.open.get((group.serial, meeting.number))
        if found is None:
            self._make_room(run)
            found = run.begin(group, meeting)
        found.issued[member.position] = run.clock()
        if found.nbytes is not None:
            found.nbytes[member.position] = _size_brought(meeting, member)

    def _make_room(self, run: Run) -> None:
        if len(run.open) >= MOST_OPEN:
            oldest = next((found for found in run.open.values() if came(found.completed)), None)
            if oldest is not None:
                self._finish(oldest)

    def _find(self, group: SyncGroup, meeting: Rendezvous) -> Collective | None:
        run = self._runs.get(group.root)
        return None if run is None else run.open.get((group.serial, meeting.number))

    def waits(self, member: Member, meeting: Rendezvous) -> None:
        """Note when a replica first awaited a collective."""
        found = self._find(member.group, meeting)
        if found is not None and not came(found.awaited[member.position]):
            found.awaited[member.position] = found.run.clock()

    def resumed(self, member: Member, meeting: Rendezvous) -> None:
        """Note when a replica came back from a collective; the last to do so ends it."""
        found = self._find(member.group, meeting)
        if found is not None and not came(found.resumed[member.position]):
            found.resumed[member.position] = found.run.clock()
            found.left -= 1
            if not found.left:
                self._finish(found)

    def completed(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """Note when a collective was complete, and with what error."""
        if meeting.signature[KIND].name == "join":
            self._number_join(group, meeting)
        found = self._find(group, meeting)
        if found is not None:
            found.completed = found.run.clock()
            found.others = meeting.others
            found.error = None if meeting.error is None else type(meeting.error).__name__

    def _number_join(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """Put a join where it is looked for now that it has a number."""
        run = self._runs.get(group.root)
        found = None if run is None else run.open.pop((group.serial, JOIN), None)
        if found is not None:
            found.number = meeting.number
            found.key = group.serial, meeting.number
            found.run.open[found.key] = found

    # The end.

    def _finish(self, found: Collective) -> None:
        with self._lock:
            if found.run.open.pop(found.key, None) is None:
                return
            self._done.append(found)
            self.arrivals += len(found.replicas)
        self._fuller()

    def _end(self, run: Run) -> None:
        for found in list(run.open.values()):
            for position, awaited in enumerate(found.awaited):
                if came(awaited) and not came(found.resumed[position]):
                    found.resumed[position] = run.clock()
            self._finish(found)
        self._done.append(run)

    def take(self) -> list[Collective | Run]:
        """Return what is done with, in the order in which it was, and forget it."""
        with self._lock:
            done, self._done, self.arrivals = self._done, [], 0
        return done

    def close(self) -> None:
        """Record nothing more; what still goes on is left as it stands."""
        with self._lock:
            self._closed = True
            runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            self._end(run)
