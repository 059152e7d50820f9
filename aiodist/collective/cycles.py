"""Cycles across groups: replicas that wait for each other, each in another group, and so for ever.

A replica that waits in a collective waits for all that have not arrived there. Inside one group no circle can come of
it: who has not arrived in #k is before it, and waits at most in an earlier one. With several groups it can: replica 0
waits in #0 of one for replica 1, which waits in #0 of the other for replica 0.

**When to look.** A circle is closed by an await, never by an arrival alone. So each await of an open collective, in a
run with groups, calls for a look, once a turn of the event loop has gone by in which nobody else has begun to wait.

**What is certain.** A replica is stuck if all its tasks wait, and each of the collectives that they wait in lacks one
that is stuck, too. The largest set of replicas of which that holds is found by taking away those of which it does not,
until none is left to take away. Who waits is seen in the open meetings; that nothing else of a replica can run is what
the event loop is asked for (`Engine.only_wait`). A replica that has another task, a timer or a worker thread may still
arrive, so it is not stuck: of it only the timeout, or the report on a standstill, can tell.

What was rejected: a look at every arrival (of n replicas each would look at all the others); waiting for some tenths of
a second and calling that a deadlock (a slow replica is none).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiodist._core.errors import CollectiveMismatchError
from aiodist._core.report import CollectiveReport, Reason
from aiodist.collective import historian
from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.joining import number_of_join
from aiodist.collective.member import JOIN
from aiodist.collective.wording import ids, place

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.rendezvous import Rendezvous

PAUSE_SECONDS = 0.1
_PAUSE_PER_LOOK = 50
_MOST_SHOWN = 6


class Awaiting(NamedTuple):
    """An open collective that a replica waits in.

    Attributes:
        group: the group whose collective it is.
        meeting: the collective.
        missing: the ids of the replicas that it waits for.
    """

    group: SyncGroup
    meeting: Rendezvous
    missing: frozenset[int]


Waits = Mapping[int, Sequence[Awaiting]]


class CycleWatch:
    """Looks for cycles among the groups of a run.

    Args:
        root: the run's own group.
    """

    def __init__(self, root: SyncGroup) -> None:
        self._root = root
        self._awaited: set[Rendezvous] = set()  # since the last look
        self._stirred = 0
        self._under_way = False
        self._not_before = 0.0
        self._progress = -1
        self._again: float | None = None

    def stir(self, meeting: Rendezvous) -> None:
        """Look soon: somebody has begun to wait."""
        self._awaited.add(meeting)
        self._stirred += 1
        if not self._under_way:
            self._under_way = True
            self._root.engine.call_plainly(self._when_quiet, self._stirred)

    def _when_quiet(self, stirred: int) -> None:
        beyond = self._root.bridge is not None
        self._awaited = {meeting for meeting in self._awaited if meeting.missing or (beyond and not meeting.complete)}
        self._under_way = bool(self._awaited) and not self._root.closed
        if self._under_way and stirred != self._stirred:
            self._root.engine.call_plainly(self._when_quiet, self._stirred)
        elif self._under_way:
            self._under_way = False
            self._awaited.clear()
            self._look()

    def look_now(self) -> None:
        """Look also where nobody has begun to wait: another worker asks."""
        self._look_again(self._root._clock())

    def ring(self, now: float) -> None:
        """Look again, where the last look left it open."""
        if self._again is None or self._root.closed:
            return
        if self._again <= now:
            self._again = None
            self._look()
        else:
            self._root._set_alarm(self._again)

    def _look(self) -> None:
        root = self._root
        if root.bridge is not None:
            self._look_beyond()
            return
        waits = _waits(root)
        suspects = stuck(waits, waits)
        if not suspects:
            return
        if root._clock() < self._not_before:
            self._look_again(self._not_before)
            return
        began = time.perf_counter()
        meetings = {id(each.meeting): each.meeting for i in suspects for each in waits[i]}.values()
        waiters = [waiter for meeting in meetings for waiter in meeting.waiters if waiter is not None]
        certain = stuck(waits, root.engine.only_wait(root, suspects, waiters))
        if certain:
            root.give_up(error_of(root, waits, certain))
            return
        took = time.perf_counter() - began
        self._not_before = root._clock() + max(PAUSE_SECONDS, _PAUSE_PER_LOOK * took)
        self._look_again(self._not_before)

    def _look_beyond(self) -> None:
        """Tell the other workers which replicas do nothing but wait, where none has got on for some time."""
        root = self._root
        progress = sum(member.sequence for group in root.groups() for member in group.members)
        if progress != self._progress or root._clock() < self._not_before:
            self._progress = progress
            self._look_again(max(self._not_before, root._clock() + PAUSE_SECONDS))
            return
        began = time.perf_counter()
        meetings = [meeting for group in root.groups() for meeting in group.open.values() if meeting.has_waiters()]
        running = [member.replica_id for member in root.members if member.end is None]
        waiters = [waiter for meeting in meetings for waiter in meeting.waiters if waiter is not None]
        certain = root.engine.only_wait(root, running, waiters) if waiters else set()
        self._not_before = root._clock() + max(PAUSE_SECONDS, _PAUSE_PER_LOOK * (time.perf_counter() - began))
        if certain or not running:
            root.bridge.tell_waits(certain)
        if len(certain) < len(running):
            self._look_again(self._not_before)

    def _look_again(self, at: float) -> None:
        if any(member.end is None for member in self._root.members):  # else the end of the run tells all there is
            self._again = at
            self._root._set_alarm(at)


def _waits(root: SyncGroup) -> dict[int, list[Awaiting]]:
    """Return what each replica that waits for others waits in; nothing while a verdict is on its way."""
    if any(group.trouble is not None for group in root.groups()):
        return {}
    return waits_in(root.groups())


def waits_in(groups: Sequence[SyncGroup]) -> dict[int, list[Awaiting]]:
    """Return what each replica that waits for others waits in."""
    waits: dict[int, list[Awaiting]] = {}
    for group in groups:
        for meeting in group.open.values():
            if meeting.missing and meeting.has_waiters():
                missing = frozenset(m.replica_id for m in group.members if not m.arrived_at(meeting.number))
                for member in group.members:
                    if meeting.waiters[member.position] is not None:
                        waits.setdefault(member.replica_id, []).append(Awaiting(group, meeting, missing))
    return waits


def stuck(waits: Waits, among: Collection[int]) -> set[int]:
    """Return the replicas, of these, that can go on only when one of them does."""
    left = set(among)
    while True:
        free = {i for i in left if any(each.missing.isdisjoint(left) for each in waits[i])}
        if not free:
            return left
        left -= free


def _cycle(waits: Waits, among: set[int]) -> list[tuple[int, Awaiting]]:
    """Return a cycle of stuck replicas, each with what it waits in for the next, from the lowest on."""
    path: list[int] = [min(among)]
    awaiting: dict[int, Awaiting] = {}
    while True:
        here = path[-1]
        awaiting[here] = waits[here][0]
        following = min(awaiting[here].missing & among)
        if following in path:
            cycle = path[path.index(following) :]
            first = cycle.index(min(cycle))
            return [(i, awaiting[i]) for i in cycle[first:] + cycle[:first]]
        path.append(following)


def error_of(root: SyncGroup, waits: Waits, certain: set[int]) -> CollectiveMismatchError:
    """Return the error for replicas of a run that wait for each other."""
    cycle = _cycle(waits, certain)
    first = cycle[0][1]
    number = min(first.meeting.number, number_of_join(first.group))
    on_it = dict(cycle)
    replicas = tuple(
        historian.report_on(*_seen(root, waits, member.replica_id, on_it.get(member.replica_id)))
        for member in root.members
    )
    suspects = tuple(sorted(on_it))
    return CollectiveMismatchError(CollectiveReport(Reason.CYCLE, number, replicas, suspects, _text(cycle)))


def _seen(
    root: SyncGroup, waits: Waits, replica_id: int, on_cycle: Awaiting | None
) -> tuple[SyncGroup, Any, Rendezvous | None]:
    """Return the group and the meeting that tell what a replica does, and the replica as a member of that group."""
    awaiting = on_cycle or next(iter(waits.get(replica_id, ())), None)
    if awaiting is None:
        return root, root.members[replica_id - root.offset], None
    member = next(m for m in awaiting.group.members if m.replica_id == replica_id)
    return awaiting.group, member, awaiting.meeting


def _text(cycle: Sequence[tuple[int, Awaiting]]) -> str:
    everyone = [replica_id for replica_id, _ in cycle]
    steps = [f"{_step(replica_id, awaiting)} for replica {following}" for (replica_id, awaiting), following in
             zip(cycle, [*everyone[1:], everyone[0]], strict=True)]  # fmt: skip
    if len(steps) > _MOST_SHOWN:
        steps = [*steps[: _MOST_SHOWN - 1], f"… and {len(steps) - _MOST_SHOWN} more", steps[-1]]
    lines = [f"  {step}{',' if index + 1 < len(steps) else ''}" for index, step in enumerate(steps)]
    return "\n".join(
        [
            f"{ids(everyone)} wait for each other, each in another group's collective",
            *lines,
            "Issue the collectives of groups in the same order on every replica, or let a task of its own issue each",
            "group's.",
        ]
    )


def _step(replica_id: int, awaiting: Awaiting) -> str:
    call = awaiting.meeting.call_of(replica_id)
    group = awaiting.group.label
    number = f"#{awaiting.meeting.number} " if awaiting.meeting.number < JOIN else ""
    where = f"{number}of {group if group is not None else 'the run'}"
    return f"replica {replica_id} waits in {call_text(call[0])} {where} ({place(location(*call[1:]))})"
