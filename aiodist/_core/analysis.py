"""Analysis: which replicas disagree according to a snapshot, in what, and where, whatever their order of arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiodist._core import render
from aiodist._core.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    IncompleteCollectiveError,
    WorkerLostError,
)
from aiodist._core.report import CollectiveReport, Partition, ReplicaReport
from aiodist._core.snapshot import GroupRecord, Overdue, Snapshot
from aiodist._core.terms import Reason, ReplicaState
from aiodist._core.text import on_a_screen
from aiodist._core.trouble import NO_SLOT, Collective, SnapshotIndex
from aiodist._core.waitgraph import shortest_cycle, stuck


def analyse(snapshot: Snapshot, *, overdue: Overdue | None = None) -> CollectiveReport:
    """Return what went wrong, according to a snapshot; ``overdue`` is the collective that has timed out, if one has."""
    snapshot = replace(snapshot, groups=tuple(sorted(snapshot.groups, key=_order)))
    index = SnapshotIndex(snapshot)
    late = index.find(overdue.group, overdue.number) if overdue is not None else None
    if overdue is not None and late is not None:
        return _report(Collective(index, late.group, late.slot, overdue.seconds))
    in_trouble = [each for group in snapshot.groups if (each := _first_in_trouble(index, group)) is not None]
    if in_trouble:
        return _report(min(in_trouble, key=_says_little))
    cycle = find_cycle(snapshot)
    if cycle:
        return _cycle(cycle)
    if snapshot.deadlocked:
        return _deadlock(index)
    group = next((group for group in snapshot.groups if group.open), snapshot.groups[0])
    return _report(Collective(index, group, group.open[0] if group.open else NO_SLOT))


def _order(group: GroupRecord) -> tuple[Any, ...]:
    """Return a key for sorting groups that does not depend on the order of arrival."""
    members, name, number = group.key
    return number >= 0, members, name or "", number


def error_of(report: CollectiveReport) -> CollectiveError:
    """Return the error to raise for a report."""
    return _ERRORS.get(report.reason, CollectiveMismatchError)(report)


_ERRORS: Mapping[Reason, type[CollectiveError]] = {
    Reason.EXITED: IncompleteCollectiveError,
    Reason.ABANDONED: IncompleteCollectiveError,
    Reason.UNMATCHED: IncompleteCollectiveError,
    Reason.TIMEOUT: CollectiveTimeoutError,
    Reason.CYCLE: DeadlockError,
    Reason.DEADLOCK: DeadlockError,
    Reason.LIVELOCK: DeadlockError,
    Reason.WORKER_LOST: WorkerLostError,
}


# Which collective is in trouble.


def _first_in_trouble(index: SnapshotIndex, group: GroupRecord) -> Collective | None:
    """Return the first collective of a group that can no longer complete; None if all still can.

    If replicas are missing from the creation of the group, a collective with waiting replicas says more.
    """
    for each in index.open[group.key]:
        if each.is_join:
            return each if each.gone else None
        if len(each.partitions) > 1 or ((each.number >= 0 or len(group.open) == 1) and each.gone):
            return each
    return None


def cannot_complete(snapshot: Snapshot) -> bool:
    """Return whether a collective can never complete, whatever the replicas that have not ended do.

    The parts of a merged snapshot may be of different moments: a member that has continued in one part has posted a
    collective that is still open in an earlier part.
    """
    return any(
        each.gone if each.is_join else each.exited or each.abandoned or len(each.partitions) > 1
        for each in SnapshotIndex(snapshot).open_collectives()
    )


def _says_little(trouble: Collective) -> tuple[bool, bool]:
    """Return whether no replica waits in a collective, and whether missing members may still reach it.

    Those members may wait in a collective of another group, which then is the one to report.
    """
    return not trouble.slot.waiting, len(trouble.gone) < len(trouble.missing)


def _report(trouble: Collective) -> CollectiveReport:
    """Return the report on one collective in trouble."""
    minority, partitions = trouble.minority, trouble.partitions
    has_majority = bool(partitions and minority) and partitions[0].replicas[0] != minority[0]
    lines, advice = render.trouble_text(trouble)
    return CollectiveReport(
        trouble.reason,
        trouble.number,
        tuple(_where_it_waits(trouble.index, each) for each in trouble.reports.values()),
        trouble.suspects,
        on_a_screen(lines, advice),
        trouble.label,
        tuple(
            Partition(each.replicas, str(each.post.call), each.post.location, has_majority and each is partitions[0])
            for each in partitions
        ),
        trouble.divergence,
        advice,
    )


# Replicas that wait for each other.


def find_cycle(snapshot: Snapshot) -> list[tuple[int, Collective]]:
    """Return a cycle of replicas that wait for each other, each with the collective in which it waits for the next.

    Only replicas that the snapshot knows to be blocked count as waiting. The result is empty if there is no cycle.
    """
    index = SnapshotIndex(snapshot)
    waits = {i: index.waits[i] for i in snapshot.blocked if i in index.waits}
    every = {each for own in waits.values() for each in own}
    blockers = {each: list(each.missing) for each in every}
    nodes = stuck(waits, blockers)
    blocked_by = {each: [i for i in blockers[each] if i in nodes] for each in {waits[i][0] for i in nodes}}
    cycle = shortest_cycle({i: blocked_by[waits[i][0]] for i in nodes}, sorted(nodes))
    return [(i, waits[i][0]) for i in cycle]


def _cycle(cycle: Sequence[tuple[int, Collective]]) -> CollectiveReport:
    """Return the report on replicas that wait for each other, each in another group's collective."""
    collectives = list(dict.fromkeys(each for _, each in cycle))
    waits_in = {i: each for each in collectives for i in each.slot.waiting}
    minority, suspects = _blame_on_a_cycle(collectives)
    steps = []
    for each in collectives:
        late = tuple(i for i in each.missing if i in waits_in)
        waiting = set(each.slot.waiting)
        for post, ids in each.slot.posts:
            own = tuple(i for i in ids if i in waiting)
            if own:
                steps.append(render.Step(own, post, each, late, odd=own[0] in minority))
    if minority:
        steps.sort(key=lambda step: (step.odd, -len(step.replicas), step.replicas))
    index = collectives[0].index
    nothing = Collective(index, index.snapshot.groups[0], NO_SLOT)
    shown_in = {i: waits_in.get(i) or index.waits.get(i, [nothing])[0] for i in index.facts}
    lines, advice = render.cycle_text(steps)
    return CollectiveReport(
        Reason.CYCLE,
        cycle[0][1].number,
        tuple(each.reports[replica_id] for replica_id, each in shown_in.items()),
        tuple(sorted(suspects)),
        on_a_screen(lines, advice),
        partitions=tuple(
            Partition(step.replicas, str(step.post.call), step.post.location, majority=bool(minority) and not step.odd)
            for step in steps
        ),
        advice=advice,
    )


