"""Standstills: replicas of several workers that wait for each other, or for one that has ended, in several groups.

Each worker knows of its own replicas only who does nothing but wait (`collective.cycles`), and tells that with what
they have arrived at, once none of them has got on for a tenth of a second. A worker that has no groups tells it when
it is asked.

What workers tell at different times may be laid together: of two that wait, each for the other, none can have gone on
before the other did, so if each tells of itself that it has not, both still wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aiodist.collective.cycles import stuck, waits_in
from aiodist.collective.group import SyncGroup
from aiodist.vocabulary.options import OrderCheck
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
    """

    run: Run
    state: WorkerState
    certain: tuple[int, ...]


class TellWaits(NamedTuple):
    """A worker is to tell `Waits`, as soon as its replicas do nothing but wait."""

    run: Run


@dataclass(slots=True)
class _Seen:
    told: dict[int, Waits] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)


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

    def forget(self, run: Run) -> None:
        """Look no more at a run, which is over."""
        self._runs.pop(run, None)

    def hear(self, rank: int, waits: Waits) -> tuple[set[int], list[int]]:
        """Take what a worker tells; return replicas that can never go on, and whom to ask for more."""
        seen = self._runs.setdefault(waits.run, _Seen())
        self._runs.move_to_end(waits.run)
        if len(self._runs) > _MOST_RUNS:
            self._runs.popitem(last=False)
        seen.told[rank] = waits
        states = {told: seen.told[told].state for told in seen.told}
        root = whole_group(states, self._layout.devices, self._layout.names, self._order_check)
        certain = {replica_id for told in seen.told.values() for replica_id in told.certain}
        groups = [root, *whole_parts(states, root)]
        found = standing_of(groups, certain)
        unknown = [worker for worker in range(self._layout.workers) if worker not in seen.told]
        elsewhere = {replica_id for worker in unknown for replica_id in self._layout.places[worker]}
        if found or not standing_of(groups, certain, elsewhere):
            return found, []
        to_ask = [worker for worker in unknown if worker not in seen.asked]
        seen.asked.update(to_ask)
        return set(), to_ask


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
