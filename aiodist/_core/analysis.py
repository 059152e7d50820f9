"""Analysis: what a snapshot says of a disagreement. Who differs, in what, and where; the same whoever came first.

`analyse` is a function of the snapshot alone. Posts that mean the same are a partition; replicas that are gone
without the collective are one more. The largest is the majority, and the rest are the suspects; where none is larger
than every other, nobody is to blame, and all are suspects.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from aiodist._core import render
from aiodist._core.call import MESSAGE, OrderCheck, Post, difference, fingerprint, is_of_the_program
from aiodist._core.callers import ways_in_another_order
from aiodist._core.divergence import Past, Side, came_in_another_order, diverged
from aiodist._core.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    IncompleteCollectiveError,
    WorkerLostError,
)
from aiodist._core.report import (
    CallRecord,
    CollectiveReport,
    Divergence,
    Location,
    Partition,
    Reason,
    ReplicaReport,
    ReplicaState,
)
from aiodist._core.snapshot import GroupRecord, MemberRecord, Overdue, ReplicaFacts, SlotRecord, Snapshot
from aiodist._core.source import time_limit_around
from aiodist._core.text import clause, on_a_screen, place, upper
from aiodist._core.waitgraph import shortest_cycle, stuck

_REASONS = list(Reason)
_MOST_LIMITS = 3
_MOST_CALLS = 64
_MOST_CALLERS = 3
_MOST_PLACES = 6


def analyse(snapshot: Snapshot, *, overdue: Overdue | None = None) -> CollectiveReport:
    """Return what a snapshot says went wrong.

    Args:
        snapshot: what every replica called and where it is.
        overdue: the collective whose time is up, where that is what is wrong.
    """
    snapshot = replace(snapshot, groups=tuple(sorted(snapshot.groups, key=_order)))
    if overdue is not None:
        group = next(group for group in snapshot.groups if group.key == overdue.group)
        slot = _slot(group, overdue.number)
        if slot is not None:
            return _Case(snapshot, group, slot, overdue.seconds).report()
    ended = _ended(snapshot)
    first = ((group, _first_in_trouble(snapshot.order_check, group, ended)) for group in snapshot.groups)
    in_trouble = [(group, slot) for group, slot in first if slot is not None]
    if in_trouble:
        group, slot = min(in_trouble, key=lambda found: _says_little(found[0], found[1], ended))
        return _Case(snapshot, group, slot).report()
    cycle = find_cycle(snapshot)
    if cycle:
        return _cycle(snapshot, cycle)
    if snapshot.deadlocked:
        return _deadlock(snapshot)
    group = next((group for group in snapshot.groups if group.open), snapshot.groups[0])
    return _Case(snapshot, group, group.open[0] if group.open else _NOTHING).report()


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


def _slot(group: GroupRecord, number: int | None) -> SlotRecord | None:
    if number is None:
        return group.join
    return next((slot for slot in group.open if slot.number == number), None)


def _first_in_trouble(order_check: OrderCheck, group: GroupRecord, ended: Collection[int]) -> SlotRecord | None:
    """Return the first collective of a group that cannot complete any more; None where all still can.

    Where replicas are missing from the creation of a group, one that somebody waits in says more.
    """
    for slot in group.open:
        if len(_partitions(order_check, group, slot)) > 1:
            return slot
        if (slot.number >= 0 or len(group.open) == 1) and _gone(group, slot, ended):
            return slot
    return group.join if group.join is not None and _gone(group, group.join, ended) else None


def _gone(group: GroupRecord, slot: SlotRecord, ended: Collection[int]) -> list[MemberRecord]:
    """Return the members that are missing from a collective and will never come to it."""
    return [member for member in _missing(group, slot) if _is_gone(group, member, slot, ended)]


def cannot_complete(snapshot: Snapshot) -> bool:
    """Return whether a collective can never be complete, whatever the replicas do that have not ended.

    The snapshot may have been merged of parts of different moments: a member that one part shows to have gone on has
    posted what an earlier part, of others, still shows to be open.
    """
    ended = _ended(snapshot)
    for group in snapshot.groups:
        if group.join is not None and _gone(group, group.join, ended):
            return True
        for slot in group.open:
            gone = (m for m in _gone(group, slot, ended) if m.sequence <= slot.number or _left(group, m, slot))
            if any(True for _ in gone) or len(_partitions(snapshot.order_check, group, slot)) > 1:
                return True
    return False


def _says_little(group: GroupRecord, slot: SlotRecord, ended: Collection[int]) -> tuple[bool, bool]:
    """Whether nobody waits in a collective, and whether members are missing that may yet come to it.

    Those may wait in a collective of another group, and it is that one which keeps them.
    """
    return not slot.waiting, len(_gone(group, slot, ended)) < len(_missing(group, slot))


def _ended(snapshot: Snapshot) -> set[int]:
    return {replica.replica_id for replica in snapshot.replicas if replica.end is not None}


def _unknown(snapshot: Snapshot) -> frozenset[int]:
    """Return the ids of those of which nothing is known."""
    return frozenset(replica.replica_id for replica in snapshot.replicas if replica.unknown)


def _left(group: GroupRecord, member: MemberRecord, slot: SlotRecord) -> bool:
    """Whether a member was cancelled out of a collective; a join's number was not known when it was."""
    left_join = member.joined and member.abandoned is not None and member.abandoned >= member.sequence
    return left_join if slot is group.join else member.abandoned == slot.number and not left_join


