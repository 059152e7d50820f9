"""The account of a disagreement, written for a person: the verdict, who asked for what and where, what differs, a hint.

Up to eight replicas have a line each; more are told by camps, so that the account of thousands fits a screen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import CodeType

from aiodist.collective import hints
from aiodist.collective import signature as sig
from aiodist.collective.describe import FunctionKey, leaf_text
from aiodist.collective.signature import Signature
from aiodist.collective.wording import count as _count
from aiodist.collective.wording import ids, shown, shown_file
from aiodist.collective.wording import ids_briefly as _who_briefly
from aiodist.vocabulary import nests
from aiodist.vocabulary.reports import CallRecord, Reason, ReplicaReport, ReplicaState

_LINE_EACH = 8
_MOST_CAMPS = 12


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found, before it is put into words.

    Attributes:
        reason, sequence_number, replicas, suspects: as in `CollectiveReport`.
        camps: who arrived, by equal calls, the largest camp first.
        columns: where on its line each camp's call begins, counted from 0; None where Python does not know.
        abandoned: ids of those that were cancelled out of the collective.
        group: what the group is called; None for the run's own.
        joining: the collective is a join.
        timeout_seconds: how long the collective had, from the first arrival; 0 where there was no limit.
    """

    reason: Reason
    sequence_number: int
    replicas: tuple[ReplicaReport, ...]
    suspects: tuple[int, ...]
    camps: Sequence[tuple[Sequence[int], Signature]]
    columns: Sequence[int | None]
    abandoned: tuple[int, ...]
    group: str | None
    joining: bool
    timeout_seconds: float


def write(findings: Findings) -> str:
    """Return the whole account."""
    lines = [_headline(findings), *_who(findings), *_what_differs(findings)]
    lines += _last_agreement(findings)
    lines += hints.hints(findings.reason, findings.replicas, findings.suspects)
    return "\n".join(lines)


def _headline(findings: Findings) -> str:
    number = _collective(findings)
    if findings.reason is Reason.EXITED:
        gone = [r.replica_id for r in findings.replicas if _left_before(findings, r)]
        return f"{ids(gone)} ended without {number}, which {_others(findings, gone)}"
    if findings.reason is Reason.ABANDONED:
        was = "was" if len(findings.abandoned) == 1 else "were"
        return f"{ids(findings.abandoned)} {was} cancelled out of {number} before it was complete"
    if findings.reason is Reason.TIMEOUT:
        return f"{number} timed out after {findings.timeout_seconds:.3g} s: {_what_is_late(findings)}"
    return f"replicas disagree at {number}"


def _collective(findings: Findings) -> str:
    if findings.sequence_number < 0:
        return f"the creation of {findings.group}"
    number = f"collective #{findings.sequence_number}"
    if findings.joining:
        number = f"the join ({number})"
    return f"{number} of {findings.group}" if findings.group is not None else number


def _left_before(findings: Findings, replica: ReplicaReport) -> bool:
    if findings.sequence_number < 0:
        return replica.state.ended and replica.call is None
    return replica.state.ended and len_of_program(replica) <= findings.sequence_number


def _others(findings: Findings, gone: Sequence[int]) -> str:
    waiting = [r.replica_id for r in findings.replicas if r.state is ReplicaState.WAITING]
    if waiting and findings.sequence_number >= 0:
        return f"{_wait(waiting)} in"
    called = "made" if findings.sequence_number < 0 else "called"
    return f"{ids({r.replica_id for r in findings.replicas} - set(gone))} {called}"


def _what_is_late(findings: Findings) -> str:
    arrived = {replica_id for members, _ in findings.camps for replica_id in members}
    missing = {r.replica_id for r in findings.replicas} - arrived
    if not missing:
        return "its merge function has not returned"
    return f"{ids(missing)} {'has' if len(missing) == 1 else 'have'} not arrived, {_wait(arrived)} in it"


def _wait(replicas: Collection[int]) -> str:
    if not replicas:
        return "nobody waits"
    return f"{ids(replicas)} wait{'s' if len(replicas) == 1 else ''}"


# Who asked for what, and where.


def _who(findings: Findings) -> list[str]:
    marked = set(findings.suspects) if len(findings.suspects) < len(findings.replicas) else set()
    if len(findings.replicas) <= _LINE_EACH:
        rows = [
            (r.replica_id in marked, f"replica {r.replica_id}", r.device, *_doing(findings, r))
            for r in findings.replicas
        ]
        return _columns(rows)
    return _by_camp(findings, marked)


def _doing(findings: Findings, replica: ReplicaReport) -> tuple[str, str]:
    """Return what a replica does, and where, as text."""
    if replica.call is not None and replica.location is not None:
        return replica.call, shown(replica.location)
    made = f"after {_count(len_of_program(replica), 'collective')}"
    if replica.state is ReplicaState.EXITED:
        return f"returned {made}", ""
    if replica.state.ended:
        return f"{replica.state} {made}", ""
    what = "cancelled out of it, goes on" if replica.replica_id in findings.abandoned else "elsewhere"
    return f"{what}, {made}", f"now at {shown(replica.stack[-1])}" if replica.stack else ""


def len_of_program(replica: ReplicaReport) -> int:
    """Return how many collectives a replica has issued."""
    return replica.history[-1].sequence_number + 1 if replica.history else 0


