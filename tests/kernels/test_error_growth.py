# SPDX-License-Identifier: Apache-2.0
"""How far results of many buffers are from the exact ones, in units of the last place, and what must be exact."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from aiodist_kernels import ReduceOp, reduce
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits

HALVES = [np.dtype(np.float16), BFLOAT16]
SINGLE = np.dtype(np.float32)
SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


def positive(count: int, size: int, dtype: np.dtype) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    return [generator.uniform(0.5, 1, size).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("count", [64, 1024])
@pytest.mark.parametrize(
    ("op", "dtype", "most"), [*[(op, dtype, 0.51) for op in (SUM, MEAN) for dtype in HALVES], (MEAN, SINGLE, 0.500001)]
)
def test_wide_accumulators_do_not_stagnate(op: ReduceOp, dtype: np.dtype, most: float, count: int) -> None:
    buffers = positive(count, 300, dtype)
    exact = np.sum([b.astype(np.float64) for b in buffers], axis=0) / (count if op is MEAN else 1)
    bits = ml_dtypes.finfo(dtype).nmant  # type: ignore[no-untyped-call]
    unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - bits)  # of the last place, in the exact value's binade
    assert np.max(np.abs(reduce(op, buffers).astype(np.float64) - exact) / unit) < most


@pytest.mark.parametrize("dtype", [*HALVES, SINGLE], ids=str)
@pytest.mark.parametrize("count", [1, 3, 7, 49, 1000])
def test_mean_of_identical_buffers_is_exact(dtype: np.dtype, count: int) -> None:
    buffer = arrays.values(1, (300,), dtype)
    if dtype == BFLOAT16:  # it has the range of its accumulator: the sum must not overflow
        buffer[np.abs(buffer.astype(np.float64)) > 2.0**100] = 1
    assert_same_bits(reduce(MEAN, [buffer] * count), buffer)


@pytest.mark.parametrize("dtype", [*HALVES, SINGLE], ids=str)
def test_float64_accumulator_does_not_depend_on_order(dtype: np.dtype) -> None:
    buffers = positive(32, 400, dtype)
    wanted = reduce(SUM, buffers, accumulate="float64")
    for seed in range(5):
        shuffled = [buffers[i] for i in np.random.default_rng(seed).permutation(len(buffers))]
        assert_same_bits(reduce(SUM, shuffled, accumulate="float64"), wanted)


def test_float64_accumulator_rounds_once_to_bfloat16() -> None:
    # 1 + 2**-8 lies half-way between two bfloat16 numbers, and 2**-40 more than float32 can hold above it.
    parts = [np.array([x, -x]).astype(BFLOAT16) for x in (1.0, 2.0**-8, 2.0**-40)]
    assert reduce(SUM, parts, accumulate="float64").astype(float).tolist() == [1 + 2**-7, -1 - 2**-7]
