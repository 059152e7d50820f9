# SPDX-License-Identifier: Apache-2.0
"""How arrays lie in memory: flat views, fresh outputs, overlap."""

from collections.abc import Sequence

import numpy as np

from aiodist_kernels.arguments import Array
from aiodist_kernels.rules import DType


def flat_views(arrays: Sequence[Array]) -> list[Array] | None:
    """Return views of one dimension in which equal positions are equal elements.

    Args:
        arrays: of one shape, any dtypes.

    Returns:
        One view an array; None where they have no common order without gaps.
    """
    if all(array.flags.c_contiguous for array in arrays):
        return [array.reshape(-1) for array in arrays]
    if all(array.flags.f_contiguous for array in arrays):
        return [array.reshape(-1, order="F") for array in arrays]
    return None


def empty_like(array: Array, dtype: DType) -> Array:
    """Return fresh memory for a result: the shape of `array`, and Fortran's order if it has that."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return np.empty(array.shape, dtype, order="F" if fortran else "C")


def overlaps(out: Array, buffers: Sequence[Array]) -> bool:
    """Say whether `out` may share memory with a buffer (bounds are compared, not elements)."""
    return any(np.may_share_memory(out, buffer) for buffer in buffers)


def spoils(out: Array, buffers: Sequence[Array]) -> bool:
    """Say whether writing one element of `out` may change another element of a buffer.

    A buffer that is `out` itself is safe where each element is read before it is written.
    """
    return any(np.may_share_memory(out, buffer) and not _is_same(out, buffer) for buffer in buffers)


def _is_same(one: Array, other: Array) -> bool:
    if one is other:
        return True
    here, there = one.__array_interface__, other.__array_interface__
    same_place = here["data"][0] == there["data"][0] and one.strides == other.strides
    return bool(same_place and one.dtype == other.dtype)
