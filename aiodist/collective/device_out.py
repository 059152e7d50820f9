"""The buffers on GPUs that replicas bring for a result with ``out=``.

A result is written straight into them, unless that could change what another result is made of; then it is made apart,
and copied. Whether it could is not known before all have come: each replica's own memory is checked at its call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiodist._arrays.device import DeviceArray
from aiodist._collectives.out import entangled, nowhere, same_place, span
from aiodist.collective.brought import OutBuffers
from aiodist.collective.device_course import Known
from aiodist.gpu.plan import Place
from aiodist.gpu.scheme import symbol


class Outs:
    """The buffers of one meeting.

    Args:
        brought: by position, what replicas brought.
        positions: of the replicas that take part.
        places: of the leaves on devices.
        columns: what the replicas brought to be reduced, by leaf.

    Attributes:
        buffers: those on devices, in the order of their numbers.
        straight: results may be written into them while inputs are read.
    """

    def __init__(
        self,
        brought: Mapping[int, OutBuffers],
        positions: Sequence[int],
        places: Sequence[int],
        columns: Sequence[Sequence[Any]],
    ) -> None:
        self._brought = {position: brought[position].leaves for position in positions if position in brought}
        self._numbers: dict[tuple[int, int], int] = {}
        self.buffers: list[DeviceArray] = []
        for position, leaves in self._brought.items():
            for place in places:
                self._numbers[position, place] = len(self.buffers)
                self.buffers.append(leaves[place])
        inputs = [span(array, place) for place in places for array in columns[place]]
        outs = [span(self.buffers[number], place) for (_, place), number in self._numbers.items()]
        one_device = len({array.ordinal for place in places for array in columns[place]}) == 1
        self.straight = not entangled(inputs, outs, same_place if one_device else nowhere)

    def known(self, position: int, place: int, first: int) -> Known | None:
        """Return what is known of a replica's buffer for a leaf; the number of the first buffer is ``first``."""
        number = self._numbers.get((position, place))
        if number is None:
            return None
        buffer = self.buffers[number]
        return Known(Place(buffer.ordinal, symbol(first + number)), buffer.shape, buffer.dtype, buffer.strides)

    def leaf(self, position: int, place: int) -> Any:
        """Return a replica's buffer for a leaf; None where it brought none."""
        leaves = self._brought.get(position)
        return None if leaves is None else leaves[place]

    def layout(self) -> Any:
        """Return what a plan depends on."""
        return self.straight, tuple(self._numbers), tuple([buffer.strides for buffer in self.buffers])

    def begins(self) -> list[int]:
        """Return where the buffers begin."""
        return [buffer.address for buffer in self.buffers]

    def streams(self) -> set[tuple[int, int]]:
        """Return the streams of the frameworks that they belong to, with their devices."""
        return {(buffer.ordinal, buffer.stream) for buffer in self.buffers}
