"""The verdict: who differs, and in what, judged from what every replica did; the same whoever came first.

Arrivals that mean the same are a camp. Replicas that ended without the collective are one more. The largest camp is
the majority, and the rest are the suspects; where no camp is larger than every other, nobody is the culprit and all
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING

from aiodist.collective import account
from aiodist.collective.callsite import location, place
from aiodist.collective.describe import call_text
from aiodist.collective.joining import number_of_join
from aiodist.collective.member import JOIN, Member
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.sameness import Call, difference, fingerprint
from aiodist.collective.signature import Signature
from aiodist.vocabulary.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    IncompleteCollectiveError,
)
from aiodist.vocabulary.reports import (
    CallRecord,
    CollectiveReport,
    Location,
    Reason,
    ReplicaReport,
    ReplicaState,
)

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup

_REASONS = list(Reason)


@dataclass(frozen=True, slots=True)
class Camp:
    """Replicas whose calls are the same collective, and the call of the first of them."""

    call: Call
    members: list[int]


def judge(group: SyncGroup, overdue: Rendezvous | None = None) -> CollectiveError:
    """Return the error that tells what went wrong in a group.

    Args:
        group: a group that is in trouble.
        overdue: the meeting whose time is up, when that is what is wrong.
    """
    meeting = overdue or _first_in_trouble(group)
    camps = _camps(group, meeting)
    missing = [m for m in _by_id(group) if not m.arrived_at(meeting.number)]
    reason = _reason(group, camps, missing, meeting)
    findings = account.Findings(
        reason=reason,
        sequence_number=meeting.number if meeting.number < JOIN else number_of_join(group),
        replicas=_replicas(group, meeting),
        suspects=_suspects(group, camps, missing, reason, meeting),
        camps=[(camp.members, camp.call[0]) for camp in camps],
        columns=[place(*camp.call[1:]).column for camp in camps],
        abandoned=tuple(m.replica_id for m in missing if m.abandoned == meeting.number),
        group=group.label,
        joining=meeting.number >= JOIN,
        timeout_seconds=0.0 if meeting.deadline is None else meeting.deadline - meeting.started,
    )
    report = CollectiveReport(
        findings.reason, findings.sequence_number, findings.replicas, findings.suspects, account.write(findings)
    )
    return _error_class(reason)(report)


def _first_in_trouble(group: SyncGroup) -> Rendezvous:
    """Return the open meeting with the lowest number that cannot complete any more.

    Where replicas are missing from the creation of a group, one that somebody waits in says more.
    """
    for number in sorted(group.open):
        meeting = group.open[number]
        if meeting.agreed and all(m.abandoned != number for m in group.members):
            continue
        gone = any((m.end is not None and m.sequence <= number) or m.abandoned == number for m in group.members)
        if gone and (number >= 0 or max(group.open) < 0):
            return meeting
        if len(_camps(group, meeting)) > 1:
            return meeting
    return group.open[min(group.open)]


def _camps(group: SyncGroup, meeting: Rendezvous) -> list[Camp]:
    """Return who has arrived at a meeting, by what their calls mean; the largest camp first."""
    camps: dict[object, Camp] = {}
    first = fingerprint(group.order_check, meeting.call)
    others = meeting.others or {}
    for member in _by_id(group):
        if member.arrived_at(meeting.number) and not member.stands_aside(meeting.number):
            call = meeting.call_of(member.replica_id)
            key = fingerprint(group.order_check, call) if member.replica_id in others else first
            camps.setdefault(key, Camp(call, [])).members.append(member.replica_id)
    return sorted(camps.values(), key=lambda camp: (-len(camp.members), camp.members[0]))


def _reason(group: SyncGroup, camps: list[Camp], missing: Sequence[Member], meeting: Rendezvous) -> Reason:
    if len(camps) > 1:
        found = (difference(group.order_check, camp.call, camps[0].call) for camp in camps[1:])
        return min((reason for reason in found if reason is not None), key=_REASONS.index)
    if any(member.end is not None and member.sequence <= meeting.number for member in missing):
        return Reason.EXITED
    if any(member.abandoned == meeting.number for member in missing):
        return Reason.ABANDONED
    return Reason.TIMEOUT


def _suspects(
    group: SyncGroup, camps: list[Camp], missing: Sequence[Member], reason: Reason, meeting: Rendezvous
) -> tuple[int, ...]:
    everyone = tuple(m.replica_id for m in _by_id(group) if not m.stands_aside(meeting.number))
    if reason is Reason.TIMEOUT:
        return tuple(member.replica_id for member in missing) or (0,)  # all are there: replica 0's merge_fn hangs
    gone = [m.replica_id for m in missing if m.end is not None or m.abandoned == meeting.number]
    arrived = sorted(replica_id for camp in camps for replica_id in camp.members)
    if len(camps) <= 1:
        return tuple(gone if len(gone) <= len(arrived) or not arrived else arrived)
    sides = [camp.members for camp in camps] + ([gone] if gone else [])
    sides.sort(key=len, reverse=True)
    if len(sides[0]) == len(sides[1]):
        return everyone
    return tuple(sorted(replica_id for side in sides[1:] for replica_id in side))


def _error_class(reason: Reason) -> type[CollectiveError]:
    if reason in (Reason.EXITED, Reason.ABANDONED):
        return IncompleteCollectiveError
    return CollectiveTimeoutError if reason is Reason.TIMEOUT else CollectiveMismatchError


def snapshot(group: SyncGroup) -> tuple[ReplicaReport, ...]:
    """Return what every replica does at this moment."""
    return _replicas(group, None)


def _replicas(group: SyncGroup, meeting: Rendezvous | None) -> tuple[ReplicaReport, ...]:
    historian = _Historian(group)
    return tuple(_replica(group, member, meeting, historian) for member in _by_id(group))


def report_on(group: SyncGroup, member: Member, meeting: Rendezvous | None) -> ReplicaReport:
    """Return the report on a replica, as that group sees it.

    Args:
        group: the group.
        member: the replica in it.
        meeting: what it waits in; None where it waits in nothing, or in no collective that is known.
    """
    return _replica(group, member, meeting, _Historian(group))


def _by_id(group: SyncGroup) -> list[Member]:
    """Return the members in the order of their ids, which is not that of their positions in every group."""
    return sorted(group.members, key=lambda member: member.replica_id)


def _replica(group: SyncGroup, member: Member, meeting: Rendezvous | None, historian: _Historian) -> ReplicaReport:
    waits_in = _waits_in(group, member, meeting)
    record = historian.record(waits_in.number, waits_in.call_of(member.replica_id)) if waits_in else None
    waits = record is not None and record.sequence_number >= 0
    state = member.end or (ReplicaState.WAITING if waits else ReplicaState.RUNNING)
    return ReplicaReport(
        replica_id=member.replica_id,
        device=member.device,
        state=state,
        call=record.call if record else None,
        location=record.location if record else None,
        history=historian.history(member),
        stack=() if state.ended else member.stack(),
    )


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
            place: Location = location(code, offset)
            found = self._records[key] = CallRecord(number, call_text(signature), place)
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
