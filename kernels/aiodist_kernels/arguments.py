# SPDX-License-Identifier: Apache-2.0
"""What a caller passes: checks, with errors that say what to do, and how arrays lie in memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiodist_kernels import pool
from aiodist_kernels.rules import DType, Rule

Array = np.ndarray[Any, np.dtype[Any]]


# Checks.


def check_arrays(buffers: Sequence[object]) -> None:
    """Check that there are buffers, and that they are arrays (or NumPy scalars)."""
    if not len(buffers):
        raise ValueError("expected at least one buffer to reduce, got none")
    for index, buffer in enumerate(buffers):
        if not isinstance(buffer, np.ndarray | np.generic):
            raise TypeError(
                f"expected NumPy arrays, got {type(buffer).__name__} as buffer {index}; "
                f"convert it first, e.g. np.asarray(x), or use reduce_numbers for Python numbers"
            )


def plain(buffers: Sequence[Any]) -> Sequence[Array]:
    """Return buffers without what subclasses of arrays make of operators: as arrays, over the same memory."""
    if not [buffer for buffer in buffers if type(buffer) is not np.ndarray]:
        return buffers
    for index, buffer in enumerate(buffers):
        check_unmasked(buffer, f"as buffer {index}")
    return [np.asarray(buffer) if isinstance(buffer, np.ndarray) else buffer for buffer in buffers]


def check_unmasked(array: object, where: str) -> None:
    """Check that an array has no mask: what it hides would count."""
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"expected arrays without a mask, got a MaskedArray {where}, whose masked elements would count; fill them "
            "first, e.g. x.filled(0)"
        )


def check_alike(buffers: Sequence[Array], dtype: DType, shape: tuple[int, ...]) -> None:
    """Check that all buffers have the dtype and shape of buffer 0."""
    for index, buffer in enumerate(buffers):
        if buffer.dtype != dtype:
            raise TypeError(
                f"expected buffers of one dtype, got {dtype} (buffer 0) and {buffer.dtype} "
                f"(buffer {index}); cast first, e.g. x.astype({dtype.name!r})"
            )
        if buffer.shape != shape:
            raise ValueError(
                f"expected buffers of one shape, got {shape} (buffer 0) and {buffer.shape} "
                f"(buffer {index}); there is no broadcasting, use np.broadcast_to first"
            )


def check_out(out: object, rule: Rule, shape: tuple[int, ...]) -> None:
    """Check that `out` can take the result."""
    if not isinstance(out, np.ndarray):
        raise TypeError(
            f"expected out to be a NumPy array or None, got {type(out).__name__}; "
            f"e.g. out=np.empty({shape}, {rule.result.name!r})"
        )
    check_unmasked(out, "as out")
    if out.dtype != rule.result:
        raise TypeError(
            f"expected out of dtype {rule.result}, which {rule.op.name} of {rule.dtype} gives, "
            f"got {out.dtype}; e.g. out=np.empty({shape}, {rule.result.name!r})"
        )
    if out.shape != shape:
        raise ValueError(
            f"expected out of shape {shape}, got {out.shape}; e.g. out=np.empty({shape}, {rule.result.name!r})"
        )
    if not out.flags.writeable:
        raise ValueError("expected a writeable out, got a read-only array; pass a copy of it")


# Memory.


def flat_views(arrays: Sequence[Array]) -> list[Array] | None:
    """Return views of one dimension in which equal positions are equal elements; None where there is no such order."""
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


def empty_like(array: Array, dtype: DType) -> Array:
    """Return memory for a large result: of the shape of `array`, and in Fortran's order if it has that."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return pool.results.empty(array.shape, dtype, "F" if fortran else "C")


def overlaps(out: Array, buffers: Sequence[Array]) -> bool:
    """Say whether `out` may share memory with a buffer (bounds are compared, not elements)."""
    return any(np.may_share_memory(out, buffer) for buffer in buffers)


def spoils(out: Array, buffers: Sequence[Array]) -> bool:
    """Say whether writing one element of `out` may change another element of a buffer.

    A buffer that is `out` itself is safe where each element is read before it is written.
    """
    return any(
        np.may_share_memory(out, buffer)
        and (out.ctypes.data, out.strides, out.dtype) != (buffer.ctypes.data, buffer.strides, buffer.dtype)
        for buffer in buffers
    )
