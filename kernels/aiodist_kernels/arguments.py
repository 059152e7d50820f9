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