def _is_gone(group: GroupRecord, member: MemberRecord, slot: SlotRecord, ended: Collection[int]) -> bool:
    """Whether a member that is missing from a collective will never come to it."""
    return member.replica_id in ended or _left(group, member, slot)


def _takes_part(member: MemberRecord, slot: SlotRecord) -> bool:
    return not member.joined or member.sequence > slot.number


def _missing(group: GroupRecord, slot: SlotRecord) -> list[MemberRecord]:
    """Return the members that have not come to a collective, or were cancelled out of it."""
    there = {i for _, replicas in slot.posts for i in replicas}
    is_join = slot is group.join
    return [
        member
        for member in group.members
        if _left(group, member, slot) or (member.replica_id not in there and (is_join or _takes_part(member, slot)))
    ]


class _Posted(NamedTuple):
    """A partition: replicas whose posts are the same collective, and the post of the first of them.

    Where they are the same but for the order in which the replicas have gone through the same callers, ``ways`` are the
    callers from which they came to this call and to those before it at that place, by the calls' numbers.
    """

    replicas: tuple[int, ...]
    post: Post
    ways: tuple[tuple[int, Location], ...] = ()


def _partitions(order_check: OrderCheck, group: GroupRecord, slot: SlotRecord) -> list[_Posted]:
    """Return who has come to a collective, by what their posts mean; the largest partition first."""
    left = {member.replica_id for member in group.members if _left(group, member, slot)}
    found: dict[Hashable, list[tuple[tuple[int, ...], Post]]] = {}
    for post, replicas in slot.posts:
        own = tuple(i for i in replicas if i not in left) if left else replicas
        if own:
            key = "join" if slot is group.join else fingerprint(order_check, post)
            found.setdefault(key, []).append((own, post))
    each = []
    for alike in found.values():
        first = min(alike, key=lambda one: min(one[0]))
        each.append(_Posted(tuple(sorted(i for replicas, _ in alike for i in replicas)), first[1]))
    if len(each) == 1 and order_check is OrderCheck.CALL_SITE and slot is not group.join:
        each = _by_ways(group, slot) or each
    return sorted(each, key=lambda one: (-len(one.replicas), one.replicas[0]))


