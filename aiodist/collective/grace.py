"""The grace: how long replicas that can still make a call are let run, before what all of them did is judged.

A tenth of a second in which none of them settles is enough where they run. It is not where the whole process stood
still, as it does on a busy machine: the time is over before anybody has had a turn. So the end of the grace is followed
by a few turns of the loop, in which those that are ready run; one that settles begins a new grace.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup

GRACE_SECONDS = 0.1
_TURNS = 8


def decide_after_turns(group: SyncGroup, turns: int = _TURNS) -> None:
    """Judge a group's trouble after some turns of the loop, unless a replica settles in them."""
    if group.closed or group._grace_ends is not None:
        return
    if turns:
        group.engine.call_soon(partial(decide_after_turns, group, turns - 1))
    else:
        group._decide()


def look(group: SyncGroup, now: float) -> None:
    """Look what is overdue in a group: the end of the grace, or a meeting's own deadline."""
    if group.closed:
        return
    timed = [meeting for meeting in group.open.values() if meeting.deadline is not None]
    late = min(timed, key=lambda meeting: meeting.deadline or 0.0, default=None)
    if group._grace_ends is not None and group._grace_ends <= now:
        group._grace_ends = None
        decide_after_turns(group)
    elif late is not None and late.deadline is not None and late.deadline <= now:
        group._decide(late)
    else:
        for at in (group._grace_ends, late.deadline if late is not None else None):
            if at is not None:
                group._set_alarm(at)
