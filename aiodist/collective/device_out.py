"""The buffers on GPUs that replicas bring for a result with ``out=``.

A result is written straight into them, unless that could change what another result is made of; then it is made apart,
and copied. Whether it could is not known before all have come: each replica's own memory is checked at its call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from aiodist._arrays.device import DeviceArray, DeviceType
from aiodist._arrays.frameworks import device_type_of
from aiodist._arrays.host import class_name
from aiodist.collective.device_course import Known
from aiodist.collective.out_buffers import OutBuffers
from aiodist.gpu.plan import Place
from aiodist.gpu.scheme import symbol
from aiodist_kernels import ReduceOp, result_dtype

Span: TypeAlias = tuple[int, int, int]
"""Where memory begins and ends, and the place of the leaf that it belongs to."""


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
        inputs = [span(array, place) for place in places for array in columns[place] if array.nbytes]
        outs = [span(self.buffers[number], place) for (_, place), number in self._numbers.items()]
        one_device = len({array.ordinal for place in places for array in columns[place]}) == 1
        self.straight = not are_entangled(inputs, [out for out in outs if out[0] < out[1]], in_place=one_device)

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


def span(array: DeviceArray, place: int) -> Span:
    """Return the memory of an array."""
    if array.strides is None or not all(array.shape):
        return array.address, array.address + array.nbytes, place
    last = sum((size - 1) * step for size, step in zip(array.shape, array.strides, strict=True))
    return array.address, array.address + last + array.dtype.itemsize, place


def are_entangled(inputs: Iterable[Span], outs: Iterable[Span], *, in_place: bool) -> bool:
    """Return whether writing results may change what others are made of, or other results.

    Args:
        inputs: the memory that is read.
        outs: the memory that is written.
        in_place: a leaf's result may be in the very place of what it is made of.
    """
    written: dict[Span, int] = {}
    for out in outs:
        written[out] = written.get(out, 0) + 1
    read = set(inputs)
    if any(count > 1 for count in written.values()) or (not in_place and not read.isdisjoint(written)):
        return True
    any_end = written_end = 0
    for found in sorted(read.union(written)):
        start, end, _ = found
        if start < (any_end if found in written else written_end):
            return True
        any_end = max(any_end, end)
        if found in written:
            written_end = max(written_end, end)
    return False


def checked(out: Any, value: DeviceArray, mark: DeviceType, op: ReduceOp) -> DeviceArray:
    """Return a buffer for a leaf's result.

    Raises:
        TypeError: it is no array of the leaf's framework on a GPU, cannot be written into, or has another dtype.
        ValueError: it has another shape than the result, or is on another GPU than the leaf.
    """
    if device_type_of(out) is not mark:
        raise TypeError(f"out must hold {mark.name} arrays on GPUs, where the value has them, got a {class_name(out)}")
    buffer, expected = mark.buffer(out), result_dtype(op, value.dtype)
    if buffer.dtype != expected:
        raise TypeError(f"out must have the result's dtype {expected}, got {buffer.dtype}")
    if tuple(buffer.shape) != tuple(value.shape):
        raise ValueError(f"out must have the result's shape {tuple(value.shape)}, got {tuple(buffer.shape)}")
    if buffer.ordinal != value.ordinal:
        raise ValueError(f"out must be on the value's GPU, number {value.ordinal}, got one on number {buffer.ordinal}")
    return buffer


def check_overlap(leaves: Sequence[Any], buffers: Sequence[Any]) -> None:
    """Check what a replica brings for its own result, against what it brings to be reduced.

    Raises:
        ValueError: a buffer on a GPU overlaps another one, or a leaf, and is not that leaf's own memory.
    """
    there = [place for place, buffer in enumerate(buffers) if isinstance(buffer, DeviceArray) and buffer.nbytes]
    inputs = [span(leaves[place], place) for place in there]
    if are_entangled(inputs, [span(buffers[place], place) for place in there], in_place=True):
        raise ValueError(
            "out must overlap neither the value nor itself, except that a buffer may be the very array that it is the "
            "result of"
        )