def _by_ways(group: GroupRecord, slot: SlotRecord) -> list[_Posted]:
    """Return who has come to a collective by the ways that they came by, where the order of these differs."""
    first = slot.posts[0][0]
    if first.call.name is not None or len({post.path for post, _ in slot.posts}) == 1:
        return []
    calls = list(_calls_at(group, slot))
    ways = ways_in_another_order([each.posts for each in calls])
    found: dict[tuple[tuple[int, Location], ...], list[int]] = {}
    for replica_id, own in (ways or {}).items():
        numbers = reversed([each.number for each in calls[: len(own)]])
        key = tuple((number, way[-1].location) for number, way in zip(numbers, own, strict=True))
        found.setdefault(key, []).append(replica_id)
    post_of = {replica_id: post for post, ids in slot.posts for replica_id in ids}
    return [_Posted(tuple(sorted(own)), post_of[min(own)], way) for way, own in found.items()]


def _calls_at(group: GroupRecord, slot: SlotRecord) -> Iterator[SlotRecord]:
    """Yield the calls at the place of a collective that all members have made, itself first, the latest first."""
    place = slot.posts[0][0].path[0][:3]
    open_before = (each for each in reversed(group.open) if 0 <= each.number <= slot.number)
    for each in (*open_before, *reversed(group.history)):
        if each.posts[0][0].path[0][:3] == place:
            if sum(len(ids) for _, ids in each.posts) < len(group.key[0]):
                return
            yield each


# One collective in trouble.


