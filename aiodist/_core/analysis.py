"""Analysis: what a snapshot says of a disagreement. Who differs, in what, and where; the same whoever came first.

`analyse` is a function of the snapshot alone. Posts that mean the same are a partition; replicas that are gone
without the collective are one more. The largest is the majority, and the rest are the suspects; where none is larger
than every other, nobody is to blame, and all are suspects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiodist._core import render
from aiodist._core.call import OrderCheck
from aiodist._core.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    IncompleteCollectiveError,
    WorkerLostError,
)
from aiodist._core.report import CollectiveReport, Partition, Reason, ReplicaReport, ReplicaState
from aiodist._core.snapshot import GroupRecord, Overdue, SlotRecord, Snapshot
from aiodist._core.text import on_a_screen
from aiodist._core.trouble import (
    Calls,
    Trouble,
    Waiting,
    ended_in,
    gone,
    has_left,
    missing,
    partitions,
    replica_report,
    replica_reports,
    slot_of,
    waits_of,
)
from aiodist._core.waitgraph import shortest_cycle, stuck

_MOST_PLACES = 6


def analyse(snapshot: Snapshot, *, overdue: Overdue | None = None) -> CollectiveReport:
    """Return what a snapshot says went wrong; ``overdue`` is the collective whose time is up, where it is that."""
    snapshot = replace(snapshot, groups=tuple(sorted(snapshot.groups, key=_order)))
    if overdue is not None:
        group = next(group for group in snapshot.groups if group.key == overdue.group)
        slot = slot_of(group, overdue.number)
        if slot is not None:
            return _report(Trouble(snapshot, group, slot, overdue.seconds))
    ended = ended_in(snapshot)
    first = ((group, _first_in_trouble(snapshot.order_check, group, ended)) for group in snapshot.groups)
    in_trouble = [(group, slot) for group, slot in first if slot is not None]
    if in_trouble:
        group, slot = min(in_trouble, key=lambda found: _says_little(found[0], found[1], ended))
        return _report(Trouble(snapshot, group, slot))
    cycle = find_cycle(snapshot)
    if cycle:
        return _cycle(snapshot, cycle)
    if snapshot.deadlocked:
        return _deadlock(snapshot)
    group = next((group for group in snapshot.groups if group.open), snapshot.groups[0])
    return _report(Trouble(snapshot, group, group.open[0] if group.open else _NOTHING))


_NOTHING = SlotRecord(0, ())


def _order(group: GroupRecord) -> tuple[Any, ...]:
    """Return what groups are put in order by: not the time of their making, which tells who came first."""
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


def _first_in_trouble(order_check: OrderCheck, group: GroupRecord, ended: Collection[int]) -> SlotRecord | None:
    """Return the first collective of a group that cannot complete any more; None where all still can.

    Where replicas are missing from the creation of a group, one that somebody waits in says more.
    """
    for slot in group.open:
        if len(partitions(order_check, group, slot)) > 1:
            return slot
        if (slot.number >= 0 or len(group.open) == 1) and gone(group, slot, ended):
            return slot
    return group.join if group.join is not None and gone(group, group.join, ended) else None


def cannot_complete(snapshot: Snapshot) -> bool:
    """Return whether a collective can never be complete, whatever the replicas do that have not ended.

    The snapshot may have been merged of parts of different moments: a member that one part shows to have gone on has
    posted what an earlier part, of others, still shows to be open.
    """
    ended = ended_in(snapshot)
    for group in snapshot.groups:
        if group.join is not None and gone(group, group.join, ended):
            return True
        for slot in group.open:
            never = (m.sequence <= slot.number or has_left(group, m, slot) for m in gone(group, slot, ended))
            if any(never) or len(partitions(snapshot.order_check, group, slot)) > 1:
                return True
    return False


def _says_little(group: GroupRecord, slot: SlotRecord, ended: Collection[int]) -> tuple[bool, bool]:
    """Whether nobody waits in a collective, and whether members are missing that may yet come to it.

    Those may wait in a collective of another group, and it is that one which keeps them.
    """
    return not slot.waiting, len(gone(group, slot, ended)) < len(missing(group, slot))


def _report(trouble: Trouble) -> CollectiveReport:
    """Return the report on one collective in trouble."""
    odd = trouble.odd
    return CollectiveReport(
        trouble.reason,
        trouble.sequence_number,
        tuple(_where_it_waits(each, trouble.waits) for each in trouble.replicas),
        trouble.suspects,
        render.text(trouble),
        trouble.group,
        tuple(
            Partition(
                replicas,
                str(post.call),
                post.location,
                majority=index == 0 and bool(odd) and odd[:1] != replicas[:1],
            )
            for index, (replicas, post, _) in enumerate(trouble.partitions)
        ),
        trouble.divergence,
        tuple(render.hints(trouble)),
    )


# Replicas that wait for each other.


def find_cycle(snapshot: Snapshot) -> list[tuple[int, Waiting]]:
    """Return a cycle of replicas that wait for each other in collectives, each with what it waits in for the next.

    Only those that the snapshot knows to be blocked are taken for waiting; empty where there is no cycle.
    """
    waits = waits_of(snapshot)
    every = {id(each.slot): each for own in waits.values() for each in own}
    blockers = {key: [member.replica_id for member in missing(*each)] for key, each in every.items()}
    blocked = {i: [id(each.slot) for each in waits[i]] for i in snapshot.blocked if i in waits}
    left = stuck(blocked, blockers)
    among_left = {key: [i for i in blockers[key] if i in left] for key in {blocked[i][0] for i in left}}
    cycle = shortest_cycle({i: among_left[blocked[i][0]] for i in left}, sorted(left))
    return [(i, every[blocked[i][0]]) for i in cycle]


def _cycle(snapshot: Snapshot, cycle: Sequence[tuple[int, Waiting]]) -> CollectiveReport:
    """Return the report on replicas of which each waits, in a collective of another group, for others of them."""
    on_it = list({id(each.slot): each for _, each in cycle}.values())
    waiters = [slot.waiting for _, slot in on_it]
    odd, everyone = _odd_on_a_cycle(on_it, waiters)
    among = {i for own in waiters for i in own}
    steps = []
    for group, slot in on_it:
        late = tuple(member.replica_id for member in missing(group, slot) if member.replica_id in among)
        for post, ids in slot.posts:
            own = tuple(i for i in ids if i in slot.waiting)
            if own:
                steps.append(render.Step(own, post, slot is group.join, slot.number, group, late, odd=own[0] in odd))
    if odd:
        steps.sort(key=lambda step: (step.odd, -len(step.replicas), step.replicas))
    waits, slot_of = waits_of(snapshot), {i: each for each, own in zip(on_it, waiters, strict=True) for i in own}
    calls: dict[int, Calls] = {}
    replicas = []
    for each in snapshot.replicas:
        elsewhere = waits.get(each.replica_id, [Waiting(snapshot.groups[0], _NOTHING)])[0]
        group, slot = slot_of.get(each.replica_id, elsewhere)
        if id(group) not in calls:
            calls[id(group)] = Calls(group)
        replicas.append(replica_report(each, calls[id(group)], slot))
    lines, advice = render.cycle_text(steps)
    return CollectiveReport(
        Reason.CYCLE,
        cycle[0][1].slot.number,
        tuple(replicas),
        tuple(sorted(odd or everyone)),
        on_a_screen(lines, advice),
        partitions=tuple(
            Partition(step.replicas, str(step.post.call), step.post.location, majority=bool(odd) and not step.odd)
            for step in steps
        ),
        advice=advice,
    )


def _odd_on_a_cycle(on_it: Sequence[Waiting], waiters: Sequence[Sequence[int]]) -> tuple[set[int], set[int]]:
    """Return the minority among replicas that wait for each other, empty on a tie, and all who may be to blame.

    Where groups have not been made by all their members, the majority of these decides; else that of the replicas
    which are members of all the groups, for they alone can be in one collective or the other.
    """
    odd: set[int] = set()
    for group, _ in on_it:
        creation = slot_of(group, -1)
        if creation is not None:
            makers = {i for _, ids in creation.posts for i in ids}
            others = set(group.key[0]) - makers
            odd |= min(makers, others, key=len) if len(makers) != len(others) else set()
    if odd:
        return odd, odd
    common = set.intersection(*(set(group.key[0]) for group, _ in on_it))
    sides = sorted((common & set(own) for own in waiters), key=len, reverse=True)
    everyone = set().union(*sides) or {i for own in waiters for i in own}
    return (set() if len(sides[0]) == len(sides[1]) else everyone - sides[0]), everyone


def _deadlock(snapshot: Snapshot) -> CollectiveReport:
    """Return the report on replicas that wait for each other: to blame are those that wait outside of collectives."""
    root = snapshot.groups[0]
    waits = waits_of(snapshot)
    replicas = tuple(_where_it_waits(each, waits) for each in replica_reports(snapshot, root))
    following = max((member.sequence for member in root.members), default=0)
    number = min((slot.number for slot in root.open if slot.number >= 0), default=following)
    running = {each.replica_id for each in replicas if each.state is ReplicaState.RUNNING}
    suspects = tuple(i for i in snapshot.deadlocked if i in running) or snapshot.deadlocked
    places = dict.fromkeys(at for each in replicas for at in (each.location or (each.stack or (None,))[-1],) if at)
    lines = [snapshot.circle, *render.source_lines([(at, False) for at in places][:_MOST_PLACES])]
    return CollectiveReport(Reason.DEADLOCK, number, replicas, suspects, on_a_screen(lines))


def _where_it_waits(report: ReplicaReport, waits: Mapping[int, Sequence[Waiting]]) -> ReplicaReport:
    """Return the report on a replica that may wait in a collective of another group than the one it is about."""
    group, slot = waits.get(report.replica_id, [(None, _NOTHING)])[0]
    post = slot.post_of(report.replica_id)
    if group is None or post is None or report.state is not ReplicaState.RUNNING:
        return report
    return replace(report, state=ReplicaState.WAITING, call=str(post.call), location=post.location, waits_for=None)
