"""Who asked for what, and where: the lines of an account that begin with a replica, and the source lines below them.

Up to eight replicas have a line each; more are told by camps, so that the account of thousands fits a screen.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist._core.report import Location, ReplicaReport, ReplicaState
from aiodist.collective import source
from aiodist.collective.findings import Findings, calls_made
from aiodist.collective.wording import count, ids_briefly, place, shown

_LINE_EACH = 8
_MOST_CAMPS = 12
_MOST_PLACES = 4


def who(findings: Findings) -> list[str]:
    """Return a line for each replica, or for each camp where there are many, and the source lines of their calls."""
    return [*_rows(findings), *_source_lines(findings), *_waits(findings)]


def _rows(findings: Findings) -> list[str]:
    marked = findings.marked
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
    made = f"after {count(calls_made(replica), 'collective')}"
    if replica.state is ReplicaState.EXITED:
        value = "" if replica.returned in (None, "None") else f"{replica.returned} "
        return f"returned {value}{made}", shown(replica.ended_at) if replica.ended_at is not None else ""
    if replica.state.ended:
        return f"{replica.state} {made}", ""
    what = "cancelled out of it, goes on" if replica.replica_id in findings.abandoned else "elsewhere"
    if replica.replica_id in findings.refusals:
        what = "raised for its arguments, goes on"
    return f"{what}, {made}", f"now at {shown(replica.stack[-1])}" if replica.stack else ""


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
        (mark, ids_briefly(members), count(len(members), "replica"), what, where)
        for (mark, what, where), members in ordered[:_MOST_CAMPS]
    ]
    rest = sum(len(members) for _, members in ordered[_MOST_CAMPS:])
    more = [f"  … and {count(rest, 'replica')} in {len(ordered) - _MOST_CAMPS} more ways"] if rest else []
    return _columns(rows) + more


def _waits(findings: Findings) -> list[str]:
    """Return what replicas wait for that are elsewhere, those that wait for the same together."""
    alike: dict[str, list[int]] = {}
    for replica in findings.replicas:
        if replica.waits_for is not None:
            alike.setdefault(replica.waits_for, []).append(replica.replica_id)
    lines = []
    for what, members in list(alike.items())[:_MOST_PLACES]:
        clause = what.replace("waits", "wait", 1) if len(members) > 1 and what.startswith("waits") else what
        lines.append(f"R{ids_briefly(members)[1:]} {clause}.")
    return lines


def _source_lines(findings: Findings) -> list[str]:
    """Return the source line of each place that was named, the odd ones marked; the first few places."""
    marked = findings.marked
    places: dict[Location, bool] = {}
    for replica in sorted(findings.replicas, key=lambda replica: replica.replica_id in marked):
        at = replica.location or replica.ended_at or (replica.stack[-1] if replica.stack else None)
        if at is not None and len(places) < _MOST_PLACES:
            places.setdefault(at, replica.replica_id in marked)
    lines = [(mark, place(at), source.line_at(at)) for at, mark in places.items()]
    width = max((len(where) for _, where, line in lines if line), default=0)
    return [f"{'>' if mark else ' '}   {where:<{width}}  {line}" for mark, where, line in lines if line]
