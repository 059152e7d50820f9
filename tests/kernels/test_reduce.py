# SPDX-License-Identifier: Apache-2.0
"""Reductions of arrays in any layout, and of Python numbers, give the fold that the rules describe."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist_kernels import (
    Accumulate,
    ReduceOp,
    cut,
    nest_reduction,
    plan_for,
    policy,
    reduce,
    reduce_numbers,
    reduction,
    result_dtype,
)
from aiodist_kernels.pool import MIB
from tests.kernels import arrays
from tests.kernels.arrays import ALL, BFLOAT16, BOOL, COMPLEX, SINGLE, assert_same_bits

SUM, MEAN, MIN, MAX, PRODUCT = ReduceOp
UFUNCS: dict[ReduceOp, np.ufunc] = dict(
    zip(ReduceOp, (np.add, np.add, np.minimum, np.maximum, np.multiply), strict=True)
)
ACCUMULATE: tuple[Accumulate, ...] = ("native", "float64")
HALVES = [np.dtype(np.float16), BFLOAT16]


def defined(op: ReduceOp, dtype: np.dtype) -> bool:
    return op in (MIN, MAX) if dtype == BOOL else not (dtype in COMPLEX and op in (MIN, MAX))


DEFINED = [(op, dtype) for op, dtype in itertools.product(ReduceOp, ALL) if defined(op, dtype)]

SIZES = {SUM: 1, MEAN: 8, MIN: 1, MAX: 4, PRODUCT: 2}
COMPILED = [(op, dtype) for op, dtype in DEFINED if dtype.kind not in "iu" or dtype.itemsize == SIZES[op]]
"""What to compile, which takes time: every op on every kind of number, and integers of each size under one op."""


def accumulator(op: ReduceOp, dtype: np.dtype, accumulate: str) -> np.dtype:
    if op in (MIN, MAX) or (dtype.kind in "iu" and op is not MEAN):
        return dtype
    if dtype in HALVES:
        return np.dtype(np.float64 if accumulate == "float64" else np.float32)
    wider = op is MEAN or accumulate == "float64"
    return np.promote_types(dtype, np.float64) if wider else dtype


def to_bfloat16(value: float) -> float:
    """Round to nearest even, in exact arithmetic."""
    if not math.isfinite(value) or value == 0:
        return value
    unit = Fraction(2) ** (max(math.frexp(value)[1] - 1, -126) - 7)
    rounded = float(round(Fraction(value) / unit) * unit)  # round() of a fraction is to nearest even
    return math.copysign(rounded if abs(rounded) < 2.0**128 else math.inf, value)


def expected(op: ReduceOp, buffers: list[np.ndarray], accumulate: str) -> np.ndarray:
    """Fold contiguous arrays in plain NumPy, and round once."""
    dtype, count = buffers[0].dtype, len(buffers)
    wide = accumulator(op, dtype, accumulate)
    result = wide if dtype.kind in "iu" else dtype
    with np.errstate(all="ignore"):
        total = buffers[0].astype(wide).reshape(-1)
        for buffer in buffers[1:]:
            total = UFUNCS[op](total, buffer.astype(wide).reshape(-1))
        if op is MEAN:
            parts = total.view(f"f{wide.itemsize // (2 if wide.kind == 'c' else 1)}")
            total = (parts / count if wide == result else parts * parts.dtype.type(1 / count)).view(wide)
        if dtype == BFLOAT16 and wide == np.float64:  # through float32 it would be rounded twice
            total = np.array([to_bfloat16(float(x)) for x in total])
        return total.astype(result).reshape(buffers[0].shape)


def in_pieces(op: ReduceOp, buffers: list[np.ndarray], parts: int, **options: Any) -> np.ndarray:
    """Reduce in pieces, the last one first."""
    pieces = cut(op, buffers, parts=parts, **options)
    assert len(pieces.calls) <= parts
    for call in reversed(pieces.calls):
        call()
    return pieces.result


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=arrays.name)
@settings(max_examples=10)
@given(
    count=arrays.counts,
    shape=arrays.shapes,
    layout=arrays.layouts,
    accumulate=st.sampled_from(ACCUMULATE),
    seed=arrays.seeds,
)
def test_reduce_any_layout(
    op: ReduceOp, dtype: np.dtype, *, count: int, shape: tuple[int, ...], layout: str, accumulate: Accumulate, seed: int
) -> None:
    buffers = arrays.buffers(seed, count, shape, dtype)
    passed = [arrays.laid_out(b, layout, i) for i, b in enumerate(buffers)]
    before = [buffer.tobytes() for buffer in passed]
    result = reduce(op, passed, accumulate=accumulate)
    assert type(result) is np.ndarray
    assert result.dtype == result_dtype(op, passed[0].dtype)
    assert result.dtype.isnative
    assert result.flags.writeable
    assert not any(np.shares_memory(result, buffer) for buffer in passed)
    small = reduction(op, passed[0].dtype, passed[0].shape, len(passed), accumulate)
    assert_same_bits(small(passed), result)
    nest = nest_reduction(op, [passed[0].dtype] * 2, [passed[0].shape] * 2, len(passed))
    if nest is not None and accumulate == "native":
        for leaf in nest([[buffer, buffer] for buffer in passed]):
            assert_same_bits(leaf, result)
    assert_same_bits(in_pieces(op, passed, 4, accumulate=accumulate), result)
    assert [buffer.tobytes() for buffer in passed] == before
    wanted = expected(op, buffers, accumulate)
    if op in (MIN, MAX):  # which of 0.0 and -0.0 is greater is unspecified
        result, wanted = result + result.dtype.type(0), wanted + wanted.dtype.type(0)
    assert_same_bits(result, np.asarray(wanted))


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=arrays.name)
def test_reduce_large_buffers_as_small_ones(op: ReduceOp, dtype: np.dtype) -> None:
    shape = (4, 40_000)
    for count in (2, 3):
        buffers = arrays.buffers(3, count, shape, dtype)
        rows = np.stack([reduce(op, [b[:, i : i + 8_000] for b in buffers]) for i in range(0, shape[1], 8_000)])
        wanted = np.moveaxis(rows, 0, 1).reshape(shape)
        for layout in ("C", "F", "strided"):
            assert_same_bits(reduce(op, [arrays.laid_out(b, layout) for b in buffers]), wanted)
        assert_same_bits(in_pieces(op, buffers, 5), wanted)
        out = arrays.laid_out(np.ones_like(wanted), "strided")
        assert reduce(op, buffers, out=out) is out
        assert_same_bits(out, wanted)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op, dtype in COMPILED if op is SUM or (op, dtype.kind) == (PRODUCT, "c")],
    ids=arrays.name,
)
@pytest.mark.parametrize("nbytes", [1, 320, 300_000])
def test_out_may_be_the_first_buffer(op: ReduceOp, dtype: np.dtype, nbytes: int) -> None:
    for count in (1, 2, 3):
        buffers = arrays.buffers(11, count, (-(-nbytes // dtype.itemsize),), dtype)
        wanted = reduce(op, buffers)
        assert reduce(op, buffers, out=buffers[0]) is buffers[0]
        assert_same_bits(buffers[0], wanted)


def test_cost_of_a_reduction() -> None:
    assert plan_for(SUM, SINGLE, 3, "native").cost(1000) == 16_000
    assert plan_for(MEAN, np.dtype(np.int8), 3, "native").cost(1000) == 11_000 * policy.SLOWNESS_OF_WIDE_FOLDS
    assert [policy.blocks(moved * MIB) for moved in (60, 70)] == [False, True]
    for moved, workers, parts in ((3, 8, 1), (16, 8, 4), (1024, 8, 8), (1024, 0, 1)):
        assert policy.parts(moved * MIB, workers) == parts


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=arrays.name)
def test_single_number_has_the_bits_of_an_element(op: ReduceOp, dtype: np.dtype) -> None:
    for count, accumulate in itertools.product((1, 3, 6, 7, 12, 13, 64), ACCUMULATE):
        buffers = arrays.buffers(5, count, (6,), dtype)
        wanted = reduce(op, buffers, accumulate=accumulate)
        for convert in (np.asarray, dtype.type):
            rows = [[convert(buffer[place]) for buffer in buffers] for place in range(6)]
            alone = [reduce(op, row, accumulate=accumulate) for row in rows]
            assert {(type(array), array.shape, array.dtype) for array in alone} == {(np.ndarray, (), wanted.dtype)}
            assert_same_bits(np.array(alone), wanted)


def test_infinities_and_nan_give_no_warning() -> None:
    inputs = [np.array([np.inf, 3e38, np.nan], np.float32), np.array([-np.inf, 3e38, 1], np.float32)]
    assert str(reduce(SUM, inputs).tolist()) == "[nan, inf, nan]"
    assert reduce(SUM, [np.array(3e38, np.float32)] * 2) == np.inf
    assert reduce(MEAN, [np.array(65504, np.float16)] * 3) == 65504


@pytest.mark.parametrize("dtype", [*HALVES, SINGLE], ids=str)
@pytest.mark.parametrize("count", [1, 3, 7, 49, 1000])
def test_mean_of_identical_buffers_is_exact(dtype: np.dtype, count: int) -> None:
    buffer = arrays.values(1, (300,), dtype)
    if dtype == BFLOAT16:  # it has the range of its accumulator: the sum must not overflow
        buffer[np.abs(buffer.astype(np.float64)) > 2.0**100] = 1
    assert_same_bits(reduce(MEAN, [buffer] * count), buffer)


def test_float64_accumulator_rounds_once_to_bfloat16() -> None:
    # 1 + 2**-8 lies half-way between two bfloat16 numbers, and 2**-40 more than float32 can hold above it.
    parts = [np.array([x, -x]).astype(BFLOAT16) for x in (1.0, 2.0**-8, 2.0**-40)]
    assert reduce(SUM, parts, accumulate="float64").astype(float).tolist() == [1 + 2**-7, -1 - 2**-7]


# Python numbers.


@given(st.lists(st.integers(), min_size=1, max_size=70))
def test_integers_are_exact(numbers: list[int]) -> None:
    found = [reduce_numbers(op, numbers) for op in (SUM, PRODUCT, MIN, MAX)]
    assert found == [sum(numbers), math.prod(numbers), min(numbers), max(numbers)]
    assert reduce_numbers(MEAN, numbers) == float(Fraction(sum(numbers), len(numbers)))


@given(st.lists(st.floats(), min_size=1, max_size=70), st.integers(0, 69))
def test_floats_are_folded_left_to_right(numbers: list[float], place: int) -> None:
    total = functools.reduce(operator.add, numbers)
    assert repr(reduce_numbers(SUM, numbers)) == repr(total)
    assert repr(reduce_numbers(MEAN, numbers)) == repr(total / len(numbers))
    assert repr(reduce_numbers(PRODUCT, numbers)) == repr(functools.reduce(operator.mul, numbers))
    clean = [0.0 if math.isnan(number) else number for number in numbers]
    assert (reduce_numbers(MIN, clean), reduce_numbers(MAX, clean)) == (min(clean), max(clean))
    clean[place % len(clean)] = math.nan
    assert repr(reduce_numbers(MIN, clean)) == repr(reduce_numbers(MAX, clean)) == "nan"


@pytest.mark.parametrize(
    ("op", "numbers", "wanted"),
    [
        (MIN, [True, False], "False"),
        (MAX, [False, True, False], "True"),
        (SUM, [1.0, 1e100, 1.0, -1e100], "0.0"),  # not compensated
        (SUM, [-0.0, -0.0], "-0.0"),
        (SUM, [1 + 2j, 3 - 1j], "(4+1j)"),
        (PRODUCT, [1 + 2j, 3 - 1j], "(5+5j)"),
        (MEAN, [complex(math.inf, 1), 0j], "(inf+0.5j)"),
        *((op, [2, 4], wanted) for op, wanted in zip(ReduceOp, ["6", "3.0", "2", "4", "8"], strict=True)),
        *((op, [2.5], "2.5") for op in ReduceOp),
    ],
)
def test_numbers_and_their_types(op: ReduceOp, numbers: list[float], wanted: str) -> None:
    assert repr(reduce_numbers(op, numbers)) == wanted


# Errors.

ONE_OF = "one of SUM, MEAN, MIN, MAX, PRODUCT (ReduceOp.SUM, or the string 'SUM' in any case)"
CAST = "of bool: expected numbers, got bool; cast first, e.g. x.astype(np.int64) or int(x), or use MIN (all) or MAX"
NO_ORDER = "expected an ordered dtype, got complex numbers, which have no order; reduce abs(x), or x.real and x.imag"
X = np.zeros(3, SINGLE)
ANY: Any = None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ReduceOp("average"), ValueError, f"expected a reduce op, {ONE_OF}, got 'average'"),
        (lambda: ReduceOp(ANY), ValueError, f"expected a reduce op, {ONE_OF}, got None"),
        (lambda: reduce(SUM, [X > 0]), TypeError, f"SUM {CAST}"),
        (lambda: result_dtype(MEAN, bool), TypeError, f"MEAN {CAST}"),
        (lambda: reduce(MIN, [X.astype(complex)]), TypeError, f"MIN of complex128: {NO_ORDER}"),
        (lambda: result_dtype(MAX, np.dtype(">c8")), TypeError, f"MAX of complex64: {NO_ORDER}"),
        (lambda: reduce(SUM, [X.astype(object)]), TypeError, "SUM of object: expected numbers, got objects"),
        (lambda: reduce(MAX, [X.astype(str)]), TypeError, "MAX of <U32: expected numbers, got strings; reduce"),
        (lambda: reduce(MIN, [X.astype("M8[s]")]), TypeError, "MIN of datetime64[s]: expected numbers, got another"),
        (lambda: reduce(SUM, [X.astype(ml_dtypes.float8_e5m2)]), TypeError, "SUM of float8_e5m2: expected numbers"),
    ],
)
def test_error_texts(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
