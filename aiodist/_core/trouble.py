"""A snapshot's open collectives: who is in each, who never will be, and everything that reports say about one.

Replicas whose posts mean the same are a partition; replicas that are gone without the collective are one more. The
largest is the majority, and the rest are the suspects; if none is larger than every other, nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import chain, takewhile
from typing import NamedTuple

from aiodist._core.call import MESSAGE, OrderCheck, Post, difference, fingerprint, is_of_the_program
from aiodist._core.callers import ways_in_another_order
from aiodist._core.divergence import Past, Side, came_in_another_order, diverged
from aiodist._core.report import CallRecord, Divergence, ReplicaReport
from aiodist._core.snapshot import GroupKey, GroupRecord, MemberRecord, SlotRecord, Snapshot
from aiodist._core.source import time_limit_around
from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.text import alike, clause, place, upper

_REASONS = list(Reason)
_MOST_LIMITS = 3
_MOST_CALLS = 64
_MOST_CALLERS = 3
NOTHING = SlotRecord(0, ())
"""Stands for a collective where none is open."""


class Picture:
    """A snapshot, indexed.

    Attributes:
        facts: what is known of each replica, by id.
        ended, unknown: the ids of replicas that have ended, and of those of which nothing is known.
        open: by group, its open collectives, by number, and then its join.
        waits: for each replica, the collectives that it waits in, by group.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.order_check = snapshot.order_check
        self.facts = {each.replica_id: each for each in snapshot.replicas}
        self.ended = {each.replica_id for each in snapshot.replicas if each.end is not None}
        self.unknown = {each.replica_id for each in snapshot.replicas if each.unknown}
        self.open = {group.key: [Collective(self, group, slot) for slot in group.left] for group in snapshot.groups}
        self.waits: dict[int, list[Collective]] = {}
        for each in self.every_open():
            for replica_id in each.slot.waiting:
                self.waits.setdefault(replica_id, []).append(each)
        self._histories: dict[GroupKey, dict[int, tuple[CallRecord, ...]]] = {}

    def every_open(self) -> Iterator[Collective]:
        """Yield the open collectives of all groups."""
        return chain.from_iterable(self.open.values())

    def find(self, group: GroupKey, number: int | None) -> Collective | None:
        """Return an open collective by its number, or with None the join."""
        for each in self.open[group]:
            if each.joining if number is None else (each.number == number and not each.joining):
                return each
        return None

    def histories(self, group: GroupRecord) -> dict[int, tuple[CallRecord, ...]]:
        """Return the last calls of each member of a group, newest last."""
        if group.key not in self._histories:
            self._histories[group.key] = _histories(group)
        return self._histories[group.key]


def _record(number: int, post: Post) -> CallRecord:
    return CallRecord(number, str(post.call), post.location)


def _histories(group: GroupRecord) -> dict[int, tuple[CallRecord, ...]]:
    """Return what the members called. Most called the same, so equal histories are one tuple."""
    common: list[CallRecord] = []
    own: dict[int, list[CallRecord]] = {member.replica_id: [] for member in group.members}
    for slot in (*group.history, *group.left):
        for post, replicas in slot.posts if slot.number >= 0 else ():
            record = _record(slot.number, post)
            for calls in [common] if len(replicas) == len(group.members) else map(own.__getitem__, replicas):
                calls.append(record)
    whole = {
        calls: tuple(sorted((*common, *calls), key=lambda record: record.sequence_number))
        for calls in set(map(tuple, own.values()))
    }
    return {replica_id: whole[tuple(calls)] for replica_id, calls in own.items()}


class Posted(NamedTuple):
    """A partition: replicas whose posts are the same collective, and the post of the first of them.

    If the posts differ only in the order of their callers, ``ways`` are the callers of this call and of earlier calls
    at the same place, with the calls' numbers.
    """

    replicas: tuple[int, ...]
    post: Post
    ways: tuple[tuple[int, Location], ...] = ()


