"""What a worker tells of its part of a run, when something has gone wrong; and the group that all the parts make.

The parts of all workers become one sync group again, with every replica as a member, and are judged as one is: so the
verdict on many workers is the verdict on one.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any

from aiodist._arrays.options import CommunicationOptions
from aiodist._core.call import OrderCheck
from aiodist._core.report import Location, ReplicaState
from aiodist._runtime.waits import Look
from aiodist.collective.camps import camps_of
from aiodist.collective.group import Record, SyncGroup
from aiodist.collective.member import JOIN, Ending, Member
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.spanned import open_in
from aiodist.workers.calls import Call, Site, WireCall, code_of, from_wire, portable, resolved, site_of, to_wire

if TYPE_CHECKING:
    from aiodist.workers.parts import GroupPart

_LAG = 2


@dataclass(frozen=True, slots=True)
class ReplicaPart:
    """One replica, as its worker tells of it; see `Member`."""

    sequence: int
    end: ReplicaState | None
    abandoned: int | None
    abandoned_at: int
    stack: tuple[Location, ...]
    joined_at: int | None = None
    cancelled_in: tuple[tuple[str, int], ...] = ()
    refusal: str = ""
    returned: Any = None
    ended_at: Site | None = None
    waits_for: str | None = None


class _Type:
    """Stands for a returned value of which nothing but its type is told."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, slots=True)
class Failure:
    """What a replica raised on its own.

    Attributes:
        replica_id: the replica, over all workers.
        text: the exception's type and message, in one line.
        error: the exception, where it can travel.
    """

    replica_id: int
    text: str
    error: BaseException | None = None

    @classmethod
    def of(cls, replica_id: int, error: BaseException) -> Failure:
        """Return what there is to tell of an exception; one that cannot be pickled travels as its text.

        It is told as others get it: a verdict that is kept keeps no frames of the program's, nor what they hold.
        """
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        try:
            travelled = pickle.loads(pickle.dumps(error))  # noqa: S301  (our own)
        except Exception:  # noqa: BLE001  (whatever its own methods raise)
            return cls(replica_id, text)
        return cls(replica_id, text, travelled)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker's part of a run.

    Attributes:
        rank: the worker.
        replicas: its replicas.
        open: by number, the meetings that are not complete, and by place the call of each replica that has arrived.
        agreed: the last complete ones, by number.
        overdue: the number of the meeting whose time is up, and its limit in seconds.
        failures: what its replicas raised.
        note: more, for a person: that its event loop is blocked, say.
        groups: its parts of the run's groups.
        waiting: by number, the places of the replicas that wait in one of the open meetings.
        trouble: the number of the meeting that cannot complete, where that is known and is one of the run's own group.
    """

    rank: int
    replicas: tuple[ReplicaPart, ...]
    open: Mapping[int, Mapping[int, WireCall]] = field(default_factory=dict)
    agreed: Mapping[int, WireCall] = field(default_factory=dict)
    overdue: tuple[int, float] | None = None
    failures: tuple[Failure, ...] = ()
    note: str = ""
    groups: tuple[GroupPart, ...] = ()
    waiting: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    trouble: int | None = None


def absent(rank: int, end: ReplicaState, replicas: int) -> WorkerState:
    """Return what a worker has to tell of a run in which it has no part any more, or never had."""
    part = ReplicaPart(sequence=0, end=end, abandoned=None, abandoned_at=0, stack=())
    return WorkerState(rank, (part,) * replicas)


def tell(
    group: SyncGroup,
    rank: int,
    *,
    brief: bool = False,
    overdue: tuple[int, float] | None = None,
    failures: Sequence[Failure] = (),
    note: str = "",
    groups: Sequence[GroupPart] = (),
) -> WorkerState:
    """Return what this worker has to tell of its group.

    Args:
        group: the local part of it.
        rank: this worker.
        brief: others tell of the complete meetings that lie back, which are the same for all.
        overdue: as in `WorkerState`, as are the others.
        failures: likewise.
        note: likewise.
        groups: likewise.
    """
    waits = _waits(group)
    wire = _Wire()
    meetings = open_in(group)
    return WorkerState(
        rank=rank,
        replicas=tuple(replica_part(member, waits) for member in group.members),
        open={number: _calls(group, meeting, wire) for number, meeting in meetings.items()},
        agreed={
            number: wire.of((signature, code, offset)) for number, signature, code, offset, _ in _agreed(group, brief)
        },
        overdue=overdue,
        failures=tuple(failures),
        note=note,
        groups=tuple(groups),
        waiting={number: waiters_of(group, meeting) for number, meeting in meetings.items()},
        trouble=_trouble_of(group, overdue),
    )


def _trouble_of(group: SyncGroup, overdue: tuple[int, float] | None) -> int | None:
    """Return which meeting cannot complete, if one cannot: where all have ended, the first that they left out."""
    if overdue is not None:
        return overdue[0]
    if group.trouble is not None and group.trouble >= 0:
        return group.trouble
    ended = all(member.end is not None for member in group.members)
    return min(member.sequence for member in group.members) if ended else None


def waiters_of(group: SyncGroup, meeting: Rendezvous) -> tuple[int, ...]:
    """Return the places, among the local replicas, of those who wait in a meeting."""
    return tuple(m.position for m in group.members if meeting.waiters[m.position] is not None)


class _Wire:
    """Makes calls ready to travel. Equal ones become one object, which is pickled once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Call], WireCall] = {}

    def of(self, call: Call) -> WireCall:
        key = call[1].co_filename, call  # code objects of two files can be equal
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = to_wire(call)
        return found


