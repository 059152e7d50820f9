"""Snapshots: what every replica called and where it is, at one moment, as values that can be kept, merged and sent.

A snapshot is a picture of a `ledger.Ledger`, or of a part of one (the replicas of one process), with what the runtime
adds about the replicas once something has failed. `analysis.analyse` reads it and nothing else, so that one machine,
several workers, a recorder's file and another program's dump are all judged in the same way.

Everything in one is plain and frozen. Equal posts stand once for all replicas that made them, so a snapshot of
thousands of replicas that did the same is hardly larger than that of two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from aiodist._core.call import Call, OrderCheck, Place, Post, fingerprint
from aiodist._core.report import Location, ReplicaState, reader
from aiodist._core.text import ids_briefly, place, shortened

GroupKey: TypeAlias = tuple[tuple[int, ...], str | None, int]
"""What a group is known by in every process: its members, its name, how many with these were made before it.

The number of the run's own group is -1.
"""


@lru_cache(maxsize=16)  # the records of thousands of processes share it
def everyone(total: int) -> tuple[int, ...]:
    """Return the ids of all replicas of a run."""
    return tuple(range(total))


class Overdue(NamedTuple):
    """A collective of a group, by its number (None: the join), whose time is up; 0 seconds where it had no limit."""

    group: GroupKey
    number: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known of a replica beside its collectives.

    Attributes:
        replica_id: its id in the run.
        device: its device, in canonical form.
        end: how its function ended; None while it runs.
        stack: where it is suspended or runs, innermost last; empty once it has ended.
        waits_for: what it waits for outside of collectives, in words; None where nobody looked.
        returned: what its function returned, as text; None unless it has returned.
        ended_at: where its function returned; None where that is not known.
        cancelled_in: the files and lines that it was at when it was cancelled out of a collective, innermost first.
        cancelled_by: why it was, where that is known, e.g. ``its sibling task failed with ValueError at train.py:9``.
        handles: the exception that its own task is handling where it is suspended; empty where there is none.
        refusal: what the call raised that it was not cancelled out of, but refused for its arguments; else empty.
        child_calls: where its child tasks are suspended, each with the task in words.
        unknown: nothing is known of it: a rank of another program's job that left no dump.
    """

    replica_id: int
    device: str
    end: ReplicaState | None = None
    stack: tuple[Location, ...] = ()
    waits_for: str | None = None
    returned: str | None = None
    ended_at: Location | None = None
    cancelled_in: tuple[tuple[str, int], ...] = ()
    refusal: str = ""
    child_calls: tuple[tuple[Location, str], ...] = ()
    unknown: bool = False
    cancelled_by: str = ""
    handles: str = ""


class MemberRecord(NamedTuple):
    """Where a replica is in the order of a group's collectives.

    Attributes:
        sequence: the number of its next collective; while it has joined, of the first that it has not made.
        abandoned: the number of the first collective that it was cancelled out of; None if there is none.
    """

    replica_id: int
    sequence: int
    joined: bool = False
    abandoned: int | None = None


class SlotRecord(NamedTuple):
    """One collective: its number, -1 for the creation of a group, who has posted what, and whose tasks wait in it.

    Each distinct post stands with the ids of the replicas that made it.
    """

    number: int
    posts: tuple[tuple[Post, tuple[int, ...]], ...]
    waiting: tuple[int, ...] = ()

    def post_of(self, replica_id: int) -> Post | None:
        """Return what that replica has issued here; None if nothing."""
        return next((post for post, replicas in self.posts if replica_id in replicas), None)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group of replicas and its collectives.

    Attributes:
        made_at: where it was made; None for the run's own group, and where its members made it at different places.
        members: those of its members that this snapshot knows of, by id.
        history: the last collectives that all members have issued alike, oldest first; complete, or about to be.
        open: the others, by number.
        join: the join, while a replica has joined; its number is the first that no replica has used.
    """

    key: GroupKey
    made_at: Place | None
    members: tuple[MemberRecord, ...]
    history: tuple[SlotRecord, ...]
    open: tuple[SlotRecord, ...]
    join: SlotRecord | None = None

    def label(self) -> str | None:
        """Return what reports call the group; None for the run's own group, of which they need not speak."""
        members, name, number = self.key
        if number < 0:
            return None
        if name is not None:
            return f"group {shortened(repr(name), 40)} of {_ids_of(members)}"
        being_made = any(slot.number < 0 for slot in self.open)  # its members may not agree on the place
        made_at = None if being_made or self.made_at is None else f" made at {place(self.made_at.location)}"
        return f"the group of {_ids_of(members)}{made_at or ''}"


