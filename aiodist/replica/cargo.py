"""Cargo: what is carried over for a meeting, whatever becomes of the meeting itself.

Values on devices are brought down to the host before a plan is made of them, and results up again behind it. The loop
looks for what a device does for a tenth of a millisecond; then a worker thread sleeps until it is done.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import has_device_arrays
from aiodist._collectives import device
from aiodist._collectives.work import Work
from aiodist._core.report import Reason
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import DETAIL, KIND, OP, STRUCTURE, TYPES
from aiodist.replica.device_steps import made
from aiodist.workers.crossing import NOTHING, Partial, Plan, Span
from aiodist.workers.transfers import Hands, Steps, by_hand
from aiodist_kernels import Accumulate, policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodist.collective.group import SyncGroup


class Cargo:
    """What is carried over for a meeting.

    Args:
        meeting: at which all local replicas mean the same.
        group: the local replicas.
        span: what kinds need to know of the workers.

    Attributes:
        signature: what is asked for.
        accumulate: the accumulator that the first local replica wants.
        absent: the positions of local replicas that have joined.
        ferry: takes what lies on devices down and up again; None where nothing does any more.
    """

    def __init__(self, meeting: Rendezvous, group: SyncGroup, span: Span) -> None:
        kind, types = meeting.signature[KIND], meeting.signature[TYPES]
        self.signature = meeting.signature
        self.accumulate: Accumulate = meeting.options.accumulate
        self.absent = meeting.absent
        self._values = self._landed = meeting.values
        self._span = span
        ferried = kind.computes is not None and types is not None and has_device_arrays(types)
        self.ferry = Ferry(meeting, group, span) if ferried else None

    def landed(self, accumulate: Accumulate, hands: Hands) -> Steps[Plan]:
        """Return what goes through the host where nobody is absent; what lies on devices has been brought down."""
        across = self.signature[KIND].across
        if across is None or self.absent is not None:
            return NOTHING
        if self.ferry is not None:
            self._landed = yield from made(self.ferry.landing(accumulate), hands)
        plan: Plan = across(self.signature, self._landed, accumulate, self._span)
        return plan

    def one_by_one(self, hands: Hands) -> Steps[dict[int, Any]]:
        """Return, by position, what each local replica brings that is there, as far as it counts."""
        kind, absent = self.signature[KIND], self.absent or ()
        there = [position for position in range(len(self._values)) if position not in absent]
        if not kind.shared or kind.across is None:
            return dict.fromkeys(there)
        if self.ferry is None:
            return {position: self._values[position] for position in there}
        landed = yield from made(self.ferry.landing_one_by_one(), hands)
        return dict(zip(there, landed, strict=True))

    def launch(self, result: Any, hands: Hands) -> Steps[Any]:
        """Bring what belongs on devices up to them; return each replica's result, by position, where there is such."""
        if self.ferry is None:
            return result
        return (yield from _launched(self.ferry, self._values, result, hands))

    def hand_over(self, meeting: Rendezvous, result: Any) -> None:
        """Let the meeting have its result."""
        if self.ferry is None:
            meeting.take_from_afar(result)
        else:
            meeting.by_replica = True
            meeting.take(result)


