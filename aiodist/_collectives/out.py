"""``out=``: callers' own buffers for results, and which memory may be written while other memory is read.

Each replica's buffers are checked at its call: there is one for each leaf, and no two share memory. On the host,
results are made in reused memory and then copied. On GPUs they are written directly into the buffers, unless that could
change the input of another result; this is decided by the bounds of all contributions once all replicas have posted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

import aiodist_kernels as kernels
from aiodist._arrays.device import DeviceArray, DeviceType, device_type_of
from aiodist._arrays.host import Array, class_name
from aiodist._arrays.leaves import LeafMark, LeafType, describe_leaf, is_array
from aiodist._collectives.kinds import Collective
from aiodist_kernels import ReduceOp

Outs = Mapping[int, Sequence[Any]]  # by position, a replica's buffers, one for each leaf

NO_OUTS: Outs = {}


def checked(collective: Collective, leaves: Sequence[Any], buffers: Sequence[Any]) -> list[Any]:
    """Return a replica's buffers for a reduction, one for each leaf, in the form in which they are written."""
    spec, op = collective.spec, collective.op
    assert spec is not None
    assert op is not None
    found = [
        _buffer(buffer, leaf, shape, dtype, mark, op)
        for buffer, leaf, shape, dtype, mark in zip(buffers, leaves, *spec[:3], strict=True)
    ]
    if len(found) > 1:
        hosts = [buffer for buffer in found if isinstance(buffer, np.ndarray)]
        on_host, on_gpus = [bounds(b, 0) for b in hosts], [bounds(b, 0) for b in found if not isinstance(b, np.ndarray)]
        # Interleaved arrays, such as columns of a matrix, share no element. A proof that takes too long counts as none.
        pairs = combinations(hosts, 2) if conflicting((), on_host) else ()
        shared = any(np.may_share_memory(a, b, max_work=1000) for a, b in pairs)  # type: ignore[arg-type]
        if shared or conflicting((), on_gpus):
            raise ValueError("out must have a buffer of its own for each leaf, got two that share memory")
    return found


def _may_overlap_itself(array: Array) -> bool:
    """Return whether two elements may share memory: they cannot if each axis steps over everything inside it."""
    reach = array.itemsize
    for step, size in sorted((abs(step), size) for size, step in zip(array.shape, array.strides, strict=True)):
        if size > 1 and step < reach:
            return array.size > 0
        reach += step * (size - 1)
    return False


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
        if not buffer.flags.forc and _may_overlap_itself(buffer):
            raise ValueError(
                f"out must have memory for each element, got an array of shape {buffer.shape} whose elements overlap: "
                f"its strides are {buffer.strides}"
            )
    expected = kernels.result_dtype(op, dtype)
    if buffer.dtype != expected:
        raise TypeError(f"out must have the result's dtype {expected}, got {buffer.dtype}")
    if tuple(buffer.shape) != shape:
        raise ValueError(f"out must have the result's shape {shape}, got {tuple(buffer.shape)}")
    return buffer


# Which memory may be written while other memory is read.


class Bounds(NamedTuple):
    """The bounds of some memory, and the index of the leaf that it belongs to."""

    begin: int
    end: int
    leaf: int


def bounds(array: Array | DeviceArray, leaf: int) -> Bounds:
    """Return the bounds of an array's memory."""
    if isinstance(array, np.ndarray):
        return Bounds(*byte_bounds(array), leaf)
    return Bounds(array.address, array.address + array.nbytes, leaf)


def conflicting(inputs: Iterable[Bounds], outs: Iterable[Bounds]) -> bool:
    """Return whether writing results may change the inputs of other results, or other results.

    A result may be written over its own input, if that is not among ``inputs``.
    """
    read = written = 0  # the ends of the memory that is read, and written, so far
    for begin, end, _, is_written in sorted([(*each, False) for each in inputs] + [(*each, True) for each in outs]):
        if begin >= end:  # empty
            continue
        if begin < written or (is_written and begin < read):
            return True
        if is_written:
            written = end
        else:
            read = max(read, end)
    return False
