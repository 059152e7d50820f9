"""The ledger: the order check of one run as a state machine. Events go in, decisions come out.

**The rule.** The k-th collective of every replica must be the same one. The first post at k opens the slot; each later
one is compared with it; the last one makes the slot *matched*. No clock is involved, and no replica counts as right.

**Trouble.** Three things *doom* a group from some number on: a post that differs, a replica that ended without a
collective that others wait in, and a replica that was cancelled out of one. No slot from that number on is matched any
more. Replicas that can still make a call keep running until all have settled (`Group.unsettled`), or until the runtime
loses patience; then `snapshot` is analysed. So the report does not depend on the order of arrival.

**Joining.** A replica that has joined is absent from every slot, open or future: the others' collectives complete
without it until all have joined. The join is a slot outside the sequence (`Group.joining`); when the last member joins,
it takes the first number that no member has used, and all continue after it.

**Groups of some replicas** have an order of their own. Every member makes the group by a call that does not wait.
Groups of the same replicas with the same name are matched in the order in which each member makes them. The creation is
slot -1 of the group, which nobody awaits: it serves to compare call sites, and to find a replica that ended without
making the group. A group lives as long as one of its `Member` objects is referenced or it has open slots; the ledger
refers to it weakly, so a program may make a group at every step.

A runtime that must keep something with a slot (values, waiting tasks) passes a subclass of `Slot` as ``slot_type``.

What was rejected: reporting at the second post (it blames the replica that comes second); matching groups by the order
of their creation alone (a replica would have to count the groups that it is not in); a flag for joined replicas in
every post (collectives without trouble would pay for it).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import WeakSet

from aiodist._core.call import Call, OrderCheck, Post, difference, is_of_the_program, place
from aiodist._core.callers import CallerOrder, nearest_callers
from aiodist._core.errors import ReplicaContextError
from aiodist._core.terms import ReplicaState
from aiodist._core.text import group_label, grouped
from aiodist._core.waitgraph import stuck
from aiodist._core.wire import everyone

if TYPE_CHECKING:
    from aiodist._core.snapshot import GroupKey, GroupRecord, Posts, ReplicaFacts, SlotRecord, Snapshot

HISTORY: Final = 256
"""How many matched collectives a group remembers."""

_JOINED: Final = 1 << 60
"""The sequence number of a member while it has joined."""

_NEVER: Final = 1 << 62

_ELSEWHERE: Final = -1
"""Stands for the members that other processes run."""

_MOST_RECENT: Final = 64

NOBODY: Final[set[int]] = set()
"""Shared by all slots from which no member is absent; never changed."""

Path: TypeAlias = tuple[Any, ...]
"""Code object and offset of a call's callers, alternating, the nearest first."""

RawPost: TypeAlias = tuple[Call, Any, int, Path]
"""A post as it is stored: the call, the caller's code object, the offset in it, and the callers' sites."""

Others: TypeAlias = dict[int, RawPost]
"""The posts that are not identical to the first one, by position."""


