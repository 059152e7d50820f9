"""The recorder: what replicas did last, to be read at any time and after any end.

It costs nothing beyond what a sync group keeps for its reports: the ring of its last agreed collectives, shared by the
replicas, and the meetings that are open. Texts and places are made when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.wording import count, ids_briefly, shown

if TYPE_CHECKING:
    from aiodist._core.report import Location
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.sameness import Call

KEPT = 256
_SHOWN = 10


class RecordedCall(NamedTuple):
    """One collective that a replica asked for.

    Attributes:
        sequence_number: its 0-based position in the replica's program, or in the group's.
        call: what was asked, as text, e.g. ``all_reduce(SUM, float32[3])``.
        location: where it was called.
        complete: every replica came, and asked for the same.
        group: what reports call the group that it was made in; None for that of all replicas.
    """

    sequence_number: int
    call: str
    location: Location
    complete: bool
    group: str | None = None

    def __str__(self) -> str:
        where = "" if self.group is None else f" of {self.group}"
        state = "" if self.complete else "   open"
        return f"#{self.sequence_number}{where}  {self.call}   {shown(self.location)}{state}"


class _Ring:
    """What one group has kept, as it stood at one moment."""

    def __init__(self, group: SyncGroup) -> None:
        self.label = group.label
        self.members = {member.replica_id for member in group.members}
        self.agreed = [record for record in group.agreed if record[0] >= 0]
        ended = {meeting.number: meeting for meeting in group.unmet}
        self.open = [
            (number, {m.replica_id: meeting.call_of(m.replica_id) for m in group.members if m.sequence > number})
            for number, meeting in sorted((ended | group.open).items())
            if number >= 0 and not meeting.agreed
        ]

    def calls(self, replica_id: int) -> Iterator[RecordedCall]:
        """Yield a replica's calls, oldest first."""
        if replica_id not in self.members:
            return
        for number, signature, code, offset, others in self.agreed:
            yield self._recorded(number, (others or {}).get(replica_id, (signature, code, offset)), complete=True)
        for number, calls in self.open:
            if replica_id in calls:
                yield self._recorded(number, calls[replica_id], complete=False)

    def _recorded(self, number: int, call: Call, *, complete: bool) -> RecordedCall:
        signature, code, offset = call
        return RecordedCall(number, call_text(signature), location(code, offset), complete, self.label)


class RunRecord:
    """What the replicas of one run did last, as it stood when the record was taken.

    `Strategy.recorder` gives them.
    """

    def __init__(self, group: SyncGroup, *, in_progress: bool) -> None:
        self._devices = tuple(member.device for member in group.members)
        self._first = group.members[0].replica_id
        self._in_progress = in_progress
        self._rings = [_Ring(each) for each in group.groups()]

    @property
    def devices(self) -> tuple[str, ...]:
        """The replicas' devices, in the order of their ids; of several workers, this one's."""
        return self._devices

    @property
    def in_progress(self) -> bool:
        """Whether the run went on when the record was taken."""
        return self._in_progress

    def calls(self, replica_id: int) -> tuple[RecordedCall, ...]:
        """Return the last collectives of a replica, at most 256 in each group, newest last.

        Those of all replicas' own group come first, then those of each further group that is still in use.

        Args:
            replica_id: the replica.

        Raises:
            IndexError: there is no such replica in this process.
        """
        ids = self._ids()
        if replica_id not in ids:
            raise IndexError(f"replica_id must be from {ids[0]} to {ids[-1]}, got {replica_id}")
        return tuple(call for ring in self._rings for call in list(ring.calls(replica_id))[-KEPT:])

    def _ids(self) -> range:
        return range(self._first, self._first + len(self._devices))

    def __str__(self) -> str:
        camps: dict[tuple[RecordedCall, ...], list[int]] = {}
        for replica_id in self._ids():
            camps.setdefault(self.calls(replica_id)[-_SHOWN:], []).append(replica_id)
        state = "in progress" if self._in_progress else "ended"
        lines = [f"run of {count(len(self._devices), 'replica')}, {state}"]
        for calls, members in camps.items():
            lines.append(f"  {ids_briefly(members)}{'' if calls else ': no collective yet'}")
            lines += [f"    {call}" for call in calls]
        return "\n".join(lines)


class Recorder:
    """The last 256 collectives of every replica of a strategy's runs: `Strategy.recorder`.

    It is always on. Print it, or read its records:

    >>> strategy = MirroredStrategy(["CPU:0"])
    >>> strategy.recorder.last is None
    True
    """

    def __init__(self) -> None:
        self._running: list[SyncGroup] = []
        self._last: RunRecord | None = None
        self._lock = Lock()

    @property
    def running(self) -> tuple[RunRecord, ...]:
        """A record of each run in progress, as it stands now, in the order in which they began."""
        return tuple(RunRecord(group, in_progress=True) for group in self._running.copy())

    @property
    def last(self) -> RunRecord | None:
        """A record of the last run that ended, however it did; None before the first."""
        return self._last

    def __str__(self) -> str:
        records = [*self.running, *([self._last] if self._last is not None else [])]
        return "\n".join(map(str, records)) or "no run yet"

    def _begin(self, group: SyncGroup) -> None:
        with self._lock:
            self._running.append(group)

    def _end(self, group: SyncGroup) -> None:
        with self._lock:
            self._running = [each for each in self._running if each is not group]
            self._last = RunRecord(group, in_progress=False)


for _public in (RecordedCall, RunRecord, Recorder):
    _public.__module__ = "aiodist"
