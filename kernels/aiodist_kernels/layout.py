# SPDX-License-Identifier: Apache-2.0
"""How arrays lie in memory: flat views, fresh outputs, overlap."""

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np

from aiodist_kernels import pool
from aiodist_kernels.arguments import Array
from aiodist_kernels.rules import DType

_HEAD: Final = object.__basicsize__
"""Bytes before the pointer to the data in NumPy's array object, a layout that its ABI fixes."""


def _address_by_interface(array: Array) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def _address_by_layout(array: Array) -> int:
    return ctypes.c_size_t.from_address(id(array) + _HEAD).value


def _layout_is_as_expected() -> bool:
    probe = np.empty(2)[1:]
    return _address_by_layout(probe) == _address_by_interface(probe)


# NumPy's own ways take over a microsecond an array: as long as adding 16 KiB.
address = _address_by_layout if _layout_is_as_expected() else _address_by_interface
"""Return where the first element of an array lies."""


def flat_views(arrays: Sequence[Array]) -> list[Array] | None:
    """Return views of one dimension in which equal positions are equal elements.

    Args:
        arrays: of one shape, any dtypes.

    Returns:
        One view an array; None where they have no common order without gaps.
    """
    if not same_order(arrays):
        return None
    if all(array.flags.c_contiguous for array in arrays):
        return [array.reshape(-1) for array in arrays]
    return [array.reshape(-1, order="F") for array in arrays]


def same_order(arrays: Sequence[Array]) -> bool:
    """Say whether all arrays lie without gaps, all in C or all in Fortran order."""
    for array in arrays:
        if not array.flags.c_contiguous:
            return all(array.flags.f_contiguous for array in arrays)
    return True


def empty_like(array: Array, dtype: DType, *, among: bool = False) -> Array:
    """Return memory for a result that nobody else sees: the shape of `array`, and Fortran's order if it has that.

    Args:
        array: what it is to be like.
        dtype: its dtype.
        among: it is one of several that live as long as each other.
    """
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return pool.results.empty(array.shape, dtype, "F" if fortran else "C", among=among)


def overlaps(out: Array, buffers: Sequence[Array]) -> bool:
    """Say whether `out` may share memory with a buffer (bounds are compared, not elements)."""
    if out.flags.owndata:  # then only views can overlap it, which is quicker to see
        for buffer in buffers:
            if buffer.base is not None or buffer is out:
                break
        else:
            return False
    return any(np.may_share_memory(out, buffer) for buffer in buffers)


def spoils(out: Array, buffers: Sequence[Array]) -> bool:
    """Say whether writing one element of `out` may change another element of a buffer.

    A buffer that is `out` itself is safe where each element is read before it is written.
    """
    return overlaps(out, buffers) and any(
        np.may_share_memory(out, buffer) and not _is_same(out, buffer) for buffer in buffers
    )


def _is_same(one: Array, other: Array) -> bool:
    if one is other:
        return True
    same_place = address(one) == address(other) and one.strides == other.strides
    return same_place and one.dtype == other.dtype
