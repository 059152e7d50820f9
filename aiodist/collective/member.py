"""A member: one replica as its sync group sees it. Where it is in its program of collectives, and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from aiodist._core.report import Location, ReplicaState

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup


_MOST_FRAMES = 32
JOIN: Final = 1 << 60
"""The number of a join while it is open; see `joining`."""


class Ending:
    """How a replica's function returned: with what, and at which instruction, where that is known."""

    __slots__ = ("code", "offset", "value")

    def __init__(self, value: Any, frame: FrameType | None) -> None:
        self.value = value
        self.code = None if frame is None else frame.f_code
        self.offset = 0 if frame is None else frame.f_lasti


class Member:
    """A replica in a sync group.

    Attributes:
        position: its place in the group, from 0: what it is called by in the group's own context.
        replica_id: its id in the run, from 0: what reports call it by. In the run's own group it is the position,
            counted over all workers.
        device: its device, in canonical form.
        group: its sync group.
        sequence: the number of its next collective, so also how many it has issued.
        end: how its function ended; None while it runs.
        ending: with what and where it returned; None unless it has.
        joined_at: the number of the first collective that it has not made because it has joined; None while it has not.
        abandoned: the number of the first collective that it was cancelled out of; None if there is none.
        abandoned_at: ``sequence`` at the moment of that cancellation.
        cancelled_in: the files and lines that it was at then, innermost first.
        refusal: where it was not cancelled, but its call refused, what that has raised.
        told: the error that ended the group has been raised in it.
        stack: tells where it is suspended or runs, innermost last.
        parts: in the run's own group, what the replica is in other groups; None as long as it is in none.
    """

    __slots__ = (
        "__weakref__",
        "abandoned",
        "abandoned_at",
        "cancelled_in",
        "device",
        "end",
        "ending",
        "group",
        "joined_at",
        "parts",
        "position",
        "refusal",
        "replica_id",
        "sequence",
        "stack",
        "told",
    )

    def __init__(self, position: int, device: str, group: SyncGroup) -> None:
        self.position = position
        self.replica_id = position
        self.device = device
        self.group = group
        self.sequence = 0
        self.end: ReplicaState | None = None
        self.ending: Ending | None = None
        self.joined_at: int | None = None
        self.abandoned: int | None = None
        self.abandoned_at = 0
        self.cancelled_in: tuple[tuple[str, int], ...] = ()
        self.refusal = ""
        self.told = False
        self.stack: Callable[[], tuple[Location, ...]] = tuple
        self.parts: WeakSet[Member] | None = None

    def abandon(self, number: int) -> None:
        """Note that it was cancelled out of that collective, which is not complete."""
        if self.abandoned is None or number < self.abandoned:
            self.cancelled_in = _lines_here()
        self.abandoned = number if self.abandoned is None else min(self.abandoned, number)
        self.abandoned_at = self.sequence

    def arrived_at(self, number: int) -> bool:
        """Whether it has issued that collective and was not cancelled out of it."""
        return self.sequence > number and self.abandoned != number

    def stands_aside(self, number: int) -> bool:
        """Whether it has not made that collective itself, because it has joined."""
        return self.joined_at is not None and self.joined_at <= number < JOIN

    def has_settled(self, number: int) -> bool:
        """Whether nothing more need be awaited from it to judge that collective.

        It has ended, or it waits in that one or one behind it, and so can make no further call. After a cancellation
        it has settled when it shows what it does next.
        """
        if self.end is not None:
            return True
        if self.abandoned is not None:
            return self.sequence > number and self.sequence > self.abandoned_at
        waits = self.group.open.items()
        return any(n >= number and meeting.waiters[self.position] is not None for n, meeting in waits)


def _lines_here() -> tuple[tuple[str, int], ...]:
    """Return the files and lines that run now, innermost first; not aiodist's own."""
    lines: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < _MOST_FRAMES:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] != "aiodist":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)
