"""The collectives that move device arrays: every result is put together on its own device, out of parts of the others'.

What all replicas of a device get is moved there once, for the first of them, and copied from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from aiodist._arrays.device import DeviceType
from aiodist.collective.device_course import Known
from aiodist.collective.device_reduction import AllReduce
from aiodist.collective.device_work import DeviceWork
from aiodist.collective.signature import DETAIL
from aiodist.gpu.moves import Move, View


class _Exchange(DeviceWork):
    def share(
        self, place: int, mark: DeviceType, arrays: Sequence[Known], shape: tuple[int, ...]
    ) -> tuple[list[View], list[Move]]:
        """Plan a result for every replica, all with the same values; return the first on each device, and the rest.

        The rest are copies of the first, to be made behind it.
        """
        firsts: dict[int, View] = {}
        copies = []
        for made in self.results(place, mark, shape, arrays[0].dtype):
            view = made.view()
            first = firsts.setdefault(made.ordinal, view)
            if first is not view:
                copies.append(Move(view, first))
        return list(firsts.values()), copies


class Broadcast(_Exchange):
    """A broadcast."""

    @property
    def source(self) -> int:
        """The source's place among the replicas that take part."""
        return self.positions.index(self.signature[DETAIL])

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Copy the source's leaf to everybody."""
        source = arrays[self.source]
        firsts, copies = self.share(place, mark, arrays, source.shape)
        self.move([Move(first, source.view()) for first in firsts] + copies)


class AllGather(_Exchange):
    """An all_gather."""

    def layout(self) -> Any:
        """Return the shapes, which differ along the axis."""
        return tuple([array.shape for array in self.arrays])

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Put the leaves together along their axis."""
        axis = self.detail(place)
        ends = np.cumsum([array.shape[axis] for array in arrays]).tolist()
        shape = (*arrays[0].shape[:axis], ends[-1], *arrays[0].shape[axis + 1 :])
        firsts, copies = self.share(place, mark, arrays, shape)
        parts = list(zip(arrays, [0, *ends[:-1]], ends, strict=True))
        self.move([Move(first.part(axis, low, high), array.view()) for first in firsts for array, low, high in parts])
        self.move(copies)


class AllToAll(_Exchange):
    """An all_to_all."""

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Put together what each replica gets of every leaf."""
        split_axis, concat_axis = self.detail(place)
        count, shape = len(arrays), list(arrays[0].shape)
        shape[split_axis] //= count
        length, step = shape[concat_axis], shape[split_axis]
        shape[concat_axis] *= count
        for i, target in enumerate(self.results(place, mark, tuple(shape), arrays[0].dtype)):
            self.move(
                [
                    Move(
                        target.view().part(concat_axis, j * length, (j + 1) * length),
                        array.view().part(split_axis, i * step, (i + 1) * step),
                    )
                    for j, array in enumerate(arrays)
                ]
            )


class ReduceScatter(AllReduce):
    """A reduce_scatter: it reduces into memory of its own on each device, and moves each replica's part from there."""

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Reduce a leaf into one array a device, and take the replicas' parts from there."""
        axis, shape, dtype = self.detail(place), arrays[0].shape, self.result_dtype(arrays)
        ordinals = [array.ordinal for array in arrays]
        homes = list(dict.fromkeys(ordinals))
        total_of = dict(zip(homes, self.fresh(mark, shape, dtype, homes), strict=True))
        self.reduce_into(arrays, [total_of[ordinal] for ordinal in ordinals])
        step = shape[axis] // len(arrays)
        parts = self.results(place, mark, (*shape[:axis], step, *shape[axis + 1 :]), dtype)
        for i, part in enumerate(parts):
            self.move([Move(part.view(), total_of[part.ordinal].view().part(axis, i * step, (i + 1) * step))])


WORK: Final[Mapping[str, type[DeviceWork]]] = {
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "broadcast": Broadcast,
    "reduce_scatter": ReduceScatter,
    "all_to_all": AllToAll,
}
"""What a collective with arrays on devices is, by its kind's name."""
