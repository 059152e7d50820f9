"""``out=``: callers' own buffers for results, and what memory may be written while other memory is read.

Each replica's buffers are checked at its call: there is one for each leaf, and no two share memory. What other replicas
contribute is not known before all have come. Then memory is compared by its bounds: a result is written straight into a
buffer unless that could change what another result is made of; else it is made apart, and copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

import aiodist_kernels as kernels
from aiodist._arrays.device import DeviceArray, DeviceType, lies_apart
from aiodist._arrays.frameworks import device_type_of
from aiodist._arrays.host import class_name
from aiodist._arrays.leaves import LeafMark, LeafType, describe_leaf, is_array
from aiodist._collectives.kinds import Collective
from aiodist_kernels import ReduceOp

Array = np.ndarray[Any, Any]
Outs = Mapping[int, Sequence[Any]]
"""By position, a replica's buffers, one for each leaf."""

_MOST_WORK = 1_000
"""How long NumPy may look whether two arrays that lie among each other share an element; beyond, they count as such."""


def checked(collective: Collective, leaves: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
    """Return a replica's buffers, one for each leaf that it contributes to a reduction, as they are written into."""
    spec, op = collective.spec, collective.op
    assert spec is not None
    assert op is not None
    found = [
        _buffer(buffer, leaf, shape, dtype, mark, op)
        for buffer, leaf, shape, dtype, mark in zip(buffers, leaves, *spec[:3], strict=True)
    ]
    _check_apart([buffer for buffer in found if isinstance(buffer, np.ndarray)])
    there = [place for place, buffer in enumerate(found) if isinstance(buffer, DeviceArray) and buffer.nbytes]
    inputs = [span(leaves[place], place) for place in there]
    if entangled(inputs, [span(found[place], place) for place in there], in_place=True):
        raise ValueError(
            "out must overlap neither the value nor itself, except that a buffer may be the very array that it is the "
            "result of"
        )
    return found


def _buffer(out: Any, leaf: Any, shape: tuple[int | None, ...], dtype: Any, mark: LeafMark, op: ReduceOp) -> Any:
    buffer: Any
    if isinstance(mark, DeviceType):
        if device_type_of(out) is not mark:
            raise TypeError(
                f"out must hold {mark.name} arrays on GPUs, where the value has them, got a {class_name(out)}"
            )
        buffer = mark.buffer(out)
        if buffer.ordinal != leaf.ordinal:
            raise ValueError(
                f"out must be on the value's GPU, number {leaf.ordinal}, got one on number {buffer.ordinal}"
            )
    else:
        buffer = describe_leaf(out)[3]
        if not (is_array(mark) or mark == LeafType.NUMPY_SCALAR) or not isinstance(buffer, np.ndarray):
            raise TypeError(f"out must hold arrays, where the value has arrays, got {out!r}")
        if not buffer.flags.writeable:
            raise ValueError("out must be writeable, got a read-only array")
    expected = kernels.result_dtype(op, dtype)
    if buffer.dtype != expected:
        raise TypeError(f"out must have the result's dtype {expected}, got {buffer.dtype}")
    if tuple(buffer.shape) != shape:
        raise ValueError(f"out must have the result's shape {shape}, got {tuple(buffer.shape)}")
    return buffer


def _check_apart(buffers: Sequence[Array]) -> None:
    """Check that every element of every buffer has memory of its own."""
    for buffer in buffers:
        steps = tuple(map(abs, buffer.strides))
        if buffer.size and not buffer.flags.forc and not lies_apart(buffer.shape, steps, buffer.itemsize):
            raise ValueError(
                f"out must have memory for each element, got an array of shape {buffer.shape} whose elements overlap: "
                f"its strides are {buffer.strides}"
            )
    if entangled([], [span(buffer, place) for place, buffer in enumerate(buffers)], in_place=True):
        for one, other in combinations(buffers, 2):
            if np.may_share_memory(one, other) and _share(one, other):
                raise ValueError("out must have a buffer of its own for each leaf, got two that share memory")


def _share(one: Array, other: Array) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)  # type: ignore[arg-type]  # any number does
    except np.exceptions.TooHardError:
        return True


# What may be written while what is read.


class Span(NamedTuple):
    """Memory by its bounds, and the place of the leaf that it belongs to."""

    begin: int
    end: int
    leaf: int


def span(array: Array | DeviceArray, leaf: int) -> Span:
    """Return the bounds of an array's memory."""
    if isinstance(array, np.ndarray):
        return Span(*byte_bounds(array), leaf)
    if array.strides is None or not all(array.shape):
        return Span(array.address, array.address + array.nbytes, leaf)
    last = sum((size - 1) * step for size, step in zip(array.shape, array.strides, strict=True))
    return Span(array.address, array.address + last + array.dtype.itemsize, leaf)


def entangled(inputs: Iterable[Span], outs: Sequence[Span], *, in_place: bool) -> bool:
    """Return whether writing results may change what others are made of, or other results.

    ``in_place``: a result may lie in the very place of what it is itself made of.
    """
    reads = set(inputs) - set(outs) if in_place else set(inputs)
    found = [(*each, False) for each in reads] + [(*each, True) for each in outs]
    read = written = 0  # how far what is read, and what is written, has reached so far
    for begin, end, _, is_written in sorted(found):
        if begin == end:
            continue
        if begin < written or (is_written and begin < read):
            return True
        if is_written:
            written = end
        else:
            read = max(read, end)
    return False