class _Case:
    """A collective that cannot complete, the group that it is of, and who has come to it."""

    def __init__(self, snapshot: Snapshot, group: GroupRecord, slot: SlotRecord, seconds: float = 0.0) -> None:
        self._snapshot = snapshot
        self._group = group
        self._slot = slot
        self._seconds = seconds
        self._ended = _ended(snapshot)
        self._partitions = _partitions(snapshot.order_check, group, slot)
        self._missing = _missing(group, slot)
        self._gone = tuple(m.replica_id for m in self._missing if _is_gone(group, m, slot, self._ended))
        self._left = sorted(m.replica_id for m in self._missing if _left(group, m, slot))
        self._facts = {each.replica_id: each for each in snapshot.replicas}
        self._reports = {each.replica_id: each for each in replica_reports(snapshot, group, slot)}

    def report(self) -> CollectiveReport:
        """Return what is wrong with it."""
        reason = self._reason()
        odd = self._odd(reason)
        reports, facts, partitions = self._reports, self._facts, self._partitions
        waits = _waits(self._snapshot)
        running = [i for i, each in reports.items() if each.call is None and not each.state.ended and i in waits]
        races = _races([(reports[posted.replicas[0]], posted.post) for posted in partitions[:2]], facts)
        # of racing tasks, which may call on, nobody can say what they left out
        sides = None if races else self._sides()
        findings = render.Findings(
            reason=reason,
            sequence_number=self._slot.number,
            replicas=tuple(reports.values()),
            odd=odd,
            partitions=[(posted.replicas, posted.post) for posted in partitions],
            chains=() if races else _chains([_path(reports[each.replicas[0]], each.post) for each in partitions]),
            abandoned=tuple(self._left),
            elsewhere={i: _in_words(waits[i][0], i) for i in running},
            refusals={i: facts[i].refusal for i in self._left if facts[i].refusal},
            group=self._group.label(),
            unmade_by=self._unmade_by() if reason in (Reason.EXITED, Reason.TIMEOUT) else (),
            joining=self._slot is self._group.join,
            sides=sides,
            divergence=self._divergence(sides, tie=not odd),
            cancellations=_cancellations([facts[i] for i in self._left if not facts[i].refusal], self._slot),
            circle=self._snapshot.circle,
            unknown=_unknown(self._snapshot),
            races=races,
            timeout_seconds=self._seconds,
        )
        return CollectiveReport(
            reason=reason,
            sequence_number=self._slot.number,
            replicas=tuple(_where_it_waits(each, waits) for each in reports.values()),
            suspects=odd or self._everyone(),
            text=render.text(findings),
            group=findings.group,
            partitions=tuple(
                Partition(
                    posted.replicas,
                    str(posted.post.call),
                    posted.post.location,
                    majority=index == 0 and bool(odd) and odd[:1] != posted.replicas[:1],
                )
                for index, posted in enumerate(partitions)
            ),
            divergence=findings.divergence,
            advice=tuple(render.hints(findings)),
        )

    def _unmade_by(self) -> tuple[int, ...]:
        creation = _slot(self._group, -1)
        if creation is None or self._slot is creation:
            return ()
        return tuple(member.replica_id for member in _missing(self._group, creation))

    def _reason(self) -> Reason:
        if len(self._partitions) > 1:
            first = self._partitions[0].post
            found = (difference(self._snapshot.order_check, each.post, first) for each in self._partitions[1:])
            return min((each for each in found if each is not None), key=_REASONS.index, default=Reason.CALL_SITE)
        if self._missing and self._partitions and self._partitions[0].post.call.kind == MESSAGE:
            return Reason.UNMATCHED
        if any(m.replica_id in self._ended and m.sequence <= self._slot.number for m in self._missing):
            return Reason.EXITED
        return Reason.ABANDONED if self._left else Reason.TIMEOUT

    def _odd(self, reason: Reason) -> tuple[int, ...]:
        """Return the minority; empty on a tie, where nobody is to blame."""
        absent = {member.replica_id for member in self._missing}
        if reason is Reason.TIMEOUT:
            if not absent and self._partitions and self._partitions[0].post.call.kind == "merge_call":
                return (min(self._group.key[0]),)  # its merge function hangs
            return tuple(sorted(absent - _unknown(self._snapshot) or absent))
        there = [each.replicas for each in self._partitions]
        if len(there) == 1:  # who has joined waits, too
            there = [tuple(m.replica_id for m in self._group.members if m.replica_id not in absent)]
        sides = sorted(there + ([self._gone] if self._gone else []), key=len, reverse=True)
        if len(sides) == 1:  # nobody waits any more: it is the few that they have waited for, or that have left
            late = tuple(m.replica_id for m in self._group.members if m.replica_id not in self._gone)
            if len(late) == len(self._gone):
                return ()
            return late if 0 < len(late) < len(self._gone) else self._gone
        if len(sides[0]) == len(sides[1]):
            undecided = len(self._missing) - len(self._gone)  # they may still come to those who wait
            return self._gone if self._gone and undecided and len(there) == 1 else ()
        return tuple(sorted(i for side in sides[1:] for i in side))

    def _everyone(self) -> tuple[int, ...]:
        is_join = self._slot is self._group.join
        return tuple(m.replica_id for m in self._group.members if is_join or _takes_part(m, self._slot))

    def _sides(self) -> tuple[Side, Side] | None:
        """Return the majority and the largest other partition, or those that have ended; None where all are one."""
        if not self._partitions:
            return None
        usual = self._side(self._partitions[0].replicas)
        if len(self._partitions) > 1:
            return usual, self._side(self._partitions[1].replicas)
        gone = tuple(member.replica_id for member in self._missing if member.replica_id in self._ended)
        if not gone or self._slot.number < 0 or self._slot is self._group.join:
            return None
        ended_at = self._reports[gone[0]].ended_at
        return usual, Side(gone, (), (), (ended_at,) if ended_at is not None else (), "")

    def _side(self, replicas: tuple[int, ...]) -> Side:
        first, number = replicas[0], self._slot.number
        slots = [self._slot]  # the creation of a group stands for itself
        if number >= 0:
            slots = [slot for slot in self._group.open if slot.number >= number][:_MOST_CALLS]
        posted = [(slot.number, post) for slot in slots if (post := slot.post_of(first)) is not None]
        return Side(
            replicas,
            [CallRecord(number, str(post.call), post.location) for number, post in posted],
            [fingerprint(self._snapshot.order_check, post) for _, post in posted],
            _path(self._reports[first], self._slot.post_of(first)),
            self._facts[first].handles,
        )

    def _divergence(self, sides: tuple[Side, Side] | None, *, tie: bool) -> Divergence | None:
        if sides is None:
            return None
        if len(self._partitions) > 1 and self._partitions[0].ways:
            return came_in_another_order(*sides, self._partitions[0].ways, self._partitions[1].ways)
        return diverged(self._past(), *sides, tie=tie)

    def _past(self) -> Past:
        """Return the calls that all made before, as far as they are kept; of open ones those that wait for a result."""
        check, group = self._snapshot.order_check, self._group
        matched = (s for s in group.open if len(_partitions(check, group, s)) == 1 and not _missing(group, s))
        before = [slot for slot in (*group.history, *matched) if 0 <= slot.number < self._slot.number]
        firsts = [slot.posts[0][0] for slot in before]
        keys = {id(post): fingerprint(check, post) for post in {id(post): post for post in firsts}.values()}
        calls = [
            CallRecord(slot.number, str(post.call), post.location) for slot, post in zip(before, firsts, strict=True)
        ]
        return Past(calls, [keys[id(post)] for post in firsts], whole=not before or before[0].number == 0)


