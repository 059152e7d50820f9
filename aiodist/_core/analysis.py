"""Analysis: what a snapshot says about a disagreement: who differs, in what, and where, whichever replica came first.

`analyse` is a function of the snapshot alone. Replicas whose posts mean the same are a partition; those that are gone
without the collective are one more. The largest partition is the majority, and the rest are the suspects. If no
partition is larger than every other, nobody is blamed, and all are suspects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from aiodist._core.trouble import NOTHING, Collective, Picture
from aiodist._core.waitgraph import shortest_cycle, stuck

_MOST_PLACES = 6


def analyse(snapshot: Snapshot, *, overdue: Overdue | None = None) -> CollectiveReport:
    """Return what went wrong, according to a snapshot; ``overdue`` is the collective that has timed out, if one has."""
    snapshot = replace(snapshot, groups=tuple(sorted(snapshot.groups, key=_order)))
    picture = Picture(snapshot)
    if overdue is not None:
        late = picture.find(overdue.group, overdue.number)
        if late is not None:
            return _report(Collective(picture, late.group, late.slot, overdue.seconds))
    in_trouble = [each for each in map(partial(_first_in_trouble, picture), snapshot.groups) if each is not None]
    if in_trouble:
        return _report(min(in_trouble, key=_says_little))
    cycle = find_cycle(snapshot)
    if cycle:
        return _cycle(cycle)
    if snapshot.deadlocked:
        return _deadlock(picture)
    group = next((group for group in snapshot.groups if group.open), snapshot.groups[0])
    report = _report(Collective(picture, group, group.open[0] if group.open else NOTHING))
    # If a replica's own error has ended the run, nothing was late: the others lack the replica that failed.
    failed = any(each.end is ReplicaState.FAILED for each in snapshot.replicas)
    return replace(report, reason=Reason.EXITED) if failed else report


def _order(group: GroupRecord) -> tuple[Any, ...]:
    """Return the key by which groups are sorted, which must not depend on who came first."""
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


def _first_in_trouble(picture: Picture, group: GroupRecord) -> Collective | None:
    """Return the first collective of a group that can no longer complete; None if all still can.

    If replicas are missing from the creation of the group, a collective that somebody waits in says more.
    """
    for each in picture.open[group.key]:
        if each.joining:
            return each if each.gone else None
        if len(each.partitions) > 1 or ((each.number >= 0 or len(group.open) == 1) and each.gone):
            return each
    return None


def cannot_complete(snapshot: Snapshot) -> bool:
    """Return whether a collective can never be complete, whatever the replicas that have not ended do.

    The parts of a merged snapshot may be of different moments: a member that has continued in one part has posted a
    collective that is still open in an earlier part.
    """
    for each in Picture(snapshot).every_open():
        never = (each.joining or member.sequence <= each.number or each.left(member) for member in each.gone)
        if any(never) or (len(each.partitions) > 1 and not each.joining):
            return True
    return False


def _says_little(trouble: Collective) -> tuple[bool, bool]:
    """Return whether nobody waits in a collective, and whether missing members may still come to it.

    Those members may wait in a collective of another group, which then is the one to report.
    """
    return not trouble.slot.waiting, len(trouble.gone) < len(trouble.missing)


def _report(trouble: Collective) -> CollectiveReport:
    """Return the report on one collective in trouble."""
    odd = trouble.odd
    return CollectiveReport(
        trouble.reason,
        trouble.number,
        tuple(_where_it_waits(trouble.picture, each) for each in trouble.replicas),
        trouble.suspects,
        render.text(trouble),
        trouble.label,
        tuple(
            Partition(replicas, str(post.call), post.location, index == 0 and bool(odd) and odd[:1] != replicas[:1])
            for index, (replicas, post, _) in enumerate(trouble.partitions)
        ),
        trouble.divergence,
        tuple(render.hints(trouble)),
    )


# Replicas that wait for each other.


def find_cycle(snapshot: Snapshot) -> list[tuple[int, Collective]]:
    """Return a cycle of replicas that wait for each other, each with the collective in which it waits for the next.

    Only replicas that the snapshot knows to be blocked count as waiting. The result is empty if there is no cycle.
    """
    picture = Picture(snapshot)
    waits = {i: picture.waits[i] for i in snapshot.blocked if i in picture.waits}
    every = {each for own in waits.values() for each in own}
    blockers = {each: [member.replica_id for member in each.missing] for each in every}
    left = stuck(waits, blockers)
    among_left = {each: [i for i in blockers[each] if i in left] for each in {waits[i][0] for i in left}}
    cycle = shortest_cycle({i: among_left[waits[i][0]] for i in left}, sorted(left))
    return [(i, waits[i][0]) for i in cycle]


def _cycle(cycle: Sequence[tuple[int, Collective]]) -> CollectiveReport:
    """Return the report on replicas that wait for each other, each in another group's collective."""
    on_it = list(dict.fromkeys(each for _, each in cycle))
    odd, everyone = _odd_on_a_cycle(on_it)
    among = {i for each in on_it for i in each.slot.waiting}
    steps = []
    for each in on_it:
        late = tuple(member.replica_id for member in each.missing if member.replica_id in among)
        for post, ids in each.slot.posts:
            own = tuple(i for i in ids if i in each.slot.waiting)
            if own:
                steps.append(render.Step(own, post, each, late, odd=own[0] in odd))
    if odd:
        steps.sort(key=lambda step: (step.odd, -len(step.replicas), step.replicas))
    picture = on_it[0].picture
    waits_in = {i: each for each in on_it for i in each.slot.waiting}
    nothing = Collective(picture, picture.snapshot.groups[0], NOTHING)
    its = {i: waits_in.get(i) or picture.waits.get(i, [nothing])[0] for i in picture.facts}
    lines, advice = render.cycle_text(steps)
    return CollectiveReport(
        Reason.CYCLE,
        cycle[0][1].number,
        tuple(each.reports[replica_id] for replica_id, each in its.items()),
        tuple(sorted(odd or everyone)),
        on_a_screen(lines, advice),
        partitions=tuple(
            Partition(step.replicas, str(step.post.call), step.post.location, majority=bool(odd) and not step.odd)
            for step in steps
        ),
        advice=advice,
    )


