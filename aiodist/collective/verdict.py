"""The verdict: who differs, and in what, judged from what every replica did; the same whoever came first.

Arrivals that mean the same are a camp. Replicas that ended without the collective are one more. The largest camp is
the majority, and the rest are the suspects; where no camp is larger than every other, nobody is the culprit and all
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiodist._core import report
from aiodist._core.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    IncompleteCollectiveError,
)
from aiodist._core.report import CollectiveReport, Reason, ReplicaReport
from aiodist.collective import account, hints
from aiodist.collective.callsite import location, place
from aiodist.collective.camps import Camp, camps_of, past_of, sides_of
from aiodist.collective.describe import call_text
from aiodist.collective.findings import Findings
from aiodist.collective.historian import by_id, look_at, replica_reports, time_limits
from aiodist.collective.joining import number_of_join
from aiodist.collective.member import JOIN, Member
from aiodist.collective.parting import parting
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.sameness import difference

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup

_REASONS = list(Reason)
_MOST_LIMITS = 3


def judge(group: SyncGroup, overdue: Rendezvous | None = None) -> CollectiveError:
    """Return the error that tells what went wrong in a group.

    Args:
        group: a group that is in trouble.
        overdue: the meeting whose time is up, when that is what is wrong.
    """
    if group.bridge is not None:
        alone: CollectiveError = group.bridge.judge_alone()
        return alone
    meeting = overdue or _first_in_trouble(group)
    camps = camps_of(group, meeting)
    missing = [m for m in by_id(group) if not m.arrived_at(meeting.number)]
    reason = _reason(group, camps, missing, meeting)
    replicas, look = look_at(group, replica_reports(group, meeting), [camp.members[0] for camp in camps[:2]])
    # of racing tasks, which may call on, nobody can say what they left out
    sides = None if look.races else sides_of(group, meeting, camps, missing, replicas)
    findings = Findings(
        reason=reason,
        sequence_number=meeting.number if meeting.number < JOIN else number_of_join(group),
        replicas=replicas,
        suspects=_suspects(group, camps, missing, reason, meeting),
        camps=[(camp.members, camp.call[0]) for camp in camps],
        columns=[place(*camp.call[1:]).column for camp in camps],
        abandoned=tuple(m.replica_id for m in missing if m.abandoned == meeting.number),
        refusals={m.replica_id: m.refusal for m in missing if m.abandoned == meeting.number and m.refusal},
        let_go=tuple(m.replica_id for m in missing if m.replica_id in group.let_go),
        group=group.label,
        joining=meeting.number >= JOIN,
        sides=sides,
        divergence=parting(past_of(group, meeting), *sides) if sides is not None else None,
        look=look,
        time_limits=time_limits([m for m in missing if m.abandoned == meeting.number and not m.refusal][:_MOST_LIMITS]),
        timeout_seconds=0.0 if meeting.deadline is None else meeting.deadline - meeting.started,
    )
    return _error_class(reason)(_report(findings, camps))


def _report(findings: Findings, camps: Sequence[Camp]) -> CollectiveReport:
    return CollectiveReport(
        reason=findings.reason,
        sequence_number=findings.sequence_number,
        replicas=findings.replicas,
        suspects=findings.suspects,
        text=account.write(findings),
        group=findings.group,
        camps=tuple(
            report.Camp(tuple(camp.members), call_text(camp.call[0]), location(*camp.call[1:])) for camp in camps
        ),
        divergence=findings.divergence,
        advice=tuple(hints.hints(findings)),
    )


def snapshot(group: SyncGroup) -> tuple[ReplicaReport, ...]:
    """Return what every replica does at this moment, and what it waits for."""
    return look_at(group, replica_reports(group, None))[0]


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
        if len(camps_of(group, meeting)) > 1:
            return meeting
    return group.open[min(group.open)]


def _reason(group: SyncGroup, camps: list[Camp], missing: Sequence[Member], meeting: Rendezvous) -> Reason:
    if len(camps) > 1:
        found = (difference(group.order_check, camp.call, camps[0].call) for camp in camps[1:])
        return min((reason for reason in found if reason is not None), key=_REASONS.index)
    if any(member.end is not None and member.sequence <= meeting.number for member in missing):
        return Reason.EXITED
    if any(member.abandoned == meeting.number or member.replica_id in group.let_go for member in missing):
        return Reason.ABANDONED
    return Reason.TIMEOUT


def _suspects(
    group: SyncGroup, camps: list[Camp], missing: Sequence[Member], reason: Reason, meeting: Rendezvous
) -> tuple[int, ...]:
    everyone = tuple(m.replica_id for m in by_id(group) if not m.stands_aside(meeting.number))
    if reason is Reason.TIMEOUT:
        return tuple(member.replica_id for member in missing) or (0,)  # all are there: replica 0's merge_fn hangs
    left = [m for m in missing if m.end is not None or m.abandoned == meeting.number or m.replica_id in group.let_go]
    gone = [m.replica_id for m in left]
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
