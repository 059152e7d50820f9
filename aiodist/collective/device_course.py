"""Courses: what a collective of device arrays comes to, as far as shapes, dtypes and devices tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aiodist._arrays.device import DeviceType, DType, Spec
from aiodist.gpu.moves import View, whole
from aiodist.gpu.plan import Place
from aiodist.gpu.scheme import Scheme


class Known(NamedTuple):
    """What is known of an array before it is there: its number, as a place, and what it is like.

    Attributes:
        place: where it begins, by its number.
        shape: its shape.
        dtype: its dtype.
        strides: in bytes; None for an array without gaps, in C's order.
    """

    place: Place
    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...] | None = None

    @property
    def ordinal(self) -> int:
        """Its GPU."""
        return self.place.device

    def view(self) -> View:
        """Return it as moves see it."""
        if self.strides is not None:
            return View(self.place, self.shape, self.strides, self.dtype.itemsize)
        return whole(self.place, self.shape, self.dtype.itemsize)


class Make(NamedTuple):
    """An array of a framework's to be made."""

    mark: DeviceType
    shape: tuple[int, ...]
    dtype: DType
    ordinal: int


class Makes(NamedTuple):
    """Arrays to be made of one framework, on one GPU.

    Attributes:
        mark: the framework.
        ordinal: the GPU's.
        specs: shape and dtype of each.
        places: of each, among all that are made.
    """

    mark: DeviceType
    ordinal: int
    specs: Sequence[Spec]
    places: Sequence[int]


def alike(makes: Sequence[Make]) -> list[Makes]:
    """Return arrays to be made, those of one framework on one GPU together."""
    found: dict[tuple[DeviceType, int], tuple[list[Spec], list[int]]] = {}
    for place, make in enumerate(makes):
        specs, places = found.setdefault((make.mark, make.ordinal), ([], []))
        specs.append((make.shape, make.dtype))
        places.append(place)
    return [Makes(*key, *group) for key, group in found.items()]


class Course(NamedTuple):
    """What a collective comes to.

    Attributes:
        makes: arrays to be made, whose numbers follow those of the replicas' own and of their buffers.
        total: how many they are.
        results: for each leaf on devices, by its place, which of those are its results, in replica order; None for a
            replica that brought a buffer.
        scheme: what is enqueued.
    """

    makes: Sequence[Makes]
    total: int
    results: Mapping[int, Sequence[int | None]]
    scheme: Scheme
