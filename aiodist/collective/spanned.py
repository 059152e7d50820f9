"""Sync groups of a run that has replicas on other workers: the local parts of them, with bridges to the other parts.

What all local replicas have agreed on crosses the bridge, and `finish_merge` completes it when it comes back. Trouble
is not judged here: the run's bridge hears of it, in whichever group it is, and `SpannedGroup.settle` brings the verdict
on everybody.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Final

from aiodist._core.errors import CollectiveError
from aiodist._core.report import ReplicaState
from aiodist.collective.bridge import Bridge, RunBridge
from aiodist.collective.group import SyncGroup
from aiodist.collective.member import Member
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.subgroup import SubGroup

LONGEST_WITHOUT_A_TURN: Final = 500e-6
"""Seconds for which a replica that is alone on its worker may go from meeting to meeting, before others have a turn."""

_IN_STEP: Final = 4
"""At every so many-th meeting it may have waited half as long: workers come to give way at the same meetings by that,
where each that gives way alone keeps the others waiting."""


class _OfWorkers(SyncGroup):
    """What the groups of such a run have in common."""

    def _decide(self, overdue: Rendezvous | None = None) -> None:
        if any(member.end is None for member in self.members):
            self.root.bridge.complain(self, overdue)

    def consider_all(self, number: int | None) -> None:
        """Look where all replicas are, because others are in trouble; complain when each has shown what it does.

        Args:
            number: the meeting that cannot complete. None: it is not known, or is one of another group's.
        """
        if number is not None:
            self._set_trouble(number)
        elif self.trouble is None:
            self._set_trouble(min(member.sequence for member in self.members))
        for member in self.members:
            self.consider(member)


class _Crossing(_OfWorkers):
    """What those have in common that have members elsewhere."""

    _arriving: Rendezvous | None = None
    _gives_way_from = _may_give_way_from = 0.0  # who is alone here has no order to take its place in

    def _agree(self, meeting: Rendezvous, last: int) -> None:
        meeting.agreed = True
        self.agreed.append((meeting.number, meeting.signature, meeting.code, meeting.offset, meeting.others))
        self._arriving = meeting
        self.bridge.cross(meeting)
        self._arriving = None
        if not meeting.complete:
            return
        if self.size == 1:
            meeting.released = True  # nobody waits in it: its only replica is about to
            now = perf_counter()
            if now > self._gives_way_from or (now > self._may_give_way_from and not meeting.number % _IN_STEP):
                meeting.last = last
                self._may_give_way_from = now + LONGEST_WITHOUT_A_TURN / 2
                self._gives_way_from = now + LONGEST_WITHOUT_A_TURN
            return
        meeting.last = last
        if last == self.size - 1:
            self.release(meeting)
        else:  # it takes its place among the others, as on one machine
            self.engine.call_soon(partial(self.release, meeting))

    def release(self, meeting: Rendezvous) -> None:
        """Wake those who wait in a complete meeting; where it is complete in its last arrival, after that."""
        if meeting is not self._arriving:
            super().release(meeting)


class SpannedGroup(_Crossing):
    """The local replicas of a run that spans several workers."""

    def span(self, bridge: RunBridge, offset: int, world_size: int) -> None:
        """Connect the group.

        Args:
            bridge: the way to the other parts.
            offset: the id of the first local replica, over all parts.
            world_size: how many replicas there are, over all parts.
        """
        self.bridge = bridge
        self.offset = offset
        self.world_size = world_size
        self.places = range(offset, offset + self.size)
        for member in self.members:
            member.replica_id = offset + member.position

    def settle(self, error: CollectiveError) -> None:
        """End the group with the verdict."""
        if not self.closed:
            self.give_up(error)


def open_in(group: SyncGroup) -> dict[int, Rendezvous]:
    """Return the meetings that are not complete, by number; one that has failed here may be open elsewhere."""
    meetings = dict(list(group.open.items()))
    if group.failed is not None:
        meetings[group.failed.number] = group.failed
    return meetings


class LocalPart(_OfWorkers, SubGroup):
    """A group all of whose members are local."""


class SpannedPart(_Crossing, SubGroup):
    """The local members of a group that has members elsewhere, too."""

    def connect(self, bridge: Bridge) -> None:
        """Connect the group."""
        self.bridge = bridge

    def _end(self, member: Member, state: ReplicaState) -> None:
        super()._end(member, state)
        if all(each.end is not None for each in self.members):
            self.bridge.close()