def _columns(rows: Sequence[tuple[bool, str, str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in (1, 2, 3)]  # type: ignore[arg-type]
    return [
        f"{'>' if mark else ' '} {who:<{widths[0]}}  {device:<{widths[1]}}  {what:<{widths[2]}}   {where}".rstrip()
        for mark, who, device, what, where in rows
    ]


def _by_camp(findings: Findings, marked: set[int]) -> list[str]:
    camps: dict[tuple[bool, str, str], list[int]] = {}
    for replica in findings.replicas:
        key = (replica.replica_id in marked, *_doing(findings, replica))
        camps.setdefault(key, []).append(replica.replica_id)
    ordered = sorted(camps.items(), key=lambda camp: (-len(camp[1]), camp[1][0]))
    rows = [
        (mark, _who_briefly(members), _count(len(members), "replica"), what, where)
        for (mark, what, where), members in ordered[:_MOST_CAMPS]
    ]
    rest = sum(len(members) for _, members in ordered[_MOST_CAMPS:])
    more = [f"  … and {_count(rest, 'replica')} in {len(ordered) - _MOST_CAMPS} more ways"] if rest else []
    return _columns(rows) + more


# What differs, inside the values.


def _what_differs(findings: Findings) -> list[str]:
    if len(findings.camps) < 2:
        return []
    (members, majority), *odd = findings.camps
    if findings.reason is Reason.STRUCTURE:
        return _structures_differ(majority[sig.STRUCTURE], odd[0][1][sig.STRUCTURE])
    if findings.reason is Reason.MERGE_FN:
        return _merge_functions_differ(majority, members, *_other_side(findings, majority, odd))
    if findings.reason in (Reason.SHAPE, Reason.DTYPE, Reason.DEVICE):
        return _leaf_differs(findings, majority, members, *_other_side(findings, majority, odd))
    if findings.reason is Reason.CALL_SITE:
        return _columns_differ(findings)
    return []


def _structures_differ(a: nests.Structure | None, b: nests.Structure | None) -> list[str]:
    if a is None or b is None:
        return ["The structures differ: one side passes a single value, the other a nest."]
    return [f"The structures differ: {nests.difference(a, b, 'value')}."]


def _columns_differ(findings: Findings) -> list[str]:
    """Tell calls apart that stand on one line."""
    location_of = {replica.replica_id: replica.location for replica in findings.replicas}
    places = {location_of[members[0]] for members, _ in findings.camps}
    if len(places) > 1 or None in findings.columns:
        return []
    columns = [
        f"column {(column or 0) + 1} on {_who_briefly(members)}"
        for (members, _), column in zip(findings.camps, findings.columns, strict=True)
    ]
    return [f"They are different calls on one line: {', '.join(columns[:_MOST_CAMPS])}."]


_FIELDS = {
    Reason.MERGE_FN: sig.DETAIL,
    Reason.SHAPE: sig.SHAPES,
    Reason.DTYPE: sig.DTYPES,
    Reason.DEVICE: sig.TYPES,
}


def _other_side(
    findings: Findings, majority: Signature, odd: Sequence[tuple[Sequence[int], Signature]]
) -> tuple[Signature, Sequence[int]]:
    """Return the first camp that differs from the majority in the reason given."""
    field = _FIELDS[findings.reason]
    return next(((s, m) for m, s in odd if s[field] != majority[field]), (odd[0][1], odd[0][0]))


def _merge_functions_differ(
    a: Signature, a_members: Sequence[int], b: Signature, b_members: Sequence[int]
) -> list[str]:
    left, right = _function(a[sig.DETAIL]), _function(b[sig.DETAIL])
    return [f"The merge functions differ: {left} on {_who_briefly(a_members)}, {right} on {_who_briefly(b_members)}."]


def _function(key: FunctionKey) -> str:
    """Return a merge function as text, with the place where it is defined if it has one."""
    if isinstance(key.code, CodeType):
        return f"{key.name} at {shown_file(key.file)}:{key.code.co_firstlineno}"
    return key.name


def _leaf_differs(
    findings: Findings, a: Signature, a_members: Sequence[int], b: Signature, b_members: Sequence[int]
) -> list[str]:
    if a[sig.STRUCTURE] is None:
        return []
    paths = nests.leaf_paths(a[sig.STRUCTURE], "value")
    for path, mine, theirs in zip(paths, sig.leaf_fields(a), sig.leaf_fields(b), strict=True):
        if mine != theirs:
            left, right = leaf_text(*mine), leaf_text(*theirs)
            sides = f"{left} on {_who_briefly(a_members)}, {right} on {_who_briefly(b_members)}"
            what = "array type" if findings.reason is Reason.DEVICE else findings.reason
            return [f"The {what} differs at {path}: {sides}."]
    return []


def _last_agreement(findings: Findings) -> list[str]:
    last = next((r for r in reversed(_common_history(findings)) if r.sequence_number < findings.sequence_number), None)
    if last is None:
        whole = "run" if findings.group is None else "group"
        return [f"This is the first collective of the {whole}."] if findings.sequence_number == 0 else []
    where = f"{shown_file(last.location.file)}:{last.location.line}"
    return [f"All replicas agreed up to #{last.sequence_number}: {last.call} at {where}."]


def _common_history(findings: Findings) -> tuple[CallRecord, ...]:
    return min((replica.history for replica in findings.replicas), key=len)
