"""Device arrays: those of PyTorch, CuPy, Numba and JAX in a GPU's memory, seen as an address, a shape and a dtype.

No framework is imported here, and nothing is copied unless an array has gaps. What frameworks differ in stands in
`device_frameworks`, a class for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

DType: TypeAlias = np.dtype[Any]
Allocate: TypeAlias = Callable[[int, int], Any]
"""Returns memory on a GPU for so many bytes: an object that keeps it, and has an ``address``."""

Spec: TypeAlias = tuple[tuple[int, ...], DType]
"""Shape and dtype of an array to be made."""


@dataclass(slots=True, eq=False)
class DeviceArray:
    """What of a device array takes part in a collective.

    Attributes:
        address: of its first element; elements lie without gaps, in C's order.
        shape: its shape.
        dtype: as NumPy names it.
        ordinal: the driver's number for its GPU.
        stream: the handle of the stream on which its owner works.
        owner: keeps the memory.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    ordinal: int
    stream: int
    owner: Any

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class DeviceBuffer:
    """An array on a device that a result is to be written into.

    Attributes:
        address: of its first element.
        shape: its shape.
        strides: in bytes; None where elements lie without gaps, in C's order.
        dtype: as NumPy names it.
        ordinal: the driver's number for its GPU.
        stream: the handle of the stream on which its owner works.
        owner: keeps the memory.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    ordinal: int
    stream: int
    owner: Any

    @property
    def nbytes(self) -> int:
        """How many bytes its elements have."""
        return math.prod(self.shape) * self.dtype.itemsize


class DeviceType:
    """A framework's arrays in GPU memory, on whichever GPU: there is one for each framework.

    No abstract base class: whether a leaf's type is one is asked too often for what that costs.

    Attributes:
        name: what the framework is called.
        finishes: what `make` returns is no array of the framework's yet.
    """

    name: str
    finishes = False

    def is_on_gpu(self, leaf: Any) -> bool:
        """Return whether an object of the framework's is an array in a GPU's memory."""
        raise NotImplementedError

    def view(self, leaf: Any) -> DeviceArray:
        """Return what of an array takes part in a collective.

        Raises:
            TypeError: it takes part in differentiation, has a dtype that NumPy has no name for, or gaps that the
                framework does not close.
        """
        raise NotImplementedError

    def buffer(self, leaf: Any) -> DeviceBuffer:
        """Return an array as one to write into.

        Raises:
            TypeError: it cannot be written into.
        """
        raise NotImplementedError

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:
        """Return new arrays, or what `finish` makes them of, each with its address.

        Args:
            specs: shape and dtype of each.
            ordinal: the GPU's.
            allocate: returns memory, for a framework that does not give any out before it is written.
        """
        raise NotImplementedError

    def stream(self, ordinal: int) -> int:
        """Return the handle of the stream on which the framework works on that GPU now."""
        raise NotImplementedError

    def finish(self, made: list[Any]) -> list[Any]:
        """Return the framework's arrays of what `make` returned, when their elements are there."""
        raise NotImplementedError


def no_gradient(leaf: Any) -> None:
    """Check that a tensor takes no part in differentiation.

    Raises:
        TypeError: it does.
    """
    if leaf.requires_grad:
        raise TypeError(
            "expected an array of numbers, got a tensor that requires grad, which a collective would cut from its "
            "graph; pass value.detach(), or the gradient itself: parameter.grad"
        )


def strides_in_c_order(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of an array without gaps, in bytes."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def has_gaps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether elements lie otherwise than without gaps, in C's order; axes of one element lie anyhow."""
    if 0 in shape:
        return False
    plain = strides_in_c_order(shape, itemsize)
    return any(size > 1 and step != own for size, step, own in zip(shape, strides, plain, strict=True))


def closed(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Return strides to write by; None for an array without gaps, in C's order.

    Raises:
        TypeError: elements lie in one place, or in backward order.
    """
    if not has_gaps(shape, strides, itemsize):
        return None
    reach = itemsize
    for step, size in sorted((step, size) for size, step in zip(shape, strides, strict=True) if size > 1):
        if step < reach:
            raise TypeError(
                f"out must hold arrays whose elements lie apart, in forward order, got strides {strides} in bytes for "
                f"the shape {shape}"
            )
        reach += step * (size - 1)
    return strides
