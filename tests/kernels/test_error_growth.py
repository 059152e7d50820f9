# SPDX-License-Identifier: Apache-2.0
"""How far results are from the exact ones, in units of the last place, and what must be exact."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from aiodist_kernels import ReduceOp, reduce
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits

HALVES = [np.dtype(np.float16), BFLOAT16]
SINGLE = np.dtype(np.float32)


def positive(count: int, size: int, dtype: np.dtype) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    return [generator.uniform(0.5, 1, size).astype(dtype) for _ in range(count)]


def worst_error(result: np.ndarray, exact: np.ndarray) -> float:
    """Return the greatest error in units of the last place of the exact value's binade."""
    bits = ml_dtypes.finfo(result.dtype).nmant  # type: ignore[no-untyped-call]
    unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - bits)
    return float(np.max(np.abs(result.astype(np.float64) - exact) / unit))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("count", [2, 64, 1024])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN], ids=arrays.name)
def test_half_precision_does_not_stagnate(op: ReduceOp, dtype: np.dtype, count: int) -> None:
    buffers = positive(count, 200, dtype)
    exact = np.sum([b.astype(np.float64) for b in buffers], axis=0) / (count if op is ReduceOp.MEAN else 1)
    assert worst_error(reduce(op, buffers), exact) < 0.51


@pytest.mark.parametrize("count", [2, 3, 64, 1024])
def test_float32_mean_is_the_exact_one_rounded(count: int) -> None:
    buffers = positive(count, 500, SINGLE)
    exact = np.sum([b.astype(np.float64) for b in buffers], axis=0) / count
    assert worst_error(reduce(ReduceOp.MEAN, buffers), exact) < 0.500001


@pytest.mark.parametrize("dtype", [*HALVES, SINGLE], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 49, 1000])
def test_mean_of_identical_buffers_is_exact(dtype: np.dtype, count: int) -> None:
    buffer = arrays.values(1, (300,), dtype)
    if dtype == BFLOAT16:  # it has the range of its accumulator: the sum must not overflow
        buffer[np.abs(buffer.astype(np.float64)) > 2.0**100] = 1
    assert_same_bits(reduce(ReduceOp.MEAN, [buffer] * count), buffer)


@pytest.mark.parametrize("dtype", [*HALVES, SINGLE], ids=str)
def test_float64_accumulator_does_not_depend_on_order(dtype: np.dtype) -> None:
    buffers = positive(32, 400, dtype)
    wanted = reduce(ReduceOp.SUM, buffers, accumulate="float64")
    generator = np.random.default_rng(0)
    for _ in range(20):
        shuffled = [buffers[i] for i in generator.permutation(len(buffers))]
        assert_same_bits(reduce(ReduceOp.SUM, shuffled, accumulate="float64"), wanted)


def test_float64_accumulator_rounds_once_to_bfloat16() -> None:
    # 1 + 2**-8 lies half-way between two bfloat16 numbers, and 2**-40 more than float32 can hold above it.
    parts = [np.array([x, -x]).astype(BFLOAT16) for x in (1.0, 2.0**-8, 2.0**-40)]
    result = reduce(ReduceOp.SUM, parts, accumulate="float64")
    assert result.astype(float).tolist() == [1 + 2**-7, -1 - 2**-7]
