"""What every replica did and does: its report, with the collectives that it made before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING

from aiodist._core.report import CallRecord, Location, ReplicaReport, ReplicaState
from aiodist._runtime.waits import Look
from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.joining import number_of_join
from aiodist.collective.member import JOIN, Member
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.sameness import Call
from aiodist.collective.signature import Signature
from aiodist.collective.source import time_limit_around
from aiodist.collective.wording import shown_file

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup

_LONGEST_VALUE = 40


def replica_reports(group: SyncGroup, meeting: Rendezvous | None) -> tuple[ReplicaReport, ...]:
    """Return what every replica of a group does at this moment, by id.

    Args:
        group: the group.
        meeting: the collective that is asked about; None for none in particular.
    """
    historian = _Historian(group)
    return tuple(_replica(group, member, meeting, historian) for member in by_id(group))


def look_at(
    group: SyncGroup, replicas: tuple[ReplicaReport, ...], sides: Sequence[int] = ()
) -> tuple[tuple[ReplicaReport, ...], Look]:
    """Look at the tasks of replicas; return their reports with what they wait for, and all that was seen.

    Args:
        group: the group.
        replicas: the reports.
        sides: one replica of each side of a disagreement.
    """
    running = [r.replica_id for r in replicas if r.state is ReplicaState.RUNNING]
    apart = {r.replica_id: r.location for r in replicas if r.replica_id in sides and _calls_apart(r)}
    apart = apart if len(apart) > 1 else {}
    if not running and not apart:
        return replicas, Look()
    look: Look = group.engine.look([*running, *apart], apart)
    elsewhere = {replica_id: look.waits[replica_id] for replica_id in running if replica_id in look.waits}
    return tuple(replace(r, waits_for=elsewhere.get(r.replica_id)) for r in replicas), look


def _calls_apart(replica: ReplicaReport) -> bool:
    """Whether a replica's function does not wait at its call: it may be a child task's."""
    if replica.location is None or not replica.stack:
        return False
    here = replica.stack[-1]
    return (here.file, here.line) != (replica.location.file, replica.location.line)


def by_id(group: SyncGroup) -> list[Member]:
    """Return the members in the order of their ids, which is not that of their positions in every group."""
    return sorted(group.members, key=lambda member: member.replica_id)


def time_limits(members: Iterable[Member]) -> tuple[str, ...]:
    """Say which timeout or cancel scope each of some members was inside of when it was cancelled."""
    found = []
    for member in members:
        for file, line in member.cancelled_in:
            limit = time_limit_around(file, line)
            if limit is not None:
                place = f"{shown_file(file)}:{limit[0]}"
                found.append(f"Replica {member.replica_id} was inside `{limit[1]}` at {place}.")
                break
    return tuple(found)


def report_on(group: SyncGroup, member: Member, meeting: Rendezvous | None) -> ReplicaReport:
    """Return the report on a replica, as that group sees it.

    Args:
        group: the group.
        member: the replica in it.
        meeting: what it waits in; None where it waits in nothing, or in no collective that is known.
    """
    return _replica(group, member, meeting, _Historian(group))


def _replica(group: SyncGroup, member: Member, meeting: Rendezvous | None, historian: _Historian) -> ReplicaReport:
    waits_in = _waits_in(group, member, meeting)
    record = historian.record(waits_in.number, waits_in.call_of(member.replica_id)) if waits_in else None
    waits = record is not None and record.sequence_number >= 0
    state = member.end or (ReplicaState.WAITING if waits else ReplicaState.RUNNING)
    returned, ended_at = _how_it_returned(group.root.members[member.replica_id - group.root.offset])
    return ReplicaReport(
        replica_id=member.replica_id,
        device=member.device,
        state=state,
        call=record.call if record else None,
        location=record.location if record else None,
        history=historian.history(member),
        stack=() if state.ended else member.stack(),
        returned=returned,
        ended_at=ended_at,
    )


def _how_it_returned(member: Member) -> tuple[str | None, Location | None]:
    """Return what a replica's function returned, as text, and where."""
    ending = member.ending
    if ending is None:
        return None, None
    simple = ending.value is None or isinstance(ending.value, (bool, int, float, complex, str, bytes))
    text = repr(ending.value) if simple else f"<{type(ending.value).__qualname__}>"
    text = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
    return text, None if ending.code is None else location(ending.code, ending.offset)


def _waits_in(group: SyncGroup, member: Member, meeting: Rendezvous | None) -> Rendezvous | None:
    """Return the meeting that a replica waits in: this one if it is there, else the first that it has not left.

    Nobody waits in the creation of a group, so there it is enough to have been there.
    """
    if member.end is not None and (meeting is None or meeting.number >= 0):
        return None
    if member.joined_at is not None:
        return group.open.get(JOIN) if member.arrived_at(JOIN) else None
    if meeting is not None and member.arrived_at(meeting.number):
        return meeting
    return next((group.open[n] for n in sorted(group.open) if n >= 0 and member.arrived_at(n)), None)


def record_of(number: int, call: Call) -> CallRecord:
    """Return a call as a record."""
    return CallRecord(number, call_text(call[0]), location(*call[1:]))


class _Historian:
    """Writes the replicas' histories. Most are alike, so those that are share one tuple."""

    def __init__(self, group: SyncGroup) -> None:
        self._join = number_of_join(group)
        self._open = [group.open[number] for number in sorted(group.open) if not group.open[number].agreed]
        self._agreed = [record for record in group.agreed if record[0] >= 0]
        self._shared = not any(others for *_, others in self._agreed)
        self._records: dict[tuple[int, int, int, int], CallRecord] = {}
        self._histories: dict[tuple[int, ...], tuple[CallRecord, ...]] = {}
        self._common = tuple(self.record(n, (s, code, offset)) for n, s, code, offset, _ in self._agreed)

    def record(self, number: int, call: Call) -> CallRecord:
        signature, code, offset = call
        number = min(number, self._join)
        key = number, id(signature), id(code), offset
        found = self._records.get(key)
        if found is None:
            found = self._records[key] = record_of(number, call)
        return found

    def history(self, member: Member) -> tuple[CallRecord, ...]:
        own = [
            self.record(meeting.number, meeting.call_of(member.replica_id))
            for meeting in self._open
            if member.sequence > meeting.number >= 0 and not member.stands_aside(meeting.number)
        ]
        if member.joined_at is not None:
            agreed = (record for record in self._agreed if record[0] < member.joined_at)
            return (*(self._agreed_record(member, *record) for record in agreed), *own)
        if not self._shared:
            return (*(self._agreed_record(member, *record) for record in self._agreed), *own)
        key = tuple(map(id, own))
        if key not in self._histories:
            self._histories[key] = (*self._common, *own)
        return self._histories[key]

    def _agreed_record(
        self,
        member: Member,
        number: int,
        signature: Signature,
        code: CodeType,
        offset: int,
        others: dict[int, Call] | None,
    ) -> CallRecord:
        call = (others or {}).get(member.replica_id, (signature, code, offset))
        return self.record(number, call)