class Slot:
    """One collective of a group: which members have posted it, and which wait in it."""

    __slots__ = (
        "absent", "call", "code", "complete", "error", "group", "matched", "missing", "number", "offset", "others",
        "path", "waiters",
    )  # fmt: skip

    def __init__(self, group: Group, number: int, call: Call, code: Any, offset: int, path: Path) -> None:
        self.group: Group = group
        self.number: int = number  # -1 for the creation of a group
        self.call: Call = call  # of the first post, like the next three
        self.code: Any = code
        self.offset: int = offset
        self.path: Path = path
        self.missing: int = len(group.members)  # how many members have not posted it
        # What the runtime wakes, by the position of the member that waits; then further waits of the same members.
        self.waiters: list[Any] = [None] * self.missing
        self.matched: bool = False  # every member has posted it, and all posts mean the same
        self.complete: bool = False  # it has its result or its error
        self.error: BaseException | None = None
        self.others: Others | None = None  # None while all posts are identical to the first one
        self.absent: set[int] = NOBODY  # the positions of members that have joined, and so take part without a value

    @property
    def raw(self) -> RawPost:
        """The first member's post as it is stored."""
        return self.call, self.code, self.offset, self.path

    @property
    def first(self) -> Post:
        """The first member's post."""
        return post_of(self.raw)

    def post_of(self, position: int) -> Post:
        """Return the post of the member at that position."""
        return post_of(self.raw_post_of(position))

    def raw_post_of(self, position: int) -> RawPost:
        """Return that post as it is stored."""
        return (self.others or {}).get(position) or self.raw

    def text_of(self, position: int) -> str:
        """Return what that member calls, with number and group: ``all_reduce #3``, ``join of group 'rows' of …``."""
        kind, label = self.post_of(position).call.kind, self.group.label()
        call = kind if self is self.group.joining else f"{kind} #{self.number}"
        return call if label is None else f"{call} of {label}"

    def add(self, position: int, post: RawPost) -> None:
        """Keep a post that is not identical to the first one."""
        if self.others is None:
            self.others = {}
        self.others[position] = post

    def waiting(self) -> Iterator[Member]:
        """Yield the members that wait in it."""
        return (member for member in self.group.members if self.waiters[member.position] is not None)

    def has_waiters(self) -> bool:
        """Return whether a member waits in it."""
        return any(waiter is not None for waiter in self.waiters)

    def clear(self) -> None:
        """Forget the waiters, once the run is over."""
        self.waiters = [None] * len(self.waiters)


def post_of(raw: RawPost) -> Post:
    """Return a post with places instead of code objects and offsets."""
    call, code, offset, path = raw
    callers = map(place, path[::2], path[1::2])
    return Post(call, (place(code, offset), *(each for each in callers if is_of_the_program(each.file))))


class Replica:
    """One replica of a run."""

    __slots__ = ("end", "id", "members")

    def __init__(self, replica_id: int) -> None:
        self.id: int = replica_id
        self.end: ReplicaState | None = None  # how its function ended; None while it runs
        self.members: WeakSet[Member] = WeakSet()  # in all groups


class Member:
    """A replica in a group: where it is in the order of the group's collectives."""

    __slots__ = (
        "__weakref__", "abandoned", "abandoned_at", "group", "joined_at", "position", "rank", "replica", "replica_id",
        "sequence",
    )  # fmt: skip

    def __init__(self, replica: Replica, group: Group, position: int, rank: int) -> None:
        self.replica: Replica = replica
        self.replica_id: int = replica.id
        self.group: Group = group
        self.position: int = position  # among the members that this process runs
        self.rank: int = rank  # its id in the group
        self.sequence: int = 0  # the number of its next collective, so also how many it has posted
        self.joined_at: int | None = None  # the number of the first collective that it skips because it has joined
        self.abandoned: int | None = None  # the number of the first collective that it was cancelled out of
        self.abandoned_at: int = 0  # `sequence` at the moment of that cancellation

    @property
    def next_number(self) -> int:
        """The number of its next collective; while it has joined, of the first that it skips."""
        return self.sequence if self.joined_at is None else self.joined_at

    def has_posted(self, slot: Slot) -> bool:
        """Return whether it has posted that collective and was not cancelled out of it."""
        if slot is self.group.joining:
            return self.joined_at is not None
        return slot.number < self.sequence and self.position not in slot.absent and self.abandoned != slot.number

    def has_settled(self, number: int) -> bool:
        """Return whether it cannot make another call before the doomed collective of that number is analysed.

        It has ended, or it waits in that collective or a later one, or it has made a call after a cancellation.
        """
        if self.replica.end is not None:
            return True
        if self.abandoned is not None and self.sequence > number and self.sequence > self.abandoned_at:
            return True
        return any(slot.waiters[self.position] is not None for slot in self.group.slots() if slot.number >= number)


