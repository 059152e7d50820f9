"""Snapshots: what every replica called and where it is, at one moment, as values that can be kept, merged and sent.

A snapshot describes a `ledger.Ledger`, or the part of one process, with the facts on each replica that the runtime adds
once something has failed. `analysis.analyse` reads nothing else, so one machine, several workers, a recorder's file and
another program's dump are all analysed in the same way.

Equal posts are stored once, with all replicas that made them, so a snapshot of thousands of replicas that did the same
is hardly larger than one of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from aiodist._core.call import OrderCheck, Place, Post, fingerprint
from aiodist._core.terms import Location, ReplicaState
from aiodist._core.text import group_label, grouped
from aiodist._core.wire import File

GroupKey: TypeAlias = tuple[tuple[int, ...], str | None, int]
"""A group's identity in every process: its members, its name, and the number of such groups made before it.

That number is -1 for the run's own group.
"""


Posts: TypeAlias = tuple[tuple[Post, tuple[int, ...]], ...]
"""Distinct posts, each with the ids of the replicas that made it."""


class Overdue(NamedTuple):
    """A collective that has timed out, by its number (None for the join); 0 seconds if it had no limit."""

    group: GroupKey
    number: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known of a replica apart from its collectives."""

    replica_id: int  # in the run
    device: str  # in canonical form
    end: ReplicaState | None = None  # how its function ended; None while it runs
    stack: tuple[Location, ...] = ()  # where it is suspended or runs, innermost last; empty once it has ended
    waits_for: str | None = None  # outside of collectives, as text; None if not examined
    returned: str | None = None  # what its function returned, as text; None unless it has returned
    ended_at: Location | None = None  # where its function returned, if that is known
    cancelled_in: tuple[tuple[File, int], ...] = ()  # where it was cancelled out of a collective, innermost first
    child_calls: tuple[tuple[Location, str], ...] = ()  # where its child tasks are suspended, with the tasks as text
    unknown: bool = False  # nothing is known of it: a rank of another program's job that left no dump
    cancelled_by: str = ""  # why it was cancelled, e.g. ``its sibling task failed with ValueError at train.py:9``
    handles: str = ""  # the exception that its own task is handling where it is suspended


class MemberRecord(NamedTuple):
    """Where a replica is in the order of a group's collectives."""

    replica_id: int
    sequence: int  # the number of its next collective; while it has joined, of the first that it skips
    joined: bool = False
    abandoned: int | None = None  # the number of the first collective that it was cancelled out of


class SlotRecord(NamedTuple):
    """One collective: what was posted, and by which replicas."""

    number: int  # -1 for the creation of a group
    posts: Posts
    waiting: tuple[int, ...] = ()  # the replicas with tasks that wait in it

    def post_of(self, replica_id: int) -> Post | None:
        """Return that replica's post; None if it has none."""
        return next((post for post, replicas in self.posts if replica_id in replicas), None)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group of replicas and its collectives."""

    key: GroupKey
    made_at: Place | None  # None for the run's own group, and if processes made it at different places
    members: tuple[MemberRecord, ...]  # those that this snapshot knows of, by id
    history: tuple[SlotRecord, ...]  # the last matched collectives, oldest first
    open: tuple[SlotRecord, ...]  # the others, by number
    join: SlotRecord | None = None  # while a replica has joined; its number is the first that no replica has used

    @property
    def unfinished(self) -> tuple[SlotRecord, ...]:
        """The open collectives, the join last."""
        return self.open if self.join is None else (*self.open, self.join)

    def label(self) -> str | None:
        """Return what reports call the group."""
        being_made = any(slot.number < 0 for slot in self.open)  # its members may not agree on the place
        return group_label(*self.key, None if being_made or self.made_at is None else self.made_at.location)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What every replica of a run, or of part of a run, called, and where it is."""

    order_check: OrderCheck  # how calls are compared
    replicas: tuple[ReplicaFacts, ...]  # by id
    groups: tuple[GroupRecord, ...]  # the run's own first, the others in the order in which they were made
    blocked: tuple[int, ...] = ()  # replicas of which every task waits in open collectives
    deadlocked: tuple[int, ...] = ()  # replicas that wait for each other, and that nothing else can wake
    cycle_text: str = ""  # a text about tasks that wait for each other


def merge(parts: Iterable[Snapshot]) -> Snapshot:
    """Merge the snapshots of a run's processes; a slot that is complete in one is complete."""
    snapshots = sorted(parts, key=lambda part: part.replicas[0].replica_id if part.replicas else -1)
    if len(snapshots) == 1:
        return snapshots[0]
    replicas = sorted((each for part in snapshots for each in part.replicas), key=lambda each: each.replica_id)
    known = {each.replica_id for each in replicas}
    groups = grouped((group.key, group) for part in snapshots for group in part.groups)
    return Snapshot(
        snapshots[0].order_check,
        tuple(replicas),
        tuple(_merge_group(snapshots[0].order_check, found, known) for found in groups.values()),
        tuple(sorted({replica_id for part in snapshots for replica_id in part.blocked})),
        tuple(sorted({replica_id for part in snapshots for replica_id in part.deadlocked})),
        next((part.cycle_text for part in snapshots if part.cycle_text), ""),
    )


def _merge_group(order_check: OrderCheck, parts: Sequence[GroupRecord], known: set[int]) -> GroupRecord:
    ids = parts[0].key[0]
    members = {member.replica_id: member for part in parts for member in part.members}
    for absent in known.intersection(ids) - members.keys():  # replicas whose processes do not know the group
        members[absent] = MemberRecord(absent, sequence=-1)
    slots = _merge_slots(slot for part in parts for slot in (*part.history, *part.open))
    complete = {slot.number for part in parts for slot in part.history}
    if complete == {-1} and (
        not {i for _, own in slots[0].posts for i in own}.issuperset(ids)
        or len({fingerprint(order_check, post) for post, _ in slots[0].posts}) > 1
    ):
        complete.clear()  # a process creates a group as soon as its own members have made it
    made_at = {part.made_at for part in parts}
    joins = [part.join for part in parts if part.join is not None]
    if joins:  # a part of an earlier moment may show one that another has seen complete
        begun = min(member.sequence for member in members.values() if member.joined)
        seen = [slot for slot in slots if slot.number in complete and slot.number >= begun]
        if any(post.call.kind == "join" for slot in seen for post, _ in slot.posts[:1]):
            joins = []
    number = max((member.sequence for member in members.values()), default=0)
    return GroupRecord(
        parts[0].key,
        made_at.pop() if len(made_at) == 1 else None,
        tuple(sorted(members.values())),
        tuple(slot for slot in slots if slot.number in complete),
        tuple(slot for slot in slots if slot.number not in complete),
        _merge_slots(join._replace(number=number) for join in joins)[0] if joins else None,
    )


def _merge_slots(slots: Iterable[SlotRecord]) -> tuple[SlotRecord, ...]:
    """Return the slots by number, with the posts and waiting replicas of all parts."""
    found: dict[int, tuple[dict[Post, set[int]], set[int]]] = {}
    for slot in slots:
        posts, waiting = found.setdefault(slot.number, ({}, set()))
        waiting.update(slot.waiting)
        for post, replicas in slot.posts:
            posts.setdefault(post, set()).update(replicas)
    merged = []
    for number, (posts, waiting) in sorted(found.items(), key=lambda each: each[0]):
        by_ids = sorted(((post, tuple(sorted(ids))) for post, ids in posts.items()), key=lambda each: each[1])
        merged.append(SlotRecord(number, tuple(by_ids), tuple(sorted(waiting))))
    return tuple(merged)
