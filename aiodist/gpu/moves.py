"""How parts of arrays become parts of others: copies of rows on one device, plain copies from one device to another.

    part ── rows, on its device ──▶ packed ── one copy ──▶ landed ── rows, on the other device ──▶ part

What has no gaps skips the steps that would close or open them. A plan is data, as in `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple, TypeAlias

from aiodist.gpu.plan import HOST, Allocate, Copy, Meet, Place

LARGEST_PITCH: Final = (1 << 31) - 1
"""Bytes from one row to the next that a copy of rows may have; beyond, rows are few and copied one by one."""


class View(NamedTuple):
    """An array, or a part of one, on a device.

    Attributes:
        place: of its first element.
        shape: its shape.
        strides: for each axis, the bytes from an element to the next.
        itemsize: bytes of an element.
    """

    place: Place
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def part(self, axis: int, low: int, high: int) -> View:
        """Return the part from ``low`` to ``high`` along an axis."""
        place = Place(self.place.device, self.place.address + low * self.strides[axis])
        return self._replace(place=place, shape=(*self.shape[:axis], high - low, *self.shape[axis + 1 :]))

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return math.prod(self.shape) * self.itemsize


class Rows(NamedTuple):
    """Rows on one device, copied to where they stand further apart, or closer."""

    device: int
    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    number: int


Step: TypeAlias = Copy | Rows | Meet


class Move(NamedTuple):
    """A copy between parts of arrays of one shape and dtype."""

    target: View
    source: View


def whole(place: Place, shape: tuple[int, ...], itemsize: int) -> View:
    """Return an array without gaps, in C's order."""
    strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return View(place, shape, strides, itemsize)


def devices(moves: Sequence[Move]) -> set[int]:
    """Return the devices that moves touch."""
    return {view.place.device for move in moves for view in move} - {HOST}


def make(moves: Sequence[Move], allocate: Allocate) -> list[Step]:
    """Return the steps that carry out moves, in their order, so that one on a device may copy what one before made.

    What moves to another device must be there before the first step. What moves to the host, or from it, has no gaps
    there.

    Args:
        moves: the moves.
        allocate: returns the address of scratch memory on a device, for so many bytes.
    """
    packs: list[Step] = []
    steps: list[Step] = []

    def scratch(device: int, like: View) -> View:
        return whole(Place(device, allocate(device, like.nbytes)), like.shape, like.itemsize)

    for target, source in moves:
        here, there, ready = target.place.device, source.place.device, source
        if not source.nbytes:
            continue
        if here != there and not _has_no_gaps(source):
            ready = scratch(there, source)
            packs += _on_device(ready, source)
        if here != there and not _has_no_gaps(target):
            landed = scratch(here, target)
            steps.append(Copy(here, landed.place, ready.place, landed.nbytes))
            ready = landed
        steps += _on_device(target, ready)
    return [*packs, Meet(tuple(sorted(devices(moves)))), *steps] if packs else steps


def _on_device(target: View, source: View) -> Iterator[Step]:
    """Return a move's copies, between two views of one device, or two without gaps."""
    device, extents = target.place.device, _merged(target, source)
    if device == HOST:
        device = source.place.device
    width = source.itemsize
    if extents and extents[-1][1:] == (width, width):
        width *= extents.pop()[0]
    if not extents:
        yield Copy(device, target.place, source.place, width)
        return
    rows = max(extents, key=lambda extent: extent[0] if max(extent[1:]) <= LARGEST_PITCH else 0)
    together = max(rows[1:]) <= LARGEST_PITCH
    if together:
        extents.remove(rows)
    for index in product(*(range(extent) for extent, _, _ in extents)):
        to = target.place.address + sum(i * step for i, (_, step, _) in zip(index, extents, strict=True))
        by = source.place.address + sum(i * step for i, (_, _, step) in zip(index, extents, strict=True))
        if together:
            yield Rows(device, to, rows[1], by, rows[2], width, rows[0])
        else:
            yield Copy(device, Place(device, to), Place(source.place.device, by), width)


def _merged(target: View, source: View) -> list[tuple[int, int, int]]:
    """Return extent and strides of as few axes as tell where all elements lie in both."""
    found: list[tuple[int, int, int]] = []
    for extent, to, by in zip(target.shape, target.strides, source.strides, strict=True):
        if extent == 1:
            continue
        if found and found[-1][1:] == (extent * to, extent * by):
            found[-1] = (found[-1][0] * extent, to, by)
        else:
            found.append((extent, to, by))
    return found


def _has_no_gaps(view: View) -> bool:
    return _merged(view, view) in ([], [(view.nbytes // view.itemsize, view.itemsize, view.itemsize)])