class Group:
    """All replicas of a run, or some of them, and the order of their collectives."""

    def __init__(
        self, ledger: Ledger, key: GroupKey, replicas: Sequence[Replica], made_at: tuple[Any, int] | None, serial: int
    ) -> None:
        self.ledger = ledger
        self.key = key  # its identity in every process
        ids = key[0]
        self.size: int = len(ids)  # how many members it has in all processes
        ranks: Any = ids  # as in a run's own group, which may have thousands of members elsewhere
        if not all(each.id < self.size and ids[each.id] == each.id for each in replicas):
            ranks = {replica_id: rank for rank, replica_id in enumerate(ids)}
        self.members: list[Member] = [Member(each, self, at, ranks[each.id]) for at, each in enumerate(replicas)]
        self.spans: bool = self.size != len(self.members)  # it has members in other processes
        self.made_at = made_at  # where the first member made it; None for the run's own group
        self.serial = serial  # its number among the groups of the run, in the order of their making
        self.open: dict[int, Slot] = {}  # the incomplete slots by number, without the join
        self.joining: Slot | None = None  # the join's slot, while a member has joined
        self.doomed: int | None = None  # the number from which on no slot is matched any more
        self.history: deque[tuple[int, RawPost, Others | None, set[int]]] = deque(maxlen=HISTORY)
        self.failed: list[Slot] = []  # those that completed with an error before they were matched
        self._first_gone = _NEVER  # the lowest number that a member never posts, because it has ended or joined
        self._unsettled: set[int] | None = None
        self._callers = CallerOrder(HISTORY)  # a report could show no older ones
        for member in self.members:
            member.replica.members.add(member)

    @property
    def is_root(self) -> bool:
        """Whether this is the run's own group."""
        return self is self.ledger.root

    def member_of(self, replica_id: int) -> Member:
        """Return a replica of this process as a member of the group."""
        members, first = self.members, self.ledger.replicas[0].id
        likely = members[(replica_id - first) % len(members)]  # right for the run's own group
        return likely if likely.replica_id == replica_id else next(m for m in members if m.replica_id == replica_id)

    def slots(self) -> Iterator[Slot]:
        """Yield the incomplete slots, the join last."""
        yield from self.open.values()
        if self.joining is not None:
            yield self.joining

    # A collective that goes well.

    def post(self, member: Member, call: Call, code: Any, offset: int, path: Path = ()) -> Slot:
        """Post a member's next collective; return the slot, which may be matched now.

        ``code`` and ``offset`` are the call site (or a `Place` and 0); ``path`` are the callers.

        Raises:
            ReplicaContextError: the member has joined.
        """
        number = member.sequence
        slot = self.open.get(number)
        if slot is None:
            slot = self._open_slot(member, number, call, code, offset, path)
        elif call is not slot.call or offset != slot.offset or code is not slot.code or path != slot.path:
            self._compare(slot, member.position, (call, code, offset, path))
        member.sequence = number + 1
        slot.missing -= 1
        if not slot.missing and (self.doomed is None or number < self.doomed):
            if slot.others is not None and not self._callers_agree(slot):
                self.doom(number)
                return slot
            slot.matched = True  # `_match`, inlined
            raw = (slot.call, slot.code, slot.offset, slot.path)
            self.history.append((number, raw, slot.others, slot.absent))
        return slot

    def _open_slot(self, member: Member, number: int, call: Call, code: Any, offset: int, path: Path) -> Slot:
        if member.joined_at is not None:
            raise ReplicaContextError(
                "this replica has joined: the others' collectives continue without it until all have joined; await "
                "the handle that ctx.join() returned before the next collective"
            )
        slot = self.open[number] = self.ledger.slot_type(self, number, call, code, offset, path)
        if self is not self.ledger.root:
            self.ledger.active_groups.add(self)
        if number >= self._first_gone:
            slot.absent = {m.position for m in self.members if m.joined_at is not None and m.joined_at <= number}
            slot.missing -= len(slot.absent)
            if any(m.replica.end is not None and m.sequence <= number for m in self.members):
                self.doom(number)
        return slot

    def _compare(self, slot: Slot, position: int, post: RawPost) -> None:
        """Compare the meaning of a post that is not identical to the first one."""
        if difference(self.ledger.order_check, post_of(post), slot.first) is not None:
            self.doom(slot.number)
        slot.add(position, post)

    def _callers_agree(self, slot: Slot) -> bool:
        """Return False if replicas have now come through the same callers in different orders."""
        if slot.call.name is not None or self.ledger.order_check is not OrderCheck.CALL_SITE or slot.absent:
            return True
        usual, others = nearest_callers(slot.first), slot.others or {}
        differing = {position: nearest_callers(post_of(post)) for position, post in others.items()}
        ways = (differing.get(member.position, usual) for member in self.members)
        return self._callers.note(slot.number, ways, slot.first.path[0][:3]) is None

    def _match(self, slot: Slot) -> None:
        slot.matched = True
        self.history.append((slot.number, slot.raw, slot.others, slot.absent))

    def complete(self, slot: Slot) -> None:
        """Note that a slot has its result, or its error."""
        slot.complete = True
        if not slot.matched:
            self.failed.append(slot)
        if slot is self.joining:
            self.joining = None
        else:
            del self.open[slot.number]
        if self is not self.ledger.root and not self.open and self.joining is None:
            self.ledger.release(self)

    # Joining.

    def join(self, member: Member, call: Call, code: Any, offset: int) -> list[Slot]:
        """Note that a member has joined; return the slots that are matched by that, the join last.

        Raises:
            ReplicaContextError: it has joined already.
        """
        if member.joined_at is not None:
            raise ReplicaContextError("this replica has joined already; await the handle that ctx.join() returned")
        slot, is_first = self.joining, self.joining is None
        if slot is None:
            slot = self.joining = self.ledger.slot_type(self, _JOINED, call, code, offset, ())
            self.ledger.active_groups.add(self)
        slot.add(member.position, (call, code, offset, ()))
        slot.missing -= 1
        member.joined_at, member.sequence = member.sequence, _JOINED
        self._first_gone = min(self._first_gone, member.joined_at)
        matched = []
        for number in sorted(number for number in self.open if number >= member.joined_at):
            each = self.open[number]
            each.absent = each.absent or set()
            each.absent.add(member.position)
            each.missing -= 1
            if not each.missing and (self.doomed is None or number < self.doomed):
                self._match(each)
                matched.append(each)
        if not slot.missing and self.doomed is None:
            slot.matched = True
            matched.append(slot)
        elif is_first and any(each.replica.end is not None for each in self.members):  # later ends: see `note_end`
            self.doom(self.number_of_join())
        return matched

    def number_of_join(self) -> int:
        """Return the number that the join will have: the first that no member has used."""
        return max(each.next_number for each in self.members)

    def finish_join(self, slot: Slot, number: int) -> None:
        """Give the join its number, and let all members continue after it."""
        slot.number = number
        self.joining = None
        self.open[number] = slot
        for member in self.members:
            member.joined_at, member.sequence = None, number + 1
        self._first_gone = min((m.sequence for m in self.members if m.replica.end is not None), default=_NEVER)
        self._match(slot)

    # Groups of some of the members.

    def new_group(
        self, member: Member, ranks: tuple[int, ...], name: str | None, code: Any, offset: int, path: Path = ()
    ) -> Member:
        """Make a member's next group of these members with this name, or find it if another member has made it.

        ``ranks`` are the members' ranks in this group, in the order of their new ranks.

        Returns:
            The replica as a member of the new group.
        """
        ids = tuple(self.key[0][rank] for rank in ranks)
        made = self.ledger.group_counts[ids, name]
        key = ids, name, made[member.replica_id]
        made[member.replica_id] += 1
        group = self.ledger.partial_groups.get(key)
        if group is None:
            group = self.ledger.partial_groups[key] = self.ledger.make(key, (code, offset), sequence=-1)
        own = group.member_of(member.replica_id)
        call = Call("new_group", members=group.key[0], name=name)  # one tuple for all: thousands compare it
        slot = group.post(own, call, code, offset, path)
        if slot.matched:
            group.complete(slot)
            del self.ledger.partial_groups[key]
        return own

    # Trouble.

    def doom(self, number: int) -> None:
        """Match no slot from that number on."""
        if self.doomed is None or number < self.doomed:
            self.doomed = number
            self._unsettled = None
            self.ledger.doomed_groups.add(self)

    def abandon(self, member: Member, slot: Slot) -> None:
        """Note that a member was cancelled out of an incomplete slot."""
        number = slot.number
        member.abandoned = number if member.abandoned is None else min(member.abandoned, number)
        member.abandoned_at = member.sequence
        self.doom(number)
        self.update_settled(member)

    def note_end(self, member: Member) -> None:
        """Note that the function of a member's replica has ended."""
        self._first_gone = min(self._first_gone, member.sequence)
        lacking = [number for number in self.open if number >= member.sequence]
        if lacking:
            self.doom(min(lacking))
        elif self.joining is not None and member.joined_at is None:
            self.doom(self.number_of_join())
        self.update_settled(member)

    def update_settled(self, member: Member) -> None:
        """Update whether a member of a doomed group has settled."""
        if self.doomed is None or self._unsettled is None:
            return
        if member.has_settled(self.doomed):
            self._unsettled.discard(member.position)
        else:
            self._unsettled.add(member.position)

    @property
    def unsettled(self) -> int:
        """How many members of a doomed group can still make a call before it is analysed."""
        if self.doomed is None:
            return len(self.members)
        if self._unsettled is None:
            self._unsettled = {m.position for m in self.members if not m.has_settled(self.doomed)}
        return len(self._unsettled)

    # As a record.

    def record(self) -> GroupRecord:
        """Return the group's state at this moment."""
        from aiodist._core.snapshot import GroupRecord, MemberRecord, SlotRecord  # loaded when there is a report

        members = sorted(self.members, key=lambda member: member.replica_id)
        everyone = tuple(member.replica_id for member in members)
        known: dict[tuple[Any, ...], Post] = {}

        def post(raw: RawPost) -> Post:
            call, code, offset, path = raw
            key = (id(call), id(code), offset, path)
            return known.get(key) or known.setdefault(key, post_of(raw))

        def posts(there: list[Member], first: RawPost, others: Others | None) -> Posts:
            if not others:
                ids = everyone if len(there) == len(members) else tuple(member.replica_id for member in there)
                return ((post(first), ids),) if ids else ()
            by_post: dict[Post, list[int]] = {}
            for member in there:
                by_post.setdefault(post(others.get(member.position, first)), []).append(member.replica_id)
            return tuple((each, tuple(ids)) for each, ids in by_post.items())

        def not_in(absent: set[int]) -> list[Member]:
            return [member for member in members if member.position not in absent] if absent else members

        def slot_record(slot: Slot, number: int) -> SlotRecord:
            if slot is self.joining:
                there = [member for member in members if member.position in (slot.others or {})]
            else:
                there = [member for member in not_in(slot.absent) if member.sequence > number]
            waiting = tuple(sorted(member.replica_id for member in slot.waiting()))
            return SlotRecord(number, posts(there, slot.raw, slot.others), waiting)

        open_slots = [*self.open.values(), *(slot for slot in self.failed if slot.number < _JOINED)]
        return GroupRecord(
            self.key,
            None if self.made_at is None else place(*self.made_at),
            tuple(MemberRecord(m.replica_id, m.next_number, m.joined_at is not None, m.abandoned) for m in members),
            tuple(
                SlotRecord(number, posts(not_in(absent), first, others))
                for number, first, others, absent in self.history
                if number not in self.open
            ),
            tuple(slot_record(slot, slot.number) for slot in sorted(open_slots, key=lambda slot: slot.number)),
            None if self.joining is None else slot_record(self.joining, self.number_of_join()),
        )

    def label(self) -> str | None:
        """Return what reports call the group."""
        made_at = None if self.made_at is None or -1 in self.open else place(*self.made_at).location
        return group_label(*self.key, made_at)


