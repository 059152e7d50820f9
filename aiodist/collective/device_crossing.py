"""Device arrays on their way to other workers, and back: through page-locked memory of the host.

    arrays ── folded on one device ── one copy ──▶ host ── other workers ──▶ host ── a copy a device ──▶ results

Reductions bring down one part for all local replicas, folded in the accumulator's dtype, so that nothing is rounded
before the end; ordered ones, which are a tree over all replicas, and everything else bring down what is needed of each
replica. Streams are ordered by events as for any work on devices. What comes of it on the host is as if the replicas
had brought host arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiodist._arrays.device import DeviceArray, DeviceType, DType, Spec
from aiodist._arrays.host import HostType
from aiodist._collectives.work import Work
from aiodist._core.report import Reason
from aiodist.collective.brought import Brought, OutBuffers
from aiodist.collective.device_course import Known
from aiodist.collective.device_work import DeviceWork
from aiodist.collective.signature import DETAIL, KIND, OP, STRUCTURE, TYPES
from aiodist.gpu import process
from aiodist.gpu.moves import Move
from aiodist.gpu.pinned import array_of
from aiodist.gpu.plan import HOST, Job, Place
from aiodist.gpu.scheme import symbol
from aiodist.workers.crossing import Partial, Span
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import Rule, part_of, rule_for

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.rendezvous import Rendezvous


_BYTE: Final = np.dtype(np.uint8)
_APART: Final = 64
"""Each array in a piece of memory begins at a multiple of so many bytes: of a vector, and of a cache's line."""


@cache
def _fold(op: ReduceOp, dtype: DType, accumulate: Accumulate) -> Rule:
    """Return the rule for a part of a reduction: its fold, and nothing of what comes last."""
    return part_of(rule_for(op, dtype, accumulate))


