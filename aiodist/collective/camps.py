"""Camps: replicas by what their calls mean, and the two sides of a disagreement that are laid beside each other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodist._core.report import Location, ReplicaReport
from aiodist.collective.historian import by_id, record_of
from aiodist.collective.member import JOIN, Member
from aiodist.collective.parting import Past, Side
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.sameness import Call, fingerprint

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup

_MOST_CALLS = 64


@dataclass(frozen=True, slots=True)
class Camp:
    """Replicas whose calls are the same collective, and the call of the first of them."""

    call: Call
    members: list[int]


def camps_of(group: SyncGroup, meeting: Rendezvous) -> list[Camp]:
    """Return who has arrived at a meeting, by what their calls mean; the largest camp first."""
    camps: dict[object, Camp] = {}
    first = fingerprint(group.order_check, meeting.call)
    others = meeting.others or {}
    for member in by_id(group):
        if member.arrived_at(meeting.number) and not member.stands_aside(meeting.number):
            call = meeting.call_of(member.replica_id)
            key = fingerprint(group.order_check, call) if member.replica_id in others else first
            camps.setdefault(key, Camp(call, [])).members.append(member.replica_id)
    return sorted(camps.values(), key=lambda camp: (-len(camp.members), camp.members[0]))


def sides_of(
    group: SyncGroup,
    meeting: Rendezvous,
    camps: Sequence[Camp],
    missing: Sequence[Member],
    replicas: Sequence[ReplicaReport],
) -> tuple[Side, Side] | None:
    """Return the majority and the largest of the other camps, or those that have ended; None where all are one."""
    if not camps:
        return None
    report_of = {replica.replica_id: replica for replica in replicas}
    usual = _side(group, meeting, camps[0].members, report_of)
    if len(camps) > 1:
        return usual, _side(group, meeting, camps[1].members, report_of)
    gone = [member.replica_id for member in missing if member.end is not None]
    if not gone or not 0 <= meeting.number < JOIN:
        return None
    ended_at = report_of[gone[0]].ended_at
    return usual, Side(tuple(gone), (), (), (ended_at,) if ended_at is not None else ())


def _side(group: SyncGroup, meeting: Rendezvous, ids: Sequence[int], report_of: dict[int, ReplicaReport]) -> Side:
    member = next(member for member in group.members if member.replica_id == ids[0])
    end = min(member.sequence, JOIN) if meeting.number >= 0 else 0  # the creation of a group stands for itself
    numbers = [number for number in sorted(group.open) if meeting.number <= number < end]
    calls = [(number, group.open[number].call_of(ids[0])) for number in numbers[:_MOST_CALLS]]
    return Side(
        tuple(ids),
        [record_of(number, call) for number, call in calls],
        [fingerprint(group.order_check, call) for _, call in calls],
        _path(report_of[ids[0]]),
    )


def _path(replica: ReplicaReport) -> tuple[Location, ...]:
    """Return the places from a replica's function down to its call, where it waits at the call itself.

    Where it waits now says nothing of a call whose handle it kept, so then it is the place of the call alone.
    """
    location = replica.location
    if location is None:
        return ()
    here = replica.stack[-1] if replica.stack else None
    at_call = here is not None and here == location._replace(function=here.function)
    return (*replica.stack[:-1], location) if at_call else (location,)


def past_of(group: SyncGroup, meeting: Rendezvous) -> Past:
    """Return the calls that all made before a meeting, as far as they are kept."""
    agreed = [record for record in group.agreed if 0 <= record[0] < meeting.number]
    keys: dict[tuple[int, int, int], Hashable] = {}
    found = []
    for _, signature, code, offset, _ in agreed:
        key = id(signature), id(code), offset
        if key not in keys:
            keys[key] = fingerprint(group.order_check, (signature, code, offset))
        found.append(keys[key])
    calls = [record_of(number, (signature, code, offset)) for number, signature, code, offset, _ in agreed]
    return Past(calls, found, whole=not agreed or agreed[0][0] == 0)