def _in_words(waiting: Waiting, replica_id: int) -> tuple[str, Location]:
    """Say in which collective of which group a replica waits, and where it called it."""
    group, slot = waiting
    post = slot.post_of(replica_id)
    assert post is not None, "it waits in it"
    number = "" if slot is group.join else f" #{slot.number}"
    return f"waits in {post.call}{number} of {group.label() or 'the run'}", post.location


def _path(replica: ReplicaReport, post: Post | None) -> tuple[Location, ...]:
    """Return the places from a replica's function down to its call, where it waits at the call itself.

    Where it waits now says nothing of a call whose handle it kept; of that the nearest callers are known.
    """
    location = replica.location
    if location is None:
        return ()
    here = replica.stack[-1] if replica.stack else None
    if here is not None and here == location._replace(function=here.function):
        return (*(at for at in replica.stack[:-1] if is_of_the_program(at.file)), location)
    return tuple(each.location for each in reversed(post.path)) if post is not None else (location,)


def _chains(paths: Sequence[tuple[Location, ...]]) -> list[tuple[Location, ...]]:
    """Return the callers' places of each path from the first one on that is not the same on all."""
    common = 0
    for places in zip(*paths, strict=False):
        if len(set(places)) > 1:
            break
        common += 1
    return [path[common:-1][:_MOST_CALLERS] for path in paths]


def _races(firsts: Sequence[tuple[ReplicaReport, Post]], facts: Mapping[int, ReplicaFacts]) -> tuple[str, ...]:
    """Say in which tasks the replicas that part are at their calls; nothing where none of them is in a child task.

    A replica's own task races with a child that it does not wait for.
    """
    alike: dict[str, list[int]] = {}
    children = 0
    for replica, post in firsts:
        call, here = replica.location, replica.stack[-1] if replica.stack else None
        if call is None or here is None:
            return ()
        known = facts[replica.replica_id]
        own = (here.file, here.line) == (call.file, call.line)
        places = {(at.file, at.line) for at in post.path[:_MOST_CALLERS]}
        tasks = [task for at, task in known.child_calls if (at.file, at.line) in places]
        if tasks and not own:
            children += 1
            alike.setdefault(tasks[0], []).append(replica.replica_id)
        elif own and known.child_calls:
            alike.setdefault(f"its own task ({place(call)})", []).append(replica.replica_id)
        else:
            return ()
    awaits = any("task" in (facts[replica.replica_id].waits_for or "") for replica, _ in firsts)
    if len(firsts) != 2 or not children or (children == 1 and awaits):
        return ()
    told = sorted((ids, task) for task, ids in alike.items())
    return tuple(f"{upper(clause(sorted(ids), 'calls'))} in {task}." for ids, task in told)


def _cancellations(replicas: Iterable[ReplicaFacts], slot: SlotRecord) -> tuple[str, ...]:
    """Say out of which call replicas were cancelled, and why: a sibling's failure, or a time limit around the call."""
    alike: dict[str, list[int]] = {}
    for replica in replicas:
        post = slot.post_of(replica.replica_id)
        called = () if post is None else (post.path[0][:2],)
        limits = (time_limit_around(file, line) for file, line in (*replica.cancelled_in, *called))
        limit = next((each for each in limits if each), "")
        why = f": {replica.cancelled_by}" if replica.cancelled_by else f", inside {limit}" if limit else ""
        if post is not None:
            what = f"{post.call} at {place(post.location)}{why}."
            alike.setdefault(what, []).append(replica.replica_id)
    return tuple(
        f"{upper(clause(members, 'was'))} cancelled out of {what}"
        for what, members in list(alike.items())[:_MOST_LIMITS]
    )


