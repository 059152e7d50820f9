"""A snapshot's open collectives: which replicas are in each, which never will be, and what reports say about one.

Replicas whose posts mean the same are a partition; replicas that will never reach the collective are one more. The
largest is the majority, and the rest are the suspects; if none is larger than every other, nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import chain, takewhile
from typing import NamedTuple

from aiodist._core.call import MESSAGE, OrderCheck, Post, difference, fingerprint, is_of_the_program
from aiodist._core.callers import callers_in_another_order
from aiodist._core.divergence import Past, Side, diverged, reached_in_another_order
from aiodist._core.report import CallRecord, Divergence, ReplicaReport
from aiodist._core.snapshot import GroupKey, GroupRecord, MemberRecord, SlotRecord, Snapshot
from aiodist._core.source import time_limit_around
from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.text import capitalised, clause, grouped, place

_REASONS = list(Reason)
_MOST_LIMITS = 3
_MOST_CALLS = 64
_MOST_CALLERS = 3
NO_SLOT = SlotRecord(0, ())
"""Stands for a collective where none is open."""


class SnapshotIndex:
    """A snapshot, indexed by replicas and groups."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.facts = {each.replica_id: each for each in snapshot.replicas}
        self.ended = {each.replica_id for each in snapshot.replicas if each.end is not None}
        self.failed = any(each.end is ReplicaState.FAILED for each in snapshot.replicas)
        self.unknown = {each.replica_id for each in snapshot.replicas if each.unknown}
        self.open = {each.key: [Collective(self, each, slot) for slot in each.unfinished] for each in snapshot.groups}
        waits = ((replica_id, each) for each in self.open_collectives() for replica_id in each.slot.waiting)
        self.waits = grouped(waits)  # the collectives that each replica waits in, by group
        self._histories: dict[GroupKey, dict[int, tuple[CallRecord, ...]]] = {}

    def open_collectives(self) -> Iterator[Collective]:
        """Yield the open collectives of all groups."""
        return chain.from_iterable(self.open.values())

    def find(self, group: GroupKey, number: int | None) -> Collective | None:
        """Return an open collective by its number, or the join if that is None."""
        for each in self.open[group]:
            if each.is_join if number is None else (each.number == number and not each.is_join):
                return each
        return None

    def histories(self, group: GroupRecord) -> dict[int, tuple[CallRecord, ...]]:
        """Return the last calls of each member of a group, newest last. Equal histories are one tuple."""
        if group.key not in self._histories:
            common: list[CallRecord] = []
            own: dict[int, list[CallRecord]] = {member.replica_id: [] for member in group.members}
            for slot in (*group.history, *group.unfinished):
                for post, replicas in slot.posts if slot.number >= 0 else ():
                    record = _record(slot.number, post)
                    for calls in [common] if len(replicas) == len(own) else [own[i] for i in replicas]:
                        calls.append(record)
            whole = {
                calls: tuple(sorted((*common, *calls), key=lambda record: record.sequence_number))
                for calls in set(map(tuple, own.values()))
            }
            self._histories[group.key] = {replica_id: whole[tuple(calls)] for replica_id, calls in own.items()}
        return self._histories[group.key]


def _record(number: int, post: Post) -> CallRecord:
    return CallRecord(number, str(post.call), post.location)


class Posted(NamedTuple):
    """A partition: replicas whose posts are the same collective, and the post of the first of them.

    If the posts differ only in the order of their callers, ``callers`` are those of this call and of earlier calls at
    the same place, with the calls' numbers.
    """

    replicas: tuple[int, ...]
    post: Post
    callers: tuple[tuple[int, Location], ...] = ()


