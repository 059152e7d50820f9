# SPDX-License-Identifier: Apache-2.0
"""From the accumulator to the result with one rounding, to nearest even."""

import numpy as np

from aiodist_kernels.arguments import Array
from aiodist_kernels.rules import FLOAT64, DType


def rounded(values: Array, dtype: DType) -> Array:
    """Return `values` as `dtype`, each rounded once to nearest even; fresh memory if they differ."""
    if dtype.isbuiltin != 1 and values.dtype == FLOAT64:  # bfloat16
        values = to_odd_float32(values)
    return values.astype(dtype, copy=False)


def to_odd_float32(values: Array) -> Array:
    """Round float64 to float32 such that a second rounding to bfloat16 is right.

    Libraries convert float64 to bfloat16 by way of float32 and so round twice. Rounding to odd
    (truncate, and set the last bit when that lost something) keeps the information which
    the second rounding needs, as float32 has more than two bits more than bfloat16.

    Source: S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008.
    """
    near = np.array(values, np.float32)
    bits = near.view(np.uint32)
    exact = near.astype(np.float64)
    beyond = np.abs(exact) > np.abs(values)
    bits[...] = np.where(beyond, bits - np.uint32(1), bits) | (exact != values)
    return near
