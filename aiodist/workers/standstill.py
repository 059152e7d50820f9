"""Standstills: replicas of several workers that wait for each other, or for one that has ended, in several groups.

Each worker knows of its own replicas only who does nothing but wait (`collective.cycles`), and tells that with what
they have arrived at, once none of them has got on for a tenth of a second. A worker that has no groups tells it when
it is asked.

What workers tell at different times is no picture of one moment. So where it looks like a standstill, all are asked
again: if each tells the same once more, every one of them was in that state at the moment of asking.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aiodist._core.call import OrderCheck
from aiodist.collective.cycles import stuck, waits_in
from aiodist.collective.group import SyncGroup
from aiodist.workers.lane_book import Run
from aiodist.workers.layout import Layout
from aiodist.workers.parts import whole_parts
from aiodist.workers.state import WorkerState, whole_group

_MOST_RUNS = 64


class Waits(NamedTuple):
    """A worker's replicas, of which some do nothing but wait.

    Attributes:
        run: in which run.
        state: what they have done.
        certain: the ids of those that do nothing but wait.
        asked: the number of the last question that the worker has heard.
    """

    run: Run
    state: WorkerState
    certain: tuple[int, ...]
    asked: int = 0

    def says_the_same_as(self, other: Waits | None) -> bool:
        """Whether nobody has got on since that was told."""
        return other is not None and _progress(self) == _progress(other)


class TellWaits(NamedTuple):
    """A worker is to tell `Waits`, as soon as its replicas do nothing but wait."""

    run: Run
    number: int = 0


def _progress(waits: Waits) -> object:
    parts = [waits.state.replicas, *(part.replicas for part in waits.state.groups)]
    return sorted(waits.certain), [[(replica.sequence, replica.end) for replica in replicas] for replicas in parts]


@dataclass(slots=True)
class _Seen:
    told: dict[int, Waits] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    number: int = 0
    suspected: dict[int, Waits] | None = None
    confirmed: set[int] = field(default_factory=set)

    def hear(self, rank: int, waits: Waits) -> None:
        """Take what a worker tells."""
        self.told[rank] = waits
        if self.suspected is None or waits.asked < self.number:
            return
        if waits.says_the_same_as(self.suspected.get(rank)):
            self.confirmed.add(rank)
        else:
            self.suspected = None

    def is_confirmed(self) -> bool:
        """Whether all have told the same again; if nothing has been suspected yet, it is from now on."""
        if self.suspected is None:
            self.suspected, self.number, self.confirmed = dict(self.told), self.number + 1, set()
        return self.confirmed >= set(self.suspected)


class Standstills:
    """What workers have told of their waits, as the coordinator keeps it.

    Args:
        layout: the workers' replicas.
        order_check: what call sites are compared by.
    """

    def __init__(self, layout: Layout, order_check: OrderCheck) -> None:
        self._layout = layout
        self._order_check = order_check
        self._runs: OrderedDict[Run, _Seen] = OrderedDict()

    def hear(self, rank: int, waits: Waits) -> tuple[set[int], list[tuple[int, TellWaits]]]:
        """Take what a worker tells; return replicas that can never go on, and what to ask of whom."""
        seen = self._runs.setdefault(waits.run, _Seen())
        self._runs.move_to_end(waits.run)
        if len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        seen.hear(rank, waits)
        states = {told: seen.told[told].state for told in seen.told}
        root = whole_group(states, self._layout.devices, self._layout.names, self._order_check)
        certain = {replica_id for told in seen.told.values() for replica_id in told.certain}
        groups = [root, *whole_parts(states, root)]
        found = standing_of(groups, certain)
        if found:
            before = seen.number
            if seen.is_confirmed():
                return found, []
            again = TellWaits(waits.run, seen.number)
            return set(), [(worker, again) for worker in seen.told] if seen.number > before else []
        seen.suspected = None
        unknown = [worker for worker in range(self._layout.workers) if worker not in seen.told]
        elsewhere = {replica_id for worker in unknown for replica_id in self._layout.places[worker]}
        if not standing_of(groups, certain, elsewhere):
            return set(), []
        to_ask = [worker for worker in unknown if worker not in seen.asked]
        seen.asked.update(to_ask)
        return set(), [(worker, TellWaits(waits.run, seen.number)) for worker in to_ask]


def standing_of(groups: Sequence[SyncGroup], certain: Collection[int], also: Collection[int] = ()) -> set[int]:
    """Return the replicas, of those that do nothing but wait, that can never go on.

    Args:
        groups: the run's own, and the others.
        certain: those that do nothing but wait.
        also: more that are taken not to go on, as those are that have ended.
    """
    waits = waits_in(groups)
    gone = {member.replica_id for member in groups[0].members if member.end is not None} | set(also)
    waiting = {replica_id for replica_id in certain if replica_id in waits} - gone
    left = stuck({**dict.fromkeys(gone, ()), **waits}, waiting | gone)
    return left & waiting