def _blame_on_a_cycle(collectives: Sequence[Collective]) -> tuple[set[int], set[int]]:
    """Return the minority among replicas that wait for each other, empty on a tie, and the suspects.

    If some members have not made their groups, the majority of these members decides; otherwise the majority of the
    replicas that are members of all the groups, since only these can be in either collective.
    """
    minority: set[int] = set()
    for each in collectives:
        if each.unmade is not None:
            makers = set(each.unmade.records)
            others = set(each.group.key[0]) - makers
            minority |= min(makers, others, key=len) if len(makers) != len(others) else set()
    if minority:
        return minority, minority
    common = set.intersection(*(set(each.group.key[0]) for each in collectives))
    sides = sorted((common & set(each.slot.waiting) for each in collectives), key=len, reverse=True)
    everyone = set().union(*sides) or {i for each in collectives for i in each.slot.waiting}
    if len(sides[0]) > len(sides[1]):
        minority = everyone - sides[0]
    return minority, minority or everyone


def _deadlock(index: SnapshotIndex) -> CollectiveReport:
    """Return the report on replicas that wait for each other. It blames those that wait outside of collectives."""
    snapshot, root = index.snapshot, index.snapshot.groups[0]
    replicas = tuple(_where_it_waits(index, each) for each in Collective(index, root, NO_SLOT).reports.values())
    next_number = max((member.sequence for member in root.members), default=0)
    number = min((slot.number for slot in root.open if slot.number >= 0), default=next_number)
    running = {each.replica_id for each in replicas if each.state is ReplicaState.RUNNING}
    suspects = tuple(i for i in snapshot.deadlocked if i in running) or snapshot.deadlocked
    places = [each.location or (each.stack[-1] if each.stack else None) for each in replicas]
    unmarked = dict.fromkeys((at for at in places if at is not None), False)
    lines = [snapshot.cycle_text, *render.source_lines(unmarked.items())]
    return CollectiveReport(Reason.DEADLOCK, number, replicas, suspects, on_a_screen(lines))


def _where_it_waits(index: SnapshotIndex, report: ReplicaReport) -> ReplicaReport:
    """Return the report on a replica, which may wait in another group's collective than the whole report's."""
    elsewhere = index.waits.get(report.replica_id)
    if not elsewhere or report.state is not ReplicaState.RUNNING:
        return report
    record = elsewhere[0].records[report.replica_id]
    return replace(report, state=ReplicaState.WAITING, call=record.call, location=record.location, waits_for=None)