def _agreed(group: SyncGroup, brief: bool) -> list[Record]:
    """Return the last complete meetings; in brief, those that may still be open elsewhere, where others lag behind."""
    records = list(group.agreed)
    if not brief:
        return records
    first = min(list(group.open), default=max(member.sequence for member in group.members))
    return [record for record in records if record[0] >= first - _LAG]


def _waits(group: SyncGroup) -> Mapping[int, str]:
    if group.engine is None or group.thread not in (0, get_ident()):
        return {}
    with suppress(Exception):  # what can be seen of tasks is for the report; the others wait for the rest of it
        elsewhere = [m.replica_id for m in group.members if m.end is None and not _waits_in_a_meeting(m)]
        look: Look = group.engine.look(elsewhere, {}) if elsewhere else Look()
        return look.waits
    return {}


def _waits_in_a_meeting(member: Member) -> bool:
    return any(number >= 0 and member.arrived_at(number) for number in list(member.group.open))


def replica_part(member: Member, waits: Mapping[int, str]) -> ReplicaPart:
    """Return what there is to tell of a replica."""
    ending = member.ending
    return ReplicaPart(
        sequence=member.sequence,
        end=member.end,
        abandoned=member.abandoned,
        abandoned_at=member.abandoned_at,
        stack=() if member.end is not None else member.stack(),
        joined_at=member.joined_at,
        cancelled_in=tuple((portable(file), line) for file, line in member.cancelled_in),
        refusal=member.refusal,
        returned=None if ending is None else _plain(ending.value),
        ended_at=None if ending is None or ending.code is None else site_of(ending.code, ending.offset),
        waits_for=waits.get(member.replica_id),
    )