_ids_of = lru_cache(maxsize=64)(ids_briefly)  # thousands wait in one group


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What every replica of a run, or of a part of it, called and where it is.

    Attributes:
        order_check: what calls are compared by.
        replicas: what is known of each, by id.
        groups: the run's own group, and then the others in the order in which they were made.
        blocked: the ids of those of which every task waits in open collectives, and nothing else can run.
        deadlocked: the ids of those that wait for each other for ever, as the runtime has proved.
        circle: a sentence about tasks that wait for each other; empty where there are none.
    """

    order_check: OrderCheck
    replicas: tuple[ReplicaFacts, ...]
    groups: tuple[GroupRecord, ...]
    blocked: tuple[int, ...] = ()
    deadlocked: tuple[int, ...] = ()
    circle: str = ""


# Merging the snapshots of several processes.


def merge(parts: Iterable[Snapshot]) -> Snapshot:
    """Return the snapshot of a whole run from parts of it; what any has seen all members issue is complete for all."""
    several = sorted(parts, key=lambda part: part.replicas[0].replica_id if part.replicas else -1)
    if len(several) == 1:
        return several[0]
    replicas = sorted((each for part in several for each in part.replicas), key=lambda each: each.replica_id)
    known = {each.replica_id for each in replicas}
    groups: dict[GroupKey, list[GroupRecord]] = {}
    for part in several:
        for group in part.groups:
            groups.setdefault(group.key, []).append(group)
    return Snapshot(
        several[0].order_check,
        tuple(replicas),
        tuple(_merge_group(several[0].order_check, found, known) for found in groups.values()),
        tuple(sorted({replica_id for part in several for replica_id in part.blocked})),
        tuple(sorted({replica_id for part in several for replica_id in part.deadlocked})),
        next((part.circle for part in several if part.circle), ""),
    )


def _merge_group(order_check: OrderCheck, parts: Sequence[GroupRecord], known: Collection[int]) -> GroupRecord:
    members = sorted(member for part in parts for member in part.members)
    there = {member.replica_id for member in members}
    absent = (i for i in parts[0].key[0] if i in known and i not in there)  # their processes have not heard of it
    members = sorted([*members, *(MemberRecord(i, sequence=-1) for i in absent)])
    complete = {slot.number for part in parts for slot in part.history}
    slots = _merge_slots(slot for part in parts for slot in (*part.history, *part.open))
    if complete == {-1} and not _made_alike(order_check, parts[0].key[0], slots[0]):
        complete.clear()  # each process makes a group for its own members
    made_at = {part.made_at for part in parts}
    joins = [part.join for part in parts if part.join is not None]
    if joins:  # a part of an earlier moment may show one that another has seen complete
        begun = min(member.sequence for member in members if member.joined)
        seen = [slot for slot in slots if slot.number in complete and slot.number >= begun]
        if any(post.call.kind == "join" for slot in seen for post, _ in slot.posts[:1]):
            joins = []
    number = max((member.sequence for member in members), default=0)
    return GroupRecord(
        parts[0].key,
        made_at.pop() if len(made_at) == 1 else None,
        tuple(members),
        tuple(slot for slot in slots if slot.number in complete),
        tuple(slot for slot in slots if slot.number not in complete),
        _merge_slots(join._replace(number=number) for join in joins)[0] if joins else None,
    )


def _made_alike(order_check: OrderCheck, members: Sequence[int], creation: SlotRecord) -> bool:
    there = {i for _, replicas in creation.posts for i in replicas}
    return there.issuperset(members) and len({fingerprint(order_check, post) for post, _ in creation.posts}) == 1


def _merge_slots(slots: Iterable[SlotRecord]) -> tuple[SlotRecord, ...]:
    """Return the slots by number, what several parts know of one put together."""
    found: dict[int, dict[Post, set[int]]] = {}
    waiting: dict[int, set[int]] = {}
    for slot in slots:
        posts = found.setdefault(slot.number, {})
        for post, replicas in slot.posts:
            posts.setdefault(post, set()).update(replicas)
        waiting.setdefault(slot.number, set()).update(slot.waiting)
    return tuple(
        SlotRecord(
            number,
            tuple(
                sorted(((post, tuple(sorted(ids))) for post, ids in found[number].items()), key=lambda each: each[1])
            ),
            tuple(sorted(waiting[number])),
        )
        for number in sorted(found)
    )


# To and from JSON.


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as a dict of strings, numbers, lists and dicts, as JSON has them."""
    calls: dict[Call, int] = {}  # by index, as most calls and places occur many times
    places: dict[Place, int] = {}

    def post(each: Post) -> list[Any]:
        path = [places.setdefault(place, len(places)) for place in each.path]
        return [calls.setdefault(each.call, len(calls)), path]

    def slot(each: SlotRecord) -> list[Any]:
        return [each.number, [[post(p), _to_ranges(ids)] for p, ids in each.posts], _to_ranges(each.waiting)]

    groups = [
        {
            "key": [_to_ranges(each.key[0]), each.key[1], each.key[2]],
            "made_at": None if each.made_at is None else list(each.made_at),
            "members": [list(member) for member in each.members],
            "history": [slot(one) for one in each.history],
            "open": [slot(one) for one in each.open],
            "join": None if each.join is None else slot(each.join),
        }
        for each in snapshot.groups
    ]
    return {
        "order_check": str(snapshot.order_check),
        "replicas": [_given(each, _NOBODY) for each in snapshot.replicas],
        "calls": [_given(call, _NOTHING) for call in calls],
        "places": [list(place) for place in places],
        "groups": groups,
        "blocked": _to_ranges(snapshot.blocked),
        "deadlocked": _to_ranges(snapshot.deadlocked),
        "circle": snapshot.circle,
    }