def _odd_on_a_cycle(on_it: Sequence[Collective]) -> tuple[set[int], set[int]]:
    """Return the minority among replicas that wait for each other, empty on a tie, and all who may be to blame.

    If some members have not made their groups, the majority of these members decides; otherwise the majority of the
    replicas that are members of all the groups, since only these can be in either collective.
    """
    odd: set[int] = set()
    for each in on_it:
        if each.creation is not None:
            makers = set(each.creation.records)
            others = set(each.group.key[0]) - makers
            odd |= min(makers, others, key=len) if len(makers) != len(others) else set()
    if odd:
        return odd, odd
    common = set.intersection(*(set(each.group.key[0]) for each in on_it))
    sides = sorted((common & set(each.slot.waiting) for each in on_it), key=len, reverse=True)
    everyone = set().union(*sides) or {i for each in on_it for i in each.slot.waiting}
    return (set() if len(sides[0]) == len(sides[1]) else everyone - sides[0]), everyone


def _deadlock(picture: Picture) -> CollectiveReport:
    """Return the report on replicas that wait for each other. It blames those that wait outside of collectives."""
    snapshot, root = picture.snapshot, picture.snapshot.groups[0]
    replicas = tuple(_where_it_waits(picture, each) for each in Collective(picture, root, NOTHING).replicas)
    following = max((member.sequence for member in root.members), default=0)
    number = min((slot.number for slot in root.open if slot.number >= 0), default=following)
    running = {each.replica_id for each in replicas if each.state is ReplicaState.RUNNING}
    suspects = tuple(i for i in snapshot.deadlocked if i in running) or snapshot.deadlocked
    places = dict.fromkeys(at for each in replicas for at in (each.location or (each.stack or (None,))[-1],) if at)
    lines = [snapshot.circle, *render.source_lines([(at, False) for at in places][:_MOST_PLACES])]
    return CollectiveReport(Reason.DEADLOCK, number, replicas, suspects, on_a_screen(lines))


def _where_it_waits(picture: Picture, report: ReplicaReport) -> ReplicaReport:
    """Return the report on a replica, which may wait in another group's collective than the whole report's."""
    elsewhere = picture.waits.get(report.replica_id)
    if not elsewhere or report.state is not ReplicaState.RUNNING:
        return report
    record = elsewhere[0].records[report.replica_id]
    return replace(report, state=ReplicaState.WAITING, call=record.call, location=record.location, waits_for=None)