# What each replica did.


def replica_reports(snapshot: Snapshot, group: GroupRecord, slot: SlotRecord | None = None) -> list[ReplicaReport]:
    """Return what every member of a group does, by id.

    Args:
        snapshot: the whole picture.
        group: the group whose collectives are reported.
        slot: the collective that is asked about; None for none in particular.
    """
    calls = _Calls(group)
    facts = {each.replica_id: each for each in snapshot.replicas}
    return [_replica(facts[m.replica_id], calls, slot) for m in group.members if m.replica_id in facts]


def _replica(known: ReplicaFacts, calls: _Calls, slot: SlotRecord | None) -> ReplicaReport:
    record = calls.waits_in(known, slot)
    waits = record is not None and record.sequence_number >= 0
    state = known.end or (ReplicaState.WAITING if waits else ReplicaState.RUNNING)
    return ReplicaReport(
        replica_id=known.replica_id,
        device=known.device,
        state=state,
        call=record.call if record else None,
        location=record.location if record else None,
        history=calls.history(known.replica_id),
        stack=() if state.ended else known.stack,
        returned=known.returned,
        ended_at=known.ended_at,
        waits_for=known.waits_for if state is ReplicaState.RUNNING else None,
    )


class _Calls:
    """What the members of a group called. Most called the same, so histories that are alike are one tuple."""

    def __init__(self, group: GroupRecord) -> None:
        self._group = group
        self._members = {member.replica_id: member for member in group.members}
        self._common: list[CallRecord] = []
        self._own: dict[int, list[CallRecord]] = {}
        self._open: dict[int, dict[int, CallRecord]] = {}
        self._histories: dict[tuple[CallRecord, ...], tuple[CallRecord, ...]] = {}
        for slot in group.history:
            self._add(slot)
        for slot in (*group.open, *([group.join] if group.join is not None else [])):
            self._open[slot.number] = self._add(slot)

    def _add(self, slot: SlotRecord) -> dict[int, CallRecord]:
        """Add what was called in a slot to the histories, and return it by replica."""
        calls = {}
        for post, replicas in slot.posts:
            record = CallRecord(slot.number, str(post.call), post.location)
            calls.update(dict.fromkeys(replicas, record))
            if slot.number < 0:
                continue
            if len(replicas) == len(self._members):
                self._common.append(record)
            else:
                for replica_id in replicas:
                    self._own.setdefault(replica_id, []).append(record)
        return calls

    def history(self, replica_id: int) -> tuple[CallRecord, ...]:
        """Return the last calls of a replica, newest last."""
        own = tuple(self._own.get(replica_id, ()))
        if own not in self._histories:
            self._histories[own] = tuple(sorted((*self._common, *own), key=lambda record: record.sequence_number))
        return self._histories[own]

    def waits_in(self, known: ReplicaFacts, slot: SlotRecord | None) -> CallRecord | None:
        """Return the collective that a replica waits in: this one if it is there, else the first that it has not left.

        Nobody waits in the creation of a group, so there it is enough to have been there.
        """
        group, member = self._group, self._members.get(known.replica_id)
        if member is None or (known.end is not None and (slot is None or slot.number >= 0)):
            return None
        candidates = [each for each in group.open if each.number >= 0]
        if slot is not None and slot.number in self._open:
            candidates.insert(0, slot)
        if member.joined and group.join is not None:
            candidates = [group.join]
        for each in candidates:
            if known.replica_id in self._open[each.number] and not _left(group, member, each):
                return self._open[each.number][known.replica_id]
        return None


# Replicas that wait for each other.


class Waiting(NamedTuple):
    """An open collective that replicas wait in, and the group that it is of."""

    group: GroupRecord
    slot: SlotRecord