def _plain(value: Any) -> Any:
    """Return a value that a report shows, or its type's name for others."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    return _Type(type(value).__qualname__)


def _calls(group: SyncGroup, meeting: Rendezvous, wire: _Wire) -> dict[int, WireCall]:
    return {
        member.position: wire.of(meeting.call_of(member.replica_id))
        for member in group.members
        if member.sequence > meeting.number
    }


def whole_group(
    states: Mapping[int, WorkerState], devices: Sequence[Sequence[str]], names: Sequence[str], order_check: OrderCheck
) -> SyncGroup:
    """Return a group of all replicas, as far as the workers have told.

    Args:
        states: by rank; a worker that could not tell is left out, and its replicas have done nothing that is known.
        devices: by rank, the devices of its replicas.
        names: by replica id, what a report calls its device.
        order_check: what call sites are compared by.
    """
    group = SyncGroup(names, order_check, CommunicationOptions())
    replica_id = 0
    offsets = {}
    for rank, local in enumerate(devices):
        offsets[rank] = replica_id
        for place in range(len(local)):
            if rank in states:
                become(group.members[replica_id], states[rank].replicas[place])
            replica_id += 1
    group.engine = _Heard(_waits_by_id(states, offsets))
    _restore_history(group, states)
    for number in sorted({number for state in states.values() for number in state.open}):
        _restore_meeting(group, number, states, offsets)
        _note_agreement(group, number)
    group.agreed = deque(sorted(group.agreed, key=itemgetter(0)), group.agreed.maxlen)
    return group


def _waits_by_id(states: Mapping[int, WorkerState], offsets: Mapping[int, int]) -> dict[int, str]:
    return {
        offsets[rank] + place: part.waits_for
        for rank, state in states.items()
        for place, part in enumerate(state.replicas)
        if part.waits_for is not None
    }


def become(member: Member, part: ReplicaPart, *, stack: bool = True) -> None:
    """Let a member be what was told of it; where it is in its program may be known already."""
    member.sequence, member.end = part.sequence, part.end
    member.joined_at = part.joined_at
    member.cancelled_in = tuple((resolved(file), line) for file, line in part.cancelled_in)
    member.abandoned, member.abandoned_at, member.refusal = part.abandoned, part.abandoned_at, part.refusal
    if stack:
        member.stack = lambda: part.stack
    if part.end is ReplicaState.EXITED:
        value = part.returned
        member.ending = Ending(type(value.name, (), {})() if isinstance(value, _Type) else value, None)
        if part.ended_at is not None:
            member.ending.code, member.ending.offset = code_of(part.ended_at)


class _Heard:
    """The engine of a group that was told of: it says what the workers' own have said."""

    def __init__(self, waits: Mapping[int, str]) -> None:
        self._waits = waits

    def look(self, replicas: Collection[int], calls: Mapping[int, Location]) -> Look:  # noqa: ARG002  (as engines have it)
        """Return what these replicas wait for."""
        return Look({replica_id: self._waits[replica_id] for replica_id in replicas if replica_id in self._waits})


def _restore_history(group: SyncGroup, states: Mapping[int, WorkerState]) -> None:
    still_open = {number for state in states.values() for number in state.open}
    agreed: dict[int, WireCall] = {}
    for state in states.values():
        agreed.update(state.agreed)
    for number in sorted(set(agreed) - still_open):
        group.agreed.append((number, *from_wire(agreed[number]), None))


def _restore_meeting(
    group: SyncGroup, number: int, states: Mapping[int, WorkerState], offsets: Mapping[int, int]
) -> None:
    calls: dict[int, Call] = {}
    for rank, state in states.items():
        told = state.open.get(number, {})
        for place in range(len(state.replicas)):
            wire = told.get(place) or state.agreed.get(number)
            if wire is not None and group.members[offsets[rank] + place].sequence > number:
                calls[offsets[rank] + place] = from_wire(wire)
    if not calls:
        return
    first = calls[min(calls)]
    meeting = group.open[number] = Rendezvous(number, *first, group.size, 0.0)
    for replica_id, call in calls.items():
        if call != first:
            meeting.add_other(replica_id, *call)
    for rank, state in states.items():
        for place in state.waiting.get(number, ()):
            meeting.waiters[offsets[rank] + place] = True
    _set_deadline(meeting, number, states)


def _note_agreement(group: SyncGroup, number: int) -> None:
    """Take a meeting for agreed on at which all replicas mean the same, though some have not seen it complete yet."""
    meeting = group.open.get(number)
    if meeting is None or number >= JOIN or not all(member.arrived_at(number) for member in group.members):
        return
    if len(camps_of(group, meeting)) == 1:
        meeting.agreed = True
        group.agreed.append((number, *meeting.call, meeting.others))


def _set_deadline(meeting: Rendezvous, number: int, states: Mapping[int, WorkerState]) -> None:
    limits = [state.overdue[1] for state in states.values() if state.overdue and state.overdue[0] == number]
    if limits:
        meeting.deadline = min(limits)


def first_overdue(group: SyncGroup, states: Mapping[int, WorkerState]) -> Any:
    """Return the meeting whose time is up, if it is that."""
    numbers = [state.overdue[0] for state in states.values() if state.overdue and state.overdue[0] in group.open]
    return group.open[min(numbers)] if numbers else None