def from_json(data: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot that `to_json` gave.

    Raises:
        ValueError: it is none.
    """
    try:
        return _from_json(data)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"expected a snapshot, got something else: {error!r}") from error


def _from_json(data: Mapping[str, Any]) -> Snapshot:
    calls = list(map(reader(Call), data["calls"]))
    places = [Place(*row) for row in data["places"]]

    def slot(row: Sequence[Any]) -> SlotRecord:
        number, posts, waiting = row
        found = (
            (Post(calls[call], tuple(places[at] for at in path)), _from_ranges(ids)) for (call, path), ids in posts
        )
        return SlotRecord(number, tuple(found), _from_ranges(waiting))

    groups = tuple(
        GroupRecord(
            (_from_ranges(each["key"][0]), each["key"][1], each["key"][2]),
            None if each["made_at"] is None else Place(*each["made_at"]),
            tuple(MemberRecord(*member) for member in each["members"]),
            tuple(slot(row) for row in each["history"]),
            tuple(slot(row) for row in each["open"]),
            None if each["join"] is None else slot(each["join"]),
        )
        for each in data["groups"]
    )
    replicas = reader(tuple[ReplicaFacts, ...])(data["replicas"])
    return Snapshot(
        OrderCheck(data["order_check"]),
        replicas,
        groups,
        _from_ranges(data["blocked"]),
        _from_ranges(data["deadlocked"]),
        data["circle"],
    )


_NOTHING = Call("")
_NOBODY = ReplicaFacts(-1, "")


def _given(value: Any, default: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from the default, as JSON has them."""
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    return {
        name: asdict(field) if is_dataclass(field) and not isinstance(field, type) else field
        for name, field in found.items()
        if field != getattr(default, name)
    }


def _to_ranges(replicas: Sequence[int]) -> list[list[int]]:
    """Return ids as runs of consecutive ones, each its first and its length; the order is kept."""
    if replicas is everyone(len(replicas)):  # thousands, mostly
        return [[0, len(replicas)]] if replicas else []
    if replicas and tuple(replicas) == tuple(range(replicas[0], replicas[0] + len(replicas))):
        return [[replicas[0], len(replicas)]]
    runs: list[list[int]] = []
    for each in replicas:
        if runs and each == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([each, 1])
    return runs


def _from_ranges(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    if len(runs) == 1 and runs[0][0] == 0:
        return everyone(runs[0][1])
    return tuple(chain.from_iterable(range(first, first + length) for first, length in runs))