def _on_host(specs: Sequence[Spec]) -> tuple[DeviceArray, list[DeviceArray]]:
    """Make arrays in the host's memory that devices copy to and from; return the whole, as bytes, and each of them.

    To lock pages takes a driver some tens of microseconds, so all that is brought together is in one piece.
    """
    begins = [0, *accumulate(-(-math.prod(shape) * dtype.itemsize // _APART) * _APART for shape, dtype in specs)]
    driver, size = process.executor().driver, max(1, begins.pop())
    with process.enqueuing, driver.using():
        memory = driver.host_memory(size)
    whole = array_of(memory, (size,), _BYTE)
    arrays = []
    for (shape, dtype), begin in zip(specs, begins, strict=True):
        part = whole[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        arrays.append(DeviceArray(memory.address + begin, tuple(shape), dtype, HOST, 0, part))
    return DeviceArray(memory.address, (size,), _BYTE, HOST, 0, whole), arrays


class Landing(DeviceWork):
    """What the local replicas brought, on its way to the host.

    Args:
        brought: what they ask for, and bring.
        taken: the places among those values of what is needed; None: one fold of all.
    """

    def __init__(self, brought: Brought, taken: Sequence[int] | None) -> None:
        self._folds = taken is None
        self._taken: Sequence[int] = [0] if taken is None else taken
        self._landed: dict[tuple[int, int], DeviceArray] = {}
        super().__init__(brought)

    def layout(self) -> Any:
        """Return what the plan depends on: the shapes, where they may differ, and what is brought down."""
        return self._folds, tuple(self._taken), tuple([array.shape for array in self.arrays])

    def staging(self) -> list[DeviceArray]:
        """Return the piece of the host's memory that all comes to."""
        wanted = [(place, taken) for place in self._places for taken in self._taken]
        arrays = [self.columns[place][taken] for place, taken in wanted]
        dtypes = [self._rule(array.dtype).accumulator if self._folds else array.dtype for array in arrays]
        whole, landed = _on_host([(tuple(array.shape), dtype) for array, dtype in zip(arrays, dtypes, strict=True)])
        self._landed = dict(zip(wanted, landed, strict=True))
        homes = {array.ordinal for array in arrays}
        self._home = homes.pop() if self._folds and len(homes) == 1 else None
        self._whole = Known(Place(HOST, symbol(len(self.arrays))), whole.shape, whole.dtype)
        self._begin = whole.address
        return [whole]

    def _rule(self, dtype: DType) -> Rule:
        return _fold(self.signature[OP], dtype, self.options.accumulate)

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Copy what is taken of a leaf to the host, folded first where it is."""
        if not self._folds:
            self.move(
                [Move(self._part(self._whole, place, taken).view(), arrays[taken].view()) for taken in self._taken]
            )
            return
        if self._home is None:
            (folded,) = self.fresh(mark, arrays[0].shape, self._rule(arrays[0].dtype).accumulator, [arrays[0].ordinal])
            self.move([Move(self._part(self._whole, place, 0).view(), folded.view())])
        else:  # all that is folded lies on one device as it will lie on the host
            if place == self._places[0]:
                (self._packed,) = self.fresh(mark, self._whole.shape, _BYTE, [self._home])
                self.move([Move(self._whole.view(), self._packed.view())])
            folded = self._part(self._packed, place, 0)
        rule, inputs = self._rule(arrays[0].dtype), tuple([array.place for array in arrays])
        sizes = rule.dtype.itemsize, rule.accumulator.itemsize
        self.reduce(rule, Job(inputs, (folded.place,), math.prod(arrays[0].shape), *sizes))

    def _part(self, whole: Known, place: int, taken: int) -> Known:
        """Return an array's place in the piece of memory that it lands in, or in one that is like it."""
        landed = self._landed[place, taken]
        begin = Place(whole.place.device, whole.place.address + landed.address - self._begin)
        return Known(begin, landed.shape, landed.dtype)

    def landed(self) -> Any:
        """Return what each replica brought, in memory of the host; in the place of what is not needed stands None.

        What came from devices is there when the work is done.
        """
        rows: list[list[Any]] = [list(row) for row in zip(*self.columns, strict=True)]
        for place in self._places:
            column = self.columns[place]
            for row in rows:
                row[place] = None
            for taken in self._taken:
                landed = self._landed[place, taken].owner
                rows[taken][place] = Partial(landed, column[taken].dtype) if self._folds else landed
        return [row[0] for row in rows] if self.single else rows

    def _collect(self) -> Any:
        return self.landed()


class Launching(DeviceWork):
    """Results on the host, on their way to the local replicas' devices.

    Args:
        brought: what they ask for, and bring, by which each result's device is known.
        result: as kinds of collectives give it: for all, or for each.
        outs: by position, the buffers that they want the result in.
    """

    def __init__(self, brought: Brought, result: Any, outs: Mapping[int, OutBuffers] | None = None) -> None:
        self._shared = brought.signature[KIND].shared
        single, came = brought.signature[STRUCTURE] is None, brought.values
        rows = list(result) if not self._shared else [result] * len(came)
        columns = [tuple(came)] if single else list(zip(*came, strict=True))
        self._ordinals = [tuple([getattr(leaf, "ordinal", HOST) for leaf in column]) for column in columns]
        super().__init__(brought._replace(values=rows), outs)

    def ordinals(self, place: int) -> Sequence[int]:
        """Return the GPUs that a leaf came from."""
        return self._ordinals[place]

    def layout(self) -> Any:
        """Return what the plan depends on: results may be of any size."""
        return tuple(self._ordinals), tuple([(array.shape, array.dtype) for array in self.arrays])

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Copy a leaf's results up: those that are the same once a device, and from there."""
        firsts: dict[int, Known] = {}
        for made, source in zip(self.results(place, mark, arrays[0].shape, arrays[0].dtype), arrays, strict=True):
            first = firsts.setdefault(made.ordinal, made) if self._shared else made
            self.move([Move(made.view(), source.view() if first is made else first.view())])

    def on_host(self, place: int) -> list[Any]:
        """Return each replica's result of a leaf on the host."""
        column, mark = self.columns[place], self.marks[place]
        if not isinstance(mark, HostType):
            return list(column)
        return mark.give_each(column[0], len(column)) if self._shared else [mark.give(leaf) for leaf in column]


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
        there = [member for member in group.members if member.position not in (meeting.absent or ())]
        positions, names = [member.position for member in there], [member.device for member in there]
        values = [meeting.values[position] for position in positions]
        self._brought = Brought(meeting.signature, values, meeting.options, positions, names)
        types = meeting.signature[TYPES]
        self._marks: Sequence[Any] = [types] if meeting.signature[STRUCTURE] is None else types

    def landing(self, accumulate: Accumulate) -> Work:
        """Return the work that gives the values as on the host, folded with that accumulator where they can be."""
        folds = self._meeting.signature[OP] is not None and len(self._brought.values) > 1 and not self._span.ordered
        return self._landing(accumulate, None if folds else self._needed())

    def landing_one_by_one(self) -> Work:
        """Return the work that gives the values as on the host, of each replica its own."""
        return self._landing("native", self._needed())

    def _landing(self, accumulate: Accumulate, taken: Sequence[int] | None) -> Work:
        options = dataclasses.replace(self._meeting.options, accumulate=accumulate)
        return Landing(self._brought._replace(options=options), taken).work()

    def _needed(self) -> Sequence[int]:
        """Return the places of the replicas whose values are needed elsewhere."""
        signature, layout, positions = self._meeting.signature, self._span.layout, self._brought.positions
        if signature[KIND].detail is not Reason.SOURCE:
            return range(len(positions))
        worker, position = layout.worker_of(signature[DETAIL])
        needed = worker == layout.rank and position in positions
        return [positions.index(position)] if needed else []

    def staged(self, result: Any) -> Any:
        """Return a result with its device leaves in memory that devices copy from; in any thread."""
        if not self._meeting.signature[KIND].shared:
            return [self._staged(row) for row in result]
        return self._staged(result)

    def _staged(self, row: Any) -> Any:
        single = self._meeting.signature[STRUCTURE] is None
        leaves = [row] if single else list(row)
        there = [place for place, mark in enumerate(self._marks) if isinstance(mark, DeviceType)]
        for place, array in zip(there, staged([leaves[place] for place in there]), strict=True):
            leaves[place] = array
        return leaves[0] if single else leaves

    def launching(self, staged: Any) -> Work:
        """Return the work that gives each replica's result, by position."""
        return Launching(self._brought, staged, self._meeting.outs).work()


def staged(leaves: Sequence[np.ndarray[Any, Any]]) -> list[DeviceArray]:
    """Return copies of arrays in memory that devices copy from; in any thread."""
    _, made = _on_host([(leaf.shape, leaf.dtype) for leaf in leaves])
    for array, leaf in zip(made, leaves, strict=True):
        array.owner[...] = leaf
    return made
