"""A sync group that has replicas on other workers, too: the local part of it, with a bridge to the other parts."""

from __future__ import annotations

from functools import partial

from aiodist.collective.bridge import Bridge
from aiodist.collective.group import SyncGroup
from aiodist.collective.rendezvous import Rendezvous
from aiodist.vocabulary.errors import CollectiveError


class SpannedGroup(SyncGroup):
    """The local replicas of a run that spans several workers.

    What all local replicas have agreed on crosses the bridge, and `finish_merge` completes it when it comes back.
    Trouble is not judged here: the bridge hears of it, and `settle` brings the verdict on everybody.
    """

    _arriving: Rendezvous | None = None

    def span(self, bridge: Bridge, offset: int, world_size: int) -> None:
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

    def _agree(self, meeting: Rendezvous, last: int) -> None:
        meeting.agreed = True
        self.agreed.append((meeting.number, *meeting.call, meeting.others))
        assert self.bridge is not None
        self._arriving = meeting
        self.bridge.cross(meeting)
        self._arriving = None
        if not meeting.complete:
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

    def _decide(self, overdue: Rendezvous | None = None) -> None:
        if any(member.end is None for member in self.members):
            assert self.bridge is not None
            self.bridge.complain(overdue)

    def consider_all(self) -> None:
        """Look where all replicas are, because others are in trouble; complain when each has shown what it does."""
        if self.trouble is None:
            self._set_trouble(min(member.sequence for member in self.members))
        for member in self.members:
            self.consider(member)

    def settle(self, error: CollectiveError) -> None:
        """End the group with the verdict."""
        if not self.closed:
            self.give_up(error)