class Collective:
    """An open collective: who is in it, what is wrong with it, and who is to blame.

    Attributes:
        picture, group, slot: its snapshot, its group, and what is known about it.
        timeout_seconds: how long it had from the first arrival; 0 if there was no limit.
    """

    def __init__(self, picture: Picture, group: GroupRecord, slot: SlotRecord, timeout_seconds: float = 0.0) -> None:
        self.picture = picture
        self.group = group
        self.slot = slot
        self.timeout_seconds = timeout_seconds
        self.number = slot.number
        self.joining = slot is group.join

    @property
    def label(self) -> str | None:
        """What reports call its group; None for the run's own."""
        return self.group.label()

    @property
    def creation(self) -> Collective | None:
        """The creation of its group, if some of the members have not made the group."""
        return self.picture.find(self.group.key, -1)

    # Who has come to it, and who is missing.

    @cached_property
    def records(self) -> dict[int, CallRecord]:
        """Each replica's call in this collective, by id."""
        records = ((_record(self.number, post), ids) for post, ids in self.slot.posts)
        return {replica_id: record for record, ids in records for replica_id in ids}

    def left(self, member: MemberRecord) -> bool:
        """Return whether a member was cancelled out of it; a join had no number yet at that time."""
        left_join = member.joined and member.abandoned is not None and member.abandoned >= member.sequence
        return left_join if self.joining else member.abandoned == self.number and not left_join

    def _takes_part(self, member: MemberRecord) -> bool:
        return self.joining or not member.joined or member.sequence > self.number

    @cached_property
    def missing(self) -> list[MemberRecord]:
        """The members that have not reached it, or were cancelled out of it."""
        there = {i for _, replicas in self.slot.posts for i in replicas}
        return [m for m in self.group.members if self.left(m) or (m.replica_id not in there and self._takes_part(m))]

    @cached_property
    def gone(self) -> list[MemberRecord]:
        """The missing members that will never reach it."""
        return [each for each in self.missing if each.replica_id in self.picture.ended or self.left(each)]

    @property
    def exited(self) -> list[int]:
        """The ids of the missing members that ended before they reached it."""
        own = (m for m in self.missing if m.replica_id in self.picture.ended and m.sequence <= self.number)
        return [member.replica_id for member in own]

    @property
    def merges(self) -> bool:
        """Whether it calls a merge function."""
        return bool(self.partitions) and self.partitions[0].post.call.kind == "merge_call"

    @cached_property
    def partitions(self) -> list[Posted]:
        """The replicas that have reached it, by the meaning of their posts; the largest partition first."""
        left = {member.replica_id for member in self.group.members if self.left(member)}
        found: dict[Hashable, dict[int, Post]] = {}
        for post, replicas in self.slot.posts:
            key = "join" if self.joining else fingerprint(self.picture.order_check, post)
            found.setdefault(key, {}).update((i, post) for i in replicas if i not in left)
        each = [Posted(tuple(sorted(own)), own[min(own)]) for own in found.values() if own]
        if len(each) == 1 and self.picture.order_check is OrderCheck.CALL_SITE and not self.joining:
            each = self._by_ways() or each
        return sorted(each, key=lambda one: (-len(one.replicas), one.replicas[0]))

    def _by_ways(self) -> list[Posted]:
        """Return partitions by the ways in which replicas reached it, if the order of these ways differs."""
        posts = self.slot.posts
        if posts[0][0].call.name is not None or len({post.path for post, _ in posts}) == 1:
            return []
        calls = list(self._calls_here())
        ways = ways_in_another_order([each.posts for each in calls])
        told = []
        for replica_id, own in (ways or {}).items():
            numbers = reversed([each.number for each in calls[: len(own)]])
            way = tuple((number, way[-1].location) for number, way in zip(numbers, own, strict=True))
            told.append((way, replica_id))
        post_of = {replica_id: post for post, ids in posts for replica_id in ids}
        return [Posted(tuple(sorted(own)), post_of[min(own)], way) for way, own in alike(told).items()]

    def _calls_here(self) -> Iterator[SlotRecord]:
        """Yield the calls at its place that all members have made, newest first, beginning with itself."""
        here = self.slot.posts[0][0].path[0][:3]
        open_before = (each for each in reversed(self.group.open) if 0 <= each.number <= self.number)
        for each in (*open_before, *reversed(self.group.history)):
            if each.posts[0][0].path[0][:3] == here:
                if sum(len(ids) for _, ids in each.posts) < len(self.group.key[0]):
                    return
                yield each

    # What the replicas do.

    @cached_property
    def replicas(self) -> tuple[ReplicaReport, ...]:
        """What every member of the group does, by id."""
        histories = self.picture.histories(self.group)
        every = [self, *self.picture.open[self.group.key]]  # looked up once: a group of thousands has a large key
        return tuple(
            self._report(member, histories[member.replica_id], self._waits_in(member, every))
            for member in self.group.members
            if member.replica_id in self.picture.facts
        )

    def _report(
        self, member: MemberRecord, history: tuple[CallRecord, ...], record: CallRecord | None
    ) -> ReplicaReport:
        known = self.picture.facts[member.replica_id]
        waits = record is not None and record.sequence_number >= 0
        state = known.end or (ReplicaState.WAITING if waits else ReplicaState.RUNNING)
        return ReplicaReport(
            replica_id=member.replica_id,
            device=known.device,
            state=state,
            call=record.call if record else None,
            location=record.location if record else None,
            history=history,
            stack=() if state.ended else known.stack,
            returned=known.returned,
            ended_at=known.ended_at,
            waits_for=known.waits_for if state is ReplicaState.RUNNING else None,
        )

    def _waits_in(self, member: MemberRecord, every: Sequence[Collective]) -> CallRecord | None:
        """Return what a member waits in: the first of these collectives of its group that it has posted and not left.

        Nobody waits in the creation of a group; having posted it is enough.
        """
        if self.number >= 0 and member.replica_id in self.picture.ended:
            return None
        if member.joined and every[-1].joining:
            every = every[-1:]  # whoever has joined is nowhere else
        for each in every:
            may_wait = each is self or (each.number >= 0 and each.joining == member.joined)
            if may_wait and member.replica_id in each.records and not each.left(member):
                return each.records[member.replica_id]
        return None

    @cached_property
    def reports(self) -> dict[int, ReplicaReport]:
        """The replicas' reports by id."""
        return {each.replica_id: each for each in self.replicas}

    @cached_property
    def abandoned(self) -> list[int]:
        """The ids of the replicas that were cancelled out of it."""
        return sorted(member.replica_id for member in self.missing if self.left(member))

    def with_group(self, call: str) -> str:
        """Return a call as text, with the collective's number and group."""
        return f"{call}{'' if self.joining else f' #{self.number}'} of {self.label or 'the run'}"

    # What is wrong, and who is to blame.

    @cached_property
    def reason(self) -> Reason:
        """What is wrong, as in `CollectiveReport`."""
        if len(self.partitions) > 1:
            first = self.partitions[0].post
            found = (difference(self.picture.order_check, each.post, first) for each in self.partitions[1:])
            return min((each for each in found if each is not None), key=_REASONS.index, default=Reason.CALL_SITE)
        if self.missing and self.partitions and self.partitions[0].post.call.kind == MESSAGE:
            return Reason.UNMATCHED
        if self.exited:
            return Reason.EXITED
        return Reason.ABANDONED if self.abandoned else Reason.TIMEOUT

    @cached_property
    def odd(self) -> tuple[int, ...]:
        """The minority, which is marked; empty on a tie, where nobody is to blame."""
        absent = {member.replica_id for member in self.missing}
        if self.reason is Reason.TIMEOUT:
            if not absent and self.merges:
                return (min(self.group.key[0]),)  # its merge function hangs
            return tuple(sorted(absent - self.picture.unknown or absent))
        there, gone = [each.replicas for each in self.partitions], tuple(member.replica_id for member in self.gone)
        if len(there) == 1:  # who has joined waits, too
            there = [tuple(m.replica_id for m in self.group.members if m.replica_id not in absent)]
        sides = sorted(there + ([gone] if gone else []), key=len, reverse=True)
        if len(sides) == 1:  # nobody waits any more: it is the few that they have waited for, or that have left
            late = tuple(m.replica_id for m in self.group.members if m.replica_id not in gone)
            if len(late) == len(gone):
                return ()
            return late if 0 < len(late) < len(gone) else gone
        if len(sides[0]) == len(sides[1]):
            undecided = len(self.missing) - len(gone)  # they may still come to those who wait
            return gone if gone and undecided and len(there) == 1 else ()
        return tuple(sorted(i for side in sides[1:] for i in side))

    @property
    def suspects(self) -> tuple[int, ...]:
        """The minority; on a tie all replicas that could have taken part."""
        return self.odd or tuple(m.replica_id for m in self.group.members if self._takes_part(m))

    @property
    def unmade_by(self) -> tuple[int, ...]:
        """The members that have not made the group, if that may be why they are missing."""
        if self.creation is None or self.number < 0 or self.reason not in (Reason.EXITED, Reason.TIMEOUT):
            return ()
        return tuple(member.replica_id for member in self.creation.missing)

    # Where they call from, and how they diverged.

    @property
    def chains(self) -> list[tuple[Location, ...]]:
        """For each partition, the callers' places, from the first that differs between partitions down to the call."""
        paths = [self._path(each) for each in self.partitions] if not self.races else []
        common = sum(1 for _ in takewhile(lambda places: len(set(places)) == 1, zip(*paths, strict=False)))
        return [path[common:-1][:_MOST_CALLERS] for path in paths]

    def _path(self, partition: Posted) -> tuple[Location, ...]:
        """Return the places from a replica's function down to its call, if it waits at the call itself.

        If it kept the handle and waits elsewhere, only the call's nearest callers are known.
        """
        replica = self.reports[partition.replicas[0]]
        location, here = replica.location, replica.stack[-1] if replica.stack else None
        if location is None:
            return ()
        if here is not None and here == location._replace(function=here.function):
            return (*(at for at in replica.stack[:-1] if is_of_the_program(at.file)), location)
        return tuple(each.location for each in reversed(partition.post.path))

    @cached_property
    def races(self) -> tuple[str, ...]:
        """Sentences on the tasks in which differing replicas make their calls; empty if none is in a child task.

        A replica's own task races with a child that it does not wait for.
        """
        calls_in = []
        children, awaits = 0, False
        for replica_id, post in ((each.replicas[0], each.post) for each in self.partitions[:2]):
            replica, known = self.reports[replica_id], self.picture.facts[replica_id]
            if replica.location is None or not replica.stack:
                return ()
            own = replica.stack[-1][:2] == replica.location[:2]
            places = {at[:2] for at in post.path[:_MOST_CALLERS]}
            tasks = [task for at, task in known.child_calls if at[:2] in places]
            if not known.child_calls or not (own or tasks):
                return ()
            if tasks and not own:
                children += 1
            calls_in.append((f"its own task ({place(replica.location)})" if own else tasks[0], replica_id))
            awaits = awaits or "task" in (known.waits_for or "")
        if len(self.partitions) < 2 or not children or (children == 1 and awaits):
            return ()
        told = sorted((ids, task) for task, ids in alike(calls_in).items())
        return tuple(f"{upper(clause(sorted(ids), 'calls'))} in {task}." for ids, task in told)

    @cached_property
    def sides(self) -> tuple[Side, Side] | None:
        """The majority and the largest other partition, or the replicas that have ended; None if all agree.

        Also None for racing tasks: they may make further calls, so nobody can say which they left out.
        """
        if not self.partitions or self.races:
            return None
        usual = self._side(self.partitions[0])
        if len(self.partitions) > 1:
            return usual, self._side(self.partitions[1])
        ended = tuple(member.replica_id for member in self.missing if member.replica_id in self.picture.ended)
        if not ended or self.number < 0 or self.joining:
            return None
        ended_at = self.reports[ended[0]].ended_at
        return usual, Side(ended, (), (), (ended_at,) if ended_at is not None else (), "")

    def _side(self, partition: Posted) -> Side:
        first, slots = partition.replicas[0], [self.slot]  # the creation of a group stands for itself
        if self.number >= 0:
            slots = [slot for slot in self.group.open if slot.number >= self.number][:_MOST_CALLS]
        posted = [(slot.number, post) for slot in slots if (post := slot.post_of(first)) is not None]
        return Side(
            partition.replicas,
            [_record(number, post) for number, post in posted],
            [fingerprint(self.picture.order_check, post) for _, post in posted],
            self._path(partition),
            self.picture.facts[first].handles,
        )

    @cached_property
    def divergence(self) -> Divergence | None:
        """How they diverged, if that is known."""
        if self.sides is None:
            return None
        if len(self.partitions) > 1 and self.partitions[0].ways:
            return came_in_another_order(*self.sides, self.partitions[0].ways, self.partitions[1].ways)
        return diverged(self._past(), *self.sides, tie=not self.odd)

    def _past(self) -> Past:
        """Return the calls that all made before, as far as they are kept, with open ones that all have made."""
        check, group = self.picture.order_check, self.group
        matched = (each.slot for each in self.picture.open[group.key] if len(each.partitions) == 1 and not each.missing)
        before = [slot for slot in (*group.history, *matched) if 0 <= slot.number < self.number]
        firsts = [slot.posts[0][0] for slot in before]
        calls = [_record(slot.number, post) for slot, post in zip(before, firsts, strict=True)]
        return Past(calls, [fingerprint(check, post) for post in firsts], whole=not before or before[0].number == 0)

    @cached_property
    def cancellations(self) -> tuple[str, ...]:
        """Sentences on the calls that replicas were cancelled out of, and why: a sibling's failure, or a time limit."""
        told = []
        for known in (self.picture.facts[i] for i in self.abandoned):
            post = self.slot.post_of(known.replica_id)
            if post is None:
                continue
            places = [at for at in (*known.cancelled_in, post.path[0][:2]) if is_of_the_program(at[0])]
            limit = next((limit for at in places if (limit := time_limit_around(*at))), "")
            why = f": {known.cancelled_by}" if known.cancelled_by else f", inside {limit}" if limit else ""
            told.append((f"{post.call} at {place(post.location)}{why}", known.replica_id))
        return tuple(
            f"{upper(clause(members, 'was'))} cancelled out of {what}."
            for what, members in list(alike(told).items())[:_MOST_LIMITS]
        )
