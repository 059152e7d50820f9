"""What workers tell of a run's groups of some replicas, when something has gone wrong; and the groups that these make.

A group is told of by each worker that has members in it, and becomes one sync group again, as the run's own does
(`state`). Which of the groups that workers tell of are one and the same is known by the serial number that the lane
book has given; of those that have none yet, by their order among those of one key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiodist._arrays.options import CommunicationOptions
from aiodist._core.report import Location
from aiodist.collective.camps import camps_of
from aiodist.collective.group import SyncGroup
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.spanned import open_in
from aiodist.collective.subgroup import SubGroup, label_of
from aiodist.workers.calls import Call, Site, WireCall, from_wire, resolved, site_of, to_wire
from aiodist.workers.lane_book import GroupKey
from aiodist.workers.state import ReplicaPart, WorkerState, become, replica_part, waiters_of


@dataclass(frozen=True, slots=True)
class GroupPart:
    """One worker's part of a group.

    Attributes:
        serial: the lane book's number; None where there is none, or none yet.
        key: what it was asked for by; None where all members are one worker's, or it cannot be asked for yet.
        everyone: the members' ids in the run, in the group's order.
        name: its name.
        made: where it was made.
        places: this worker's members' ids in the group.
        replicas: those members.
        open: by number, the meetings that are not complete, and by place the call of each that has arrived.
        waiting: by number, the places of those who wait in one.
        agreed: the last complete ones, by number.
        overdue: the number of the meeting whose time is up, and its limit in seconds.
        let_go: no member here can call anything more in it, as none has its context any more.
    """

    serial: int | None
    key: GroupKey | None
    everyone: tuple[int, ...]
    name: str | None
    made: Site
    places: tuple[int, ...]
    replicas: tuple[ReplicaPart, ...]
    open: Mapping[int, Mapping[int, WireCall]]
    waiting: Mapping[int, tuple[int, ...]]
    agreed: Mapping[int, WireCall]
    overdue: tuple[int, float] | None
    let_go: bool = False


def tell_part(
    group: SubGroup,
    serial: int | None,
    key: GroupKey | None,
    overdue: tuple[int, float] | None,
    *,
    let_go: bool = False,
) -> GroupPart:
    """Return what this worker has to tell of a group."""
    places, meetings = tuple(group.places), open_in(group)
    return GroupPart(
        serial=serial,
        key=key,
        everyone=group.everyone,
        name=group.name,
        made=site_of(*group.made_at),
        places=places,
        replicas=tuple(replica_part(member, {}) for member in group.members),
        open={number: _calls(group, meeting) for number, meeting in meetings.items()},
        waiting={
            number: tuple(places[position] for position in waiters_of(group, meeting))
            for number, meeting in meetings.items()
        },
        agreed={record[0]: to_wire(record[1:4]) for record in list(group.agreed)},
        overdue=overdue,
        let_go=let_go,
    )


def _calls(group: SyncGroup, meeting: Rendezvous) -> dict[int, WireCall]:
    return {
        group.places[member.position]: to_wire(meeting.call_of(member.replica_id))
        for member in group.members
        if member.sequence > meeting.number
    }


class WholePart(SyncGroup):
    """A group of some replicas that workers have told of.

    Attributes:
        granted: the lane book's number; None where it has none yet.
    """

    def __init__(self, root: SyncGroup, parts: Mapping[int, GroupPart]) -> None:
        first = parts[min(parts)]
        self.granted = first.serial
        of_run = [root.members[replica_id] for replica_id in first.everyone]
        super().__init__([member.device for member in of_run], root.order_check, CommunicationOptions())
        self.root, self.engine = root, root.engine
        self._everyone, self._name, self._made = first.everyone, first.name, first.made
        for member, own in zip(self.members, of_run, strict=True):
            member.replica_id, member.sequence, member.end, member.stack = own.replica_id, -1, own.end, own.stack
        for part in parts.values():
            for place, replica in zip(part.places, part.replicas, strict=True):
                become(self.members[place], replica, stack=False)
            if part.let_go:
                self.let_go |= {self._everyone[place] for place in part.places}
        agreed = {number: call for part in parts.values() for number, call in part.agreed.items()}
        numbers = sorted({number for part in parts.values() for number in part.open})
        for number in sorted(set(agreed) - set(numbers)):
            self.agreed.append((number, *from_wire(agreed[number]), None))
        for number in numbers:
            self._restore(number, parts.values())
        made = self.open.get(-1)  # also where they have not met in it yet
        if made is not None and all(m.sequence >= 0 for m in self.members) and len(camps_of(self, made)) == 1:
            del self.open[-1]

    @property
    def label(self) -> str:
        """What reports call it."""
        made = None if any(number < 0 for number in self.open) else self._made
        where = None if made is None else Location(resolved(made.file), made.line, made.function)
        return label_of(self._everyone, self._name, where)

    def _restore(self, number: int, parts: Iterable[GroupPart]) -> None:
        calls: dict[int, Call] = {}
        waiting: list[int] = []
        for part in parts:
            told = part.open.get(number, {})
            for place in part.places:
                wire = told.get(place) or part.agreed.get(number)
                if wire is not None and self.members[place].sequence > number:
                    calls[place] = from_wire(wire)
            waiting += part.waiting.get(number, ())
        if not calls:
            return
        first = calls[min(calls)]
        meeting = self.open[number] = Rendezvous(number, *first, self.size, 0.0)
        for place, call in calls.items():
            if call != first:
                meeting.add_other(self.members[place].replica_id, *call)
        for place in waiting:
            meeting.waiters[place] = True
        limits = [part.overdue[1] for part in parts if part.overdue is not None and part.overdue[0] == number]
        if limits:
            meeting.deadline = min(limits)


def whole_parts(states: Mapping[int, WorkerState], root: SyncGroup) -> list[WholePart]:
    """Return the groups that the workers have told of, those of the lowest replicas first."""
    made: dict[Any, dict[int, GroupPart]] = {}
    asked: list[tuple[int, GroupPart]] = []
    for rank in sorted(states):
        for index, part in enumerate(states[rank].groups):
            if part.serial is not None:
                made.setdefault(("made", part.serial), {})[rank] = part
            elif part.key is not None:
                asked.append((rank, part))
            else:
                made["alone", rank, index] = {rank: part}
    for rank, part in asked:
        same = (parts for parts in made.values() if rank not in parts and _key(parts) == part.key)
        found = next(same, None)
        if found is None:
            found = made["asked", len(made)] = {}
        found[rank] = part
    found_parts = [WholePart(root, parts) for parts in made.values()]
    return sorted(found_parts, key=lambda part: (part._everyone, part._name or ""))


def _key(parts: Mapping[int, GroupPart]) -> GroupKey | None:
    return parts[min(parts)].key


def overdue_in(groups: Sequence[WholePart]) -> tuple[WholePart, Rendezvous] | None:
    """Return a group with a meeting whose time is up."""
    late = ((group, meeting) for group in groups for meeting in group.open.values() if meeting.deadline is not None)
    return next(late, None)


def trouble_in(group: SyncGroup) -> int | None:
    """Return the number of a group's first meeting that can never complete, because of what its own members did."""
    for number, meeting in sorted(group.open.items()):
        gone = (m for m in group.members if m.end is not None or m.replica_id in group.let_go)
        if any(m.abandoned == number for m in group.members) or any(m.sequence <= number for m in gone):
            return number
        if len(camps_of(group, meeting)) > 1:
            return number
    return None


def first_in_trouble(groups: Sequence[SyncGroup]) -> SyncGroup | None:
    """Return the first group that is in trouble, of those first whose members have all shown what they do."""
    troubled = [(group, number) for group in groups if (number := trouble_in(group)) is not None]
    settled = (group for group, number in troubled if all(member.has_settled(number) for member in group.members))
    return next(settled, None) or (troubled[0][0] if troubled else None)