class Ledger:
    """The order check of one run.

    Args:
        replicas: the ids of the replicas that this process runs, ascending.
        order_check: how call sites are compared.
        total: how many replicas the run has over all processes; None for these alone.
        slot_type: the class of slots.
    """

    def __init__(
        self,
        replicas: Sequence[int],
        order_check: OrderCheck = OrderCheck.CALL_SITE,
        *,
        total: int | None = None,
        slot_type: type[Slot] = Slot,
    ) -> None:
        self.order_check = order_check
        self.slot_type = slot_type
        self.replicas: list[Replica] = [Replica(replica_id) for replica_id in replicas]
        self.replica_by_id: dict[int, Replica] = {replica.id: replica for replica in self.replicas}
        self.doomed_groups: set[Group] = set()
        # How many groups with certain members and a certain name each replica has made.
        self.group_counts: defaultdict[tuple[tuple[int, ...], str | None], Counter[int]] = defaultdict(Counter)
        self.partial_groups: dict[GroupKey, Group] = {}  # those that some of their members have not made yet
        self._groups_made = 0
        self._groups: WeakSet[Group] = WeakSet()
        self.active_groups: set[Group] = set()  # those with open slots
        self._recent: deque[Group] | None = None if total is None else deque(maxlen=_MOST_RECENT)
        ids = everyone(total) if total is not None else tuple(replicas)
        self.root: Group = Group(self, (ids, None, -1), self.replicas, None, 0)

    def make(self, key: GroupKey, made_at: tuple[Any, int] | None = None, *, sequence: int = 0) -> Group:
        """Return a new group, to which the ledger refers weakly; its members begin with that number."""
        own = [self.replica_by_id[each] for each in key[0] if each in self.replica_by_id]
        self._groups_made += 1
        group = Group(self, key, own, made_at, self._groups_made)
        for member in group.members:
            member.sequence = sequence
            if member.replica.end is not None:
                group.note_end(member)
        self._groups.add(group)
        return group

    def release(self, group: Group) -> None:
        """Drop the reference to a group whose slots are all complete.

        A slot that is complete here may still be open in another process. So the latest groups are kept a little
        longer: otherwise a replica that has made all its calls in a group, and has ended, would seem not to have made
        it.
        """
        self.active_groups.discard(group)
        if self._recent is not None and (not self._recent or self._recent[-1] is not group):
            self._recent.append(group)

    def groups(self) -> list[Group]:
        """Return every group of the run, in the order in which they were made; the run's own is the first."""
        return [self.root, *sorted(self._groups, key=lambda group: group.serial)]

    def end(self, replica: Replica, state: ReplicaState) -> None:
        """Note, in all groups of the run, that a replica's function has ended, and how."""
        replica.end = state
        for member in sorted(replica.members, key=lambda member: member.group.serial):
            member.group.note_end(member)

    def open_slots(self) -> list[Slot]:
        """Return the incomplete slots of all groups, by group and number, a group's join last."""
        return [slot for group in self.groups() for slot in sorted(group.slots(), key=lambda slot: slot.number)]

    def progress(self) -> tuple[int, ...]:
        """Return counters, of which one changes whenever a replica posts or ends, or a collective completes."""
        groups = self.groups()
        return (
            sum(member.sequence for group in groups for member in group.members),
            sum(len(group.open) + (group.joining is not None) for group in groups),
            sum(replica.end is not None for replica in self.replicas),
            self._groups_made,
        )

    def stuck(self) -> set[int]:
        """Return the ids of replicas that wait for each other in slots, assuming that none of their tasks still runs.

        Replicas of other processes are assumed to wait, too.
        """
        blockers: dict[Slot, list[int]] = {}
        for slot in self.open_slots():
            members = slot.group.members
            elsewhere = [_ELSEWHERE] if slot.group.spans else []
            if (slot.missing or elsewhere) and slot.has_waiters():
                blockers[slot] = [*(m.replica_id for m in members if not m.has_posted(slot)), *elsewhere]
        waits = grouped((member.replica_id, slot) for slot in blockers for member in slot.waiting())
        return stuck(waits, blockers, (_ELSEWHERE,))

    def snapshot(self, facts: Iterable[ReplicaFacts] = (), **more: Any) -> Snapshot:
        """Return a snapshot, with ``facts`` on each replica; ``more`` are further fields of `Snapshot`."""
        from aiodist._core.snapshot import ReplicaFacts, Snapshot  # loaded when there is a report

        known = tuple(facts) or tuple(ReplicaFacts(each.id, f"CPU:{each.id}", each.end) for each in self.replicas)
        return Snapshot(self.order_check, known, tuple(group.record() for group in self.groups()), **more)