def find_cycle(snapshot: Snapshot) -> list[tuple[int, Waiting]]:
    """Return a cycle of replicas that wait for each other in collectives, each with what it waits in for the next.

    Only those that the snapshot knows to be blocked are taken for waiting; empty where there is no cycle.
    """
    waits = _waits(snapshot)
    every = {id(each.slot): each for own in waits.values() for each in own}
    blockers = {key: [member.replica_id for member in _missing(*each)] for key, each in every.items()}
    blocked = {i: [id(each.slot) for each in waits[i]] for i in snapshot.blocked if i in waits}
    left = stuck(blocked, blockers)
    among_left = {key: [i for i in blockers[key] if i in left] for key in {blocked[i][0] for i in left}}
    cycle = shortest_cycle({i: among_left[blocked[i][0]] for i in left}, sorted(left))
    return [(i, every[blocked[i][0]]) for i in cycle]


def _waits(snapshot: Snapshot) -> dict[int, list[Waiting]]:
    """Return what each replica waits in, group by group."""
    waits: dict[int, list[Waiting]] = {}
    for group in snapshot.groups:
        for slot in (*group.open, *([group.join] if group.join is not None else [])):
            for replica_id in slot.waiting:
                waits.setdefault(replica_id, []).append(Waiting(group, slot))
    return waits


def _cycle(snapshot: Snapshot, cycle: Sequence[tuple[int, Waiting]]) -> CollectiveReport:
    """Return the report on replicas of which each waits, in a collective of another group, for others of them."""
    on_it = list({id(each.slot): each for _, each in cycle}.values())
    waiters = [slot.waiting for _, slot in on_it]
    odd, everyone = _odd_on_a_cycle(on_it, waiters)
    among = {i for own in waiters for i in own}
    steps = []
    for group, slot in on_it:
        missing = tuple(member.replica_id for member in _missing(group, slot) if member.replica_id in among)
        for post, ids in slot.posts:
            own = tuple(i for i in ids if i in slot.waiting)
            if own:
                steps.append(render.Step(own, post, slot is group.join, slot.number, group, missing, odd=own[0] in odd))
    if odd:
        steps.sort(key=lambda step: (step.odd, -len(step.replicas), step.replicas))
    waits, slot_of = _waits(snapshot), {i: each for each, own in zip(on_it, waiters, strict=True) for i in own}
    calls: dict[int, _Calls] = {}
    replicas = []
    for each in snapshot.replicas:
        elsewhere = waits.get(each.replica_id, [Waiting(snapshot.groups[0], _NOTHING)])[0]
        group, slot = slot_of.get(each.replica_id, elsewhere)
        if id(group) not in calls:
            calls[id(group)] = _Calls(group)
        replicas.append(_replica(each, calls[id(group)], slot))
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
        creation = _slot(group, -1)
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
    waits = _waits(snapshot)
    replicas = tuple(_where_it_waits(each, waits) for each in replica_reports(snapshot, root))
    following = max((member.sequence for member in root.members), default=0)
    number = min((slot.number for slot in root.open if slot.number >= 0), default=following)
    running = {each.replica_id for each in replicas if each.state is ReplicaState.RUNNING}
    suspects = tuple(i for i in snapshot.deadlocked if i in running) or snapshot.deadlocked
    places = dict.fromkeys(at for each in replicas for at in (each.location or (each.stack or (None,))[-1],) if at)
    lines = [*snapshot.circle.split("\n"), *render.source_lines([(at, False) for at in places][:_MOST_PLACES])]
    return CollectiveReport(Reason.DEADLOCK, number, replicas, suspects, on_a_screen(lines))


def _where_it_waits(report: ReplicaReport, waits: Mapping[int, Sequence[Waiting]]) -> ReplicaReport:
    """Return the report on a replica that may wait in a collective of another group than the one it is about."""
    group, slot = waits.get(report.replica_id, [(None, _NOTHING)])[0]
    post = slot.post_of(report.replica_id)
    if group is None or post is None or report.state is not ReplicaState.RUNNING:
        return report
    return replace(report, state=ReplicaState.WAITING, call=str(post.call), location=post.location, waits_for=None)
