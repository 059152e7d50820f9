# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller passes: errors that say what was expected, what came, what to do."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist_kernels.rules import DType, Rule

Array = NDArray[Any]


def check_arrays(buffers: Sequence[object]) -> None:
    """Check that there are buffers, and that they are arrays (or NumPy scalars).

    Raises:
        TypeError: one is neither.
        ValueError: there are none.
    """
    if not len(buffers):
        raise ValueError("expected at least one buffer to reduce, got none")
    for index, buffer in enumerate(buffers):
        if not isinstance(buffer, np.ndarray | np.generic):
            raise TypeError(
                f"expected NumPy arrays, got {type(buffer).__name__} as buffer {index}; "
                f"convert it first, e.g. np.asarray(x), or use reduce_numbers for Python numbers"
            )


def plain(buffers: Sequence[Array]) -> Sequence[Array]:
    """Return buffers without what subclasses of arrays make of operators: as arrays, over the same memory.

    Raises:
        TypeError: one is masked, and what the mask hides would count.
    """
    for buffer in buffers:
        if type(buffer) is not np.ndarray:
            return [_plain(each, index) for index, each in enumerate(buffers)]
    return buffers


def _plain(buffer: Any, index: int) -> Any:
    check_unmasked(buffer, f"as buffer {index}")
    return np.asarray(buffer) if isinstance(buffer, np.ndarray) else buffer


def check_unmasked(array: object, where: str) -> None:
    """Check that an array has no mask.

    Raises:
        TypeError: it has.
    """
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"expected arrays without a mask, got a MaskedArray {where}, whose masked elements would count; fill them "
            "first, e.g. x.filled(0)"
        )


def check_alike(buffers: Sequence[Array], dtype: DType, shape: tuple[int, ...]) -> None:
    """Check that all buffers have the dtype and shape of buffer 0.

    Raises:
        TypeError: dtypes differ, or a buffer is no array.
        ValueError: shapes differ.
    """
    check_arrays(buffers)
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
    """Check that `out` can take the result.

    Raises:
        TypeError: it is no array, or of another dtype.
        ValueError: it has another shape, or is read-only.
    """
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
