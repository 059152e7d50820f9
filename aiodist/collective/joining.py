"""Joining: a replica that has run out of work takes part in the others' collectives, with nothing, until all have.

While it has joined, a replica counts as arrived at every collective that the others begin, and brings nothing: a
reduction is one of what the others bring, a MEAN is divided by their number. What needs a value of every replica, or
hands a part to each, cannot be made any more (`Kind.needs`), and says so in those who wait in it.

**The join is a collective**, the last open one of the group while it lasts: it stands at a number beyond all others
(`JOIN`), and a replica that has joined is past it, so whoever looks what a replica has arrived at finds it there. An
end or a cancellation of a replica is dealt with as in any other collective. When the last replica joins, the join takes
the first number that no replica has used, and all go on behind it: who has made fewer collectives has skipped numbers.

What was rejected: a flag in every arrival (the way of a collective that goes well would pay for it); neutral arrays in
the place of what is missing (they would have to be made in every shape and dtype, for MIN there is none, and adding 0
to -0.0 changes it).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from aiodist._arrays.options import CommunicationOptions
from aiodist._core.errors import ReplicaContextError
from aiodist._core.report import Reason
from aiodist.collective.kinds import Kind
from aiodist.collective.member import JOIN, Member
from aiodist.collective.rendezvous import Rendezvous

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.signature import Signature


def _last(signature: Signature, values: Sequence[Any], options: CommunicationOptions) -> Any:  # noqa: ARG001  (as all kinds)
    """Return the position of the replica that joined last, which is all that is brought."""
    return values[0]


_SIGNATURE: Signature = (Kind("join", Reason.AXIS, _last), None, None, None, None, None, None, None, None)


def join(group: SyncGroup, member: Member, code: CodeType, offset: int) -> Any:
    """Let a replica join.

    Args:
        group: the group.
        member: the replica in it.
        code: the caller's code, with
        offset: the offset of the call in it.

    Returns:
        The handle to await; it gives the position of the replica that joined last.

    Raises:
        ReplicaContextError: it has joined already.
    """
    if member.joined_at is not None:
        raise _has_joined()
    meeting = group.open.get(JOIN)
    if meeting is None:
        meeting = group.open[JOIN] = Rendezvous(JOIN, _SIGNATURE, code, offset, group.size, group._clock())
    meeting.add_other(member.replica_id, _SIGNATURE, code, offset)
    meeting.missing -= 1
    if not group.closed:
        member.joined_at, member.sequence = member.sequence, JOIN + 1
        group._ended_at = min(group._ended_at, member.joined_at)
    handle = group._handle(meeting, member, None)
    if group.observer is not None:
        group.observer.arrived(member, meeting)
    if member.joined_at is not None:
        _stand_aside(group, member, member.joined_at)
    if group.trouble is not None:
        group._arrive_in_trouble(member, meeting)
    elif not meeting.missing:
        _finish(group, meeting, member)
    return handle


def _has_joined() -> ReplicaContextError:
    return ReplicaContextError(
        "this replica has joined: the others' collectives go on without it until all have joined; await the handle "
        "that ctx.join() gave before the next collective"
    )


def begin_without(group: SyncGroup, meeting: Rendezvous) -> None:
    """Begin a collective without the replicas that have joined; one that has ended is in trouble with the others.

    Raises:
        ReplicaContextError: the replica that begins it has joined itself.
    """
    number = meeting.number
    if number > JOIN:
        del group.open[number]
        raise _has_joined()
    absent = tuple(member.position for member in group.members if member.stands_aside(number))
    if absent:
        meeting.absent = absent
        meeting.missing -= len(absent)
    if any(member.end is not None and member.sequence <= number for member in group.members):
        group._set_trouble(number)


def _stand_aside(group: SyncGroup, member: Member, joined_at: int) -> None:
    """Take part with nothing in the collectives that are open."""
    for number in sorted(group.open):
        meeting = group.open[number]
        if joined_at <= number < JOIN:
            meeting.absent = (*(meeting.absent or ()), member.position)
            meeting.missing -= 1
            if not meeting.missing and (group.trouble is None or number < group.trouble):
                group._agree(meeting, -1)


def _finish(group: SyncGroup, meeting: Rendezvous, last: Member) -> None:
    """Complete the join, or take it to other workers, who go on without the local replicas until all have joined."""
    meeting.values = [last.position]
    if group.bridge is not None:
        meeting.agreed = True
        group.bridge.cross(meeting)
        return
    complete(group, meeting, number_of_join(group))
    group._agree(meeting, last.position)


def complete(group: SyncGroup, meeting: Rendezvous, number: int) -> None:
    """Let all replicas go on behind the join, which takes that number."""
    del group.open[JOIN]
    meeting.number = number
    group.open[number] = meeting
    for member in group.members:
        member.joined_at, member.sequence = None, number + 1
    group._ended_at = min((m.sequence for m in group.members if m.end is not None), default=JOIN)


def number_of_join(group: SyncGroup) -> int:
    """Return the number that the join will have: the first that no replica has used."""
    return max(member.sequence if member.joined_at is None else member.joined_at for member in group.members)
