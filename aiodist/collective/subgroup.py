"""Groups of some of a run's replicas, each with an order of collectives of its own.

**Making one** is not awaited: it is a call that every member makes, each in its own time. What members make for the
same replicas under the same name is the same group, the first with the first, the second with the second. So a member
that arrives finds the group that another has made, or makes it, and the group stands in the list of its parent
(`SyncGroup.making`) until all members have come by.

**The creation is collective #-1 of the group**, the one that nobody awaits: call sites are compared by it, a difference
puts the group in trouble before its first collective, and a replica that ended without it is one that all others miss.
It has no deadline, for nobody waits in it.

**What keeps a group**: the contexts of its members, and the handles of its open collectives. The run's own group knows
it by a weak reference, so a program may make a group at every step. One whose collective was dropped unawaited while
others were missing is kept to the end (`keep`), to be told of there.

What was rejected: matching groups by the order of their creation alone, as the sequence numbers of collectives match
(replica 1, in one group fewer than replica 0, would have to count what it does not make); an awaited creation (it
would synchronise replicas that need not meet before their first collective).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from types import CodeType
from typing import Any
from weakref import WeakSet

from aiodist._core.report import Location
from aiodist.collective.branches import Branches
from aiodist.collective.callsite import location
from aiodist.collective.group import SyncGroup
from aiodist.collective.kinds import NEW_GROUP
from aiodist.collective.member import Member
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import Signature
from aiodist.collective.wording import ids, shown_file

Key = tuple[tuple[int, ...], str | None]
_serials = count(1)


class Making:
    """The groups of one list of replicas and one name that not all their members have made yet.

    Attributes:
        counts: by position in the parent group, how many a member has made.
        groups: the groups, by how many were made before.
    """

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.groups: dict[int, SubGroup] = {}


class SubGroup(SyncGroup):
    """A sync group of some replicas of a run; where that has replicas on several workers, the local ones of them.

    Attributes:
        everyone: the ids in the run of all members, in the order of the group.
        name: what it is called, if anything.
        made_at: the code that makes it first, and the offset of the call in it.

    Args:
        parent: the group that it was made in.
        positions: its members' ids there, in the order that they have here.
        name: what it is called, if anything.
        code: the code that makes it first, with
        offset: the offset of the call in it.
    """

    def __init__(
        self, parent: SyncGroup, positions: tuple[int, ...], name: str | None, code: CodeType, offset: int
    ) -> None:
        root = parent.root
        everyone = tuple(parent.replica_id_of(position) for position in positions)
        here = [place for place, replica_id in enumerate(everyone) if 0 <= replica_id - root.offset < root.size]
        of_run = [root.members[everyone[place] - root.offset] for place in here]
        super().__init__([member.device for member in of_run], root.order_check, root.options)
        self.world_size = len(everyone)
        self.everyone, self.places = everyone, here
        self.root = root
        self.parent = parent  # whose list of groups in the making must last as long as this
        self.serial = next(_serials)
        self.closed, self.verdict = root.closed, root.verdict
        self.name, self.made_at = name, (code, offset)
        Branches.of(root).groups.add(self)
        self.attach(root.engine, root.thread)
        self._handle = root._handle
        self.observer = root.observer
        for member, own in zip(self.members, of_run, strict=True):
            self._bind(member, own)

    def _bind(self, member: Member, own: Member) -> None:
        """Make a member that same replica of the run."""
        member.replica_id = own.replica_id
        member.sequence = -1
        member.stack = partial(_stack_of, own)
        member.end = own.end
        member.told = self.closed  # or it could go from group to group, never to be cancelled
        if own.end is not None:
            self._ended_at = -1
        own.parts = own.parts if own.parts is not None else WeakSet()
        own.parts.add(member)

    @property
    def label(self) -> str:
        """What reports call it."""
        in_the_making = any(meeting.number < 0 for meeting in self.open.values())
        return label_of(self.everyone, self.name, None if in_the_making else location(*self.made_at))

    def replica_id_of(self, place: int) -> int:
        """Return the id in the run of the replica that has that id here."""
        return self.everyone[place]

    def keep(self) -> None:
        """Last as long as the run does, whoever lets go of it."""
        if self.root.branches is not None:
            self.root.branches.kept.add(self)

    def _begin(self, number: int, signature: Signature, code: CodeType, offset: int) -> Rendezvous:
        meeting = super()._begin(number, signature, code, offset)
        if number < 0:
            meeting.deadline = None
        return meeting

    def _set_alarm(self, at: float) -> None:
        self.root._set_alarm(at)


def label_of(everyone: Sequence[int], name: str | None, made: Location | None) -> str:
    """Return what reports call a group.

    Args:
        everyone: its members' ids in the run.
        name: its name.
        made: where it was made; None where the members may not agree on the place.
    """
    replicas = ids(everyone)
    if name is not None:
        return f"group {name!r} of {replicas}"
    return f"the group of {replicas}" + (f" made at {shown_file(made.file)}:{made.line}" if made is not None else "")


def _stack_of(member: Member) -> tuple[Location, ...]:
    return member.stack()


def join(
    member: Member, positions: tuple[int, ...], name: str | None, path: Any, code: CodeType, offset: int
) -> Member:
    """Let a replica make the next group of these members under this name, or find the one that another has made.

    Args:
        member: the replica, in the group that it makes the new one in.
        positions: the members' ids there.
        name: the new group's name.
        path: the call's path, where paths are compared.
        code: the caller's code, with
        offset: the offset of the call in it.

    Returns:
        The replica as a member of the new group.
    """
    parent = member.group
    key = positions, name
    making = parent.making.setdefault(key, Making())
    number = making.counts.get(member.position, 0)
    making.counts[member.position] = number + 1
    group = making.groups.get(number)
    if group is None:
        make = SubGroup if parent.root.bridge is None else parent.root.bridge.new_part
        group = making.groups[number] = make(parent, positions, name, code, offset)
    assert group is not None
    place = positions.index(parent.places[member.position])
    joined: Member = group.members[group.places.index(place)]
    signature = (NEW_GROUP, None, group.everyone, name, None, None, None, None, path)
    group.arrive(joined, signature, code, offset, None)._awaited = True
    if all(each.sequence >= 0 for each in group.members):
        del making.groups[number]
        if not making.groups:  # all members have made equally many
            del parent.making[key]
    return joined