class Ferry:
    """The way of one meeting's values down to the host, and of its results up again.

    Args:
        meeting: with device arrays among the values of the local replicas, which all have arrived or joined.
        group: the local replicas.
        span: the workers.
    """

    def __init__(self, meeting: Rendezvous, group: SyncGroup, span: Span) -> None:
        self._meeting = meeting
        self._span = span
        self._devices = group.devices
        self._positions = [i for i in range(group.size) if i not in (meeting.absent or ())]
        self._single = meeting.signature[STRUCTURE] is None
        self._marks: Sequence[Any] = [meeting.signature[TYPES]] if self._single else meeting.signature[TYPES]
        self._there = [place for place, mark in enumerate(self._marks) if isinstance(mark, DeviceType)]
        values = [meeting.values[position] for position in self._positions]
        self._columns = [tuple(values)] if self._single else list(zip(*values, strict=True))

    def landing(self, accumulate: Accumulate) -> Work:
        """Return the work that gives the values as on the host, folded with that accumulator where they can be."""
        folds = self._meeting.signature[OP] is not None and len(self._positions) > 1 and not self._span.ordered
        return self._landing(accumulate, None if folds else self._needed())

    def landing_one_by_one(self) -> Work:
        """Return the work that gives the values as on the host, of each replica its own."""
        return self._landing("native", self._needed())

    def _landing(self, accumulate: Accumulate, taken: Sequence[int] | None) -> Work:
        marks, columns = [self._marks[p] for p in self._there], [self._columns[p] for p in self._there]
        run = device.to_host(marks, columns, taken, self._devices, self._meeting.signature[OP], accumulate)
        return run.work(partial(self._landed, taken))

    def _landed(self, taken: Sequence[int] | None, by_leaf: list[list[Any]]) -> list[Any]:
        """Return what each replica brought, in memory of the host; in the place of what is not needed stands None."""
        rows: list[list[Any]] = [list(row) for row in zip(*self._columns, strict=True)]
        for place, found in zip(self._there, by_leaf, strict=True):
            column = self._columns[place]
            for row in rows:
                row[place] = None
            if taken is None:
                rows[0][place] = Partial(found[0], column[0].dtype)
            for source, landed in zip(taken or (), found, strict=False):
                rows[source][place] = landed
        return [row[0] for row in rows] if self._single else rows

    def _needed(self) -> Sequence[int]:
        """Return the places of the replicas whose values are needed elsewhere."""
        signature, layout = self._meeting.signature, self._span.layout
        if signature[KIND].detail is not Reason.SOURCE:
            return range(len(self._positions))
        worker, position = layout.worker_of(signature[DETAIL])
        needed = worker == layout.rank and position in self._positions
        return [self._positions.index(position)] if needed else []

    def staged(self, result: Any) -> list[list[Any]]:
        """Return results by leaf, one for all or one for each, with those for devices where these copy from."""
        rows = [result] if self._meeting.signature[KIND].shared else result
        columns = [list(rows)] if self._single else [list(column) for column in zip(*rows, strict=True)]
        copies = iter(device.staged([leaf for place in self._there for leaf in columns[place]]))
        for place in self._there:
            columns[place] = [next(copies) for _ in columns[place]]
        return columns

    def launching(self, staged: list[list[Any]]) -> Work:
        """Return the work that gives each replica's result, by position."""
        marks, columns = [self._marks[p] for p in self._there], [staged[p] for p in self._there]
        takers = [[array.ordinal for array in self._columns[p]] for p in self._there]
        buffers = [(self._meeting.outs or {}).get(position) for position in self._positions]
        outs = [[None if found is None else found.leaves[p] for found in buffers] for p in self._there]
        run = device.from_host(marks, columns, takers, self._devices, outs if self._meeting.outs else None)
        return run.work(partial(self._launched, staged, buffers))

    def _launched(self, staged: list[list[Any]], buffers: Sequence[Any], by_leaf: list[list[Any]]) -> dict[int, Any]:
        found: dict[int, Sequence[Any]] = dict(zip(self._there, by_leaf, strict=True))
        for place, mark in enumerate(self._marks):
            if place not in found:
                found[place] = self._on_host(mark, staged[place], buffers, place)
        rows = [[found[place][taker] for place in range(len(found))] for taker in range(len(self._positions))]
        return {p: row[0] if self._single else row for p, row in zip(self._positions, rows, strict=True)}

    def _on_host(self, mark: Any, column: Sequence[Any], buffers: Sequence[Any], place: int) -> Sequence[Any]:
        """Return each replica's result of a leaf on the host."""
        count = len(self._positions)
        if self._meeting.signature[KIND].shared:
            column = mark.give_each(column[0], count) if isinstance(mark, HostType) else [column[0]] * count
        elif isinstance(mark, HostType):
            column = [mark.give(leaf) for leaf in column]
        for leaf, found in zip(column, buffers, strict=True):
            if found is not None:
                np.copyto(found.leaves[place], leaf)
        return column


def _launched(ferry: Ferry, values: Sequence[Any], result: Any, hands: Hands) -> Steps[Any]:
    if policy.blocks(sum(map(nbytes_of, values))):
        staged = yield from by_hand(hands, ferry.staged, result)
    else:
        staged = ferry.staged(result)
    return (yield from made(ferry.launching(staged), hands))


def nbytes_of(value: Any) -> int:
    """Return the size of what a replica brings: a leaf, or a list of leaves."""
    if isinstance(value, list):
        return sum(map(nbytes_of, value))
    return int(getattr(value, "nbytes", 0))