class Collective:
    """An open collective: which replicas are in it, what is wrong with it, and who is to blame."""

    def __init__(self, index: SnapshotIndex, group: GroupRecord, slot: SlotRecord, timeout_seconds: float = 0) -> None:
        self.index = index
        self.group = group
        self.slot = slot
        self.timeout_seconds = timeout_seconds  # 0 if it had no limit
        self.number = slot.number
        self.is_join = slot is group.join

    @property
    def label(self) -> str | None:
        """What reports call its group; None for the run's own."""
        return self.group.label()

    @property
    def creation(self) -> Collective | None:
        """The creation of its group, if some of the members have not made the group."""
        return self.index.find(self.group.key, -1)

    @property
    def unmade(self) -> Collective | None:
        """The creation of its group, if a member that has ended or waits elsewhere has not made the group."""
        creation, index = self.creation, self.index
        if creation is not None and any(i in index.ended or i in index.waits for i in creation.missing):
            return creation
        return None  # running members may still make it

    # Who has reached it, and who is missing.

    @cached_property
    def records(self) -> dict[int, CallRecord]:
        """Each replica's call in this collective, by id."""
        records = ((_record(self.number, post), ids) for post, ids in self.slot.posts)
        return {replica_id: record for record, ids in records for replica_id in ids}

    def abandoned_by(self, member: MemberRecord) -> bool:
        """Return whether a member was cancelled out of it. A join has no number yet at that time."""
        abandoned_join = member.joined and member.abandoned is not None and member.abandoned >= member.sequence
        return abandoned_join if self.is_join else member.abandoned == self.number and not abandoned_join

    def _takes_part(self, member: MemberRecord) -> bool:
        return self.is_join or not member.joined or member.sequence > self.number

    @cached_property
    def missing(self) -> dict[int, MemberRecord]:
        """By id, the members that have not reached it, or were cancelled out of it."""
        members = {m.replica_id: m for m in self.group.members}
        posted = {i for _, replicas in self.slot.posts for i in replicas}
        return {i: m for i, m in members.items() if self.abandoned_by(m) or (i not in posted and self._takes_part(m))}

    @cached_property
    def gone(self) -> tuple[int, ...]:
        """The ids of the missing members that will never reach it."""
        return tuple(i for i, m in self.missing.items() if i in self.index.ended or self.abandoned_by(m))

    @property
    def exited(self) -> list[int]:
        """The ids of the missing members that ended before they reached it."""
        return [i for i, m in self.missing.items() if i in self.index.ended and not self.abandoned_by(m)]

    @cached_property
    def abandoned(self) -> list[int]:
        """The ids of the members that were cancelled out of it."""
        return [i for i, m in self.missing.items() if self.abandoned_by(m)]

    @property
    def merges(self) -> bool:
        """Whether it calls a merge function."""
        return bool(self.partitions) and self.partitions[0].post.call.kind == "merge_call"

    @cached_property
    def partitions(self) -> list[Posted]:
        """The replicas that have reached it, by the meaning of their posts; the largest partition first."""
        by_key: dict[Hashable, dict[int, Post]] = {}
        abandoned = set(self.abandoned)
        for post, replicas in self.slot.posts:
            own = by_key.setdefault("join" if self.is_join else self._key(post), {})
            own.update((i, post) for i in replicas if i not in abandoned)
        partitions = [Posted(tuple(sorted(own)), own[min(own)]) for own in by_key.values() if own]
        if len(partitions) == 1 and self.index.snapshot.order_check is OrderCheck.CALL_SITE and not self.is_join:
            partitions = self._by_callers() or partitions
        return sorted(partitions, key=lambda one: (-len(one.replicas), one.replicas[0]))

    def _by_callers(self) -> list[Posted]:
        """Return partitions by the callers through which replicas reached it, if the order of these differs."""
        posts = self.slot.posts
        if self.missing or posts[0][0].call.name is not None or len({post.path for post, _ in posts}) == 1:
            return []
        order_of = callers_in_another_order([(each.number, each.posts) for each in self._calls_here()])
        by_order = grouped((order, replica_id) for replica_id, order in order_of.items())
        post_of = {replica_id: post for post, ids in posts for replica_id in ids}
        return [Posted(tuple(sorted(ids)), post_of[min(ids)], order) for order, ids in by_order.items()]

    def _calls_here(self) -> Iterator[SlotRecord]:
        """Yield the calls at its place, without a name, that all members have made, newest first, from itself on."""
        here = self.slot.posts[0][0].path[0][:3]
        open_before = (slot for slot in reversed(self.group.open) if slot.number <= self.number)
        for each in (*open_before, *reversed(self.group.history)):
            if sum(len(ids) for _, ids in each.posts) == len(self.group.key[0]):
                post, _ = each.posts[0]
                if post.path[0][:3] == here and post.call.name is None:
                    yield each

    # What the replicas do.

    @cached_property
    def reports(self) -> dict[int, ReplicaReport]:
        """What every member of the group does, by id."""
        # Both are looked up once, because a group of thousands has a large key.
        histories, collectives = self.index.histories(self.group), [self, *self.index.open[self.group.key]]
        reports = {}
        for member in self.group.members:
            known = self.index.facts.get(member.replica_id)
            if known is None:
                continue
            record = self._waits_in(member, collectives)
            waits = record is not None and record.sequence_number >= 0
            state = known.end or (ReplicaState.WAITING if waits else ReplicaState.RUNNING)
            reports[member.replica_id] = ReplicaReport(
                replica_id=member.replica_id,
                device=known.device,
                state=state,
                call=record.call if record else None,
                location=record.location if record else None,
                history=histories[member.replica_id],
                stack=() if state.ended else known.stack,
                returned=known.returned,
                ended_at=known.ended_at,
                waits_for=known.waits_for if state is ReplicaState.RUNNING else None,
            )
        return reports

    def _waits_in(self, member: MemberRecord, collectives: Sequence[Collective]) -> CallRecord | None:
        """Return what a member waits in: the first of its group's collectives that it has posted and not abandoned.

        No replica waits in the creation of a group; having posted it is enough.
        """
        if self.number >= 0 and member.replica_id in self.index.ended:
            return None
        if member.joined and collectives[-1].is_join:
            collectives = collectives[-1:]  # a replica that has joined waits in nothing else
        for each in collectives:
            may_wait = each is self or (each.number >= 0 and each.is_join == member.joined)
            if may_wait and member.replica_id in each.records and not each.abandoned_by(member):
                return each.records[member.replica_id]
        return None

    def with_group(self, call: str) -> str:
        """Return a call as text, with the collective's number and group."""
        return f"{call}{'' if self.is_join else f' #{self.number}'} of {self.label or 'the run'}"

    # What is wrong, and who is to blame.

    @cached_property
    def reason(self) -> Reason:
        """What is wrong, as in `CollectiveReport`."""
        if len(self.partitions) > 1:
            first = self.partitions[0].post
            found = [difference(self.index.snapshot.order_check, each.post, first) for each in self.partitions[1:]]
            return min(filter(None, found), key=_REASONS.index, default=Reason.CALL_SITE)
        if self.missing and self.partitions and self.partitions[0].post.call.kind == MESSAGE:
            return Reason.UNMATCHED
        if self.exited:
            return Reason.EXITED
        if self.abandoned:
            return Reason.ABANDONED
        # If a replica's own error has ended the run, nothing is late.
        return Reason.EXITED if self.index.failed and not self.timeout_seconds else Reason.TIMEOUT

    @cached_property
    def minority(self) -> tuple[int, ...]:
        """The replicas to blame, which reports mark; empty on a tie."""
        missing, gone = self.missing.keys(), self.gone
        if self.reason is Reason.TIMEOUT:
            if not missing and self.merges:
                return (min(self.group.key[0]),)  # its merge function hangs
            return tuple(sorted(missing - self.index.unknown or missing))
        present = [each.replicas for each in self.partitions]
        if len(present) == 1:  # replicas that have joined wait, too
            present = [tuple(m.replica_id for m in self.group.members if m.replica_id not in missing)]
        sides = sorted(present + ([gone] if gone else []), key=len, reverse=True)
        if len(sides) < 2:  # no replica waits any more: the few that the others waited for are to blame, or the gone
            late = tuple(m.replica_id for m in self.group.members if m.replica_id not in gone)
            if len(late) == len(gone):
                return ()
            return late if 0 < len(late) < len(gone) else gone
        if len(sides[0]) == len(sides[1]):
            undecided = len(missing) - len(gone)  # these may still join the waiting side
            return gone if gone and undecided and len(present) == 1 else ()
        return tuple(sorted(i for side in sides[1:] for i in side))

    @property
    def suspects(self) -> tuple[int, ...]:
        """The minority; on a tie all replicas that could have taken part."""
        return self.minority or tuple(m.replica_id for m in self.group.members if self._takes_part(m))

    @property
    def unmade_by(self) -> tuple[int, ...]:
        """The members that have not made the group, if that may be why they are missing."""
        if self.creation is None or self.number < 0 or self.reason not in (Reason.EXITED, Reason.TIMEOUT):
            return ()
        return tuple(self.creation.missing)

    # Where they call from, and how they diverged.

    @property
    def chains(self) -> list[tuple[Location, ...]]:
        """For each partition, the places of its callers, from the first that differs between partitions inward."""
        paths = [self._path(each) for each in self.partitions] if not self.races else []
        common = sum(1 for _ in takewhile(lambda places: len(set(places)) == 1, zip(*paths, strict=False)))
        return [path[common:-1][:_MOST_CALLERS] for path in paths]

    def _path(self, partition: Posted) -> tuple[Location, ...]:
        """Return the places from a replica's function down to its call.

        If the replica does not wait at the call itself, only the call's nearest callers are known.
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
        """Sentences on the tasks in which differing replicas make their calls, if these tasks race.

        A replica's own task races with a child task that it does not wait for. A single child task that it waits for
        does not race.
        """
        calls_in = []
        children, awaits, single = 0, False, True
        for replica_id, post in ((each.replicas[0], each.post) for each in self.partitions[:2]):
            replica, known = self.reports[replica_id], self.index.facts[replica_id]
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
            awaited = "task" in (known.waits_for or "")
            awaits = awaits or awaited
            single = single and awaited and len(known.child_calls) == 1
        if len(self.partitions) < 2 or not children or (children == 1 and awaits) or single:
            return ()
        by_task = sorted((ids, task) for task, ids in grouped(calls_in).items())
        return tuple(f"{capitalised(clause(ids, 'calls'))} in {task}." for ids, task in by_task)

    @cached_property
    def sides(self) -> tuple[Side, Side] | None:
        """The majority and the largest other partition, or the replicas that have ended; None if all agree.

        Also None for racing tasks: they may make further calls, so it is not known which calls they leave out.
        """
        if not self.partitions or self.races:
            return None
        usual = self._side(self.partitions[0])
        if len(self.partitions) > 1:
            return usual, self._side(self.partitions[1])
        ended = tuple(i for i in self.missing if i in self.index.ended)
        if not ended or self.number < 0 or self.is_join:
            return None
        ended_at = self.reports[ended[0]].ended_at
        return usual, Side(ended, (), (), (ended_at,) if ended_at is not None else (), "")

    def _side(self, partition: Posted) -> Side:
        first, slots = partition.replicas[0], [self.slot]  # the creation of a group is the only call that counts
        if self.number >= 0:
            slots = [slot for slot in self.group.open if slot.number >= self.number][:_MOST_CALLS]
        posts = [(slot.number, post) for slot in slots if (post := slot.post_of(first)) is not None]
        calls, keys = [_record(*each) for each in posts], [self._key(post) for _, post in posts]
        return Side(partition.replicas, calls, keys, self._path(partition), self.index.facts[first].handles)

    def _key(self, post: Post) -> Hashable:
        return fingerprint(self.index.snapshot.order_check, post)

    @cached_property
    def divergence(self) -> Divergence | None:
        """How the replicas diverged, if that is known."""
        if self.sides is None:
            return None
        if len(self.partitions) > 1 and self.partitions[0].callers:
            return reached_in_another_order(*self.sides, self.partitions[0].callers, self.partitions[1].callers)
        return diverged(self._past(), *self.sides, tie=not self.minority)

    def _past(self) -> Past:
        """Return the known calls that all made before, including open ones that all have made."""
        in_group = self.index.open[self.group.key]
        matched = (each.slot for each in in_group if len(each.partitions) == 1 and not each.missing)
        slots = [slot for slot in (*self.group.history, *matched) if 0 <= slot.number < self.number]
        posts = [(slot.number, slot.posts[0][0]) for slot in slots]
        return Past([_record(*each) for each in posts], [self._key(post) for _, post in posts])

    @cached_property
    def cancellations(self) -> tuple[str, ...]:
        """Sentences on the calls that replicas were cancelled out of, and why: a sibling's failure, or a time limit."""
        pairs = []
        for known in (self.index.facts[i] for i in self.abandoned):
            post = self.slot.post_of(known.replica_id)
            if post is None:
                continue
            places = [at for at in (*known.cancelled_in, post.path[0][:2]) if is_of_the_program(at[0])]
            limit = next((limit for at in places if (limit := time_limit_around(*at))), "")
            why = f": {known.cancelled_by}" if known.cancelled_by else f", inside {limit}" if limit else ""
            pairs.append((f"{post.call} at {place(post.location)}{why}", known.replica_id))
        by_call = list(grouped(pairs).items())[:_MOST_LIMITS]
        return tuple(f"{capitalised(clause(ids, 'was'))} cancelled out of {what}." for what, ids in by_call)
