# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist_kernels import Accumulate, ReduceOp, reduce, reduce_alike, reduce_scalars, result_dtype
from tests.kernels import arrays, oracle
from tests.kernels.arrays import ALL, BOOL, COMPLEX, FLOATS, INTEGERS, assert_same_bits

ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
ACCUMULATE: tuple[Accumulate, ...] = ("native", "float64")


def defined(op: ReduceOp, dtype: np.dtype) -> bool:
    return op in ORDERED if dtype == BOOL else not (dtype in COMPLEX and op in ORDERED)


DEFINED = [(op, dtype) for op, dtype in itertools.product(ReduceOp, ALL) if defined(op, dtype)]


def expected(op: ReduceOp, buffers: list[np.ndarray], accumulate: str) -> list[Any]:
    dtype = buffers[0].dtype
    columns = zip(*(np.ravel(buffer).tolist() for buffer in buffers), strict=True)
    if dtype in COMPLEX:
        name = f"float{4 * dtype.itemsize}"
        return [oracle.reduce_complex(op, column, name, accumulate) for column in columns]
    if dtype in FLOATS:
        return [oracle.reduce_floats(op, list(map(float, c)), dtype.name, accumulate) for c in columns]
    return [oracle.reduce_integers(op, column, dtype) for column in columns]


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=arrays.name)
@settings(max_examples=30)
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
    given_buffers = [arrays.laid_out(b, layout, i) for i, b in enumerate(buffers)]
    result = reduce(op, given_buffers, accumulate=accumulate)
    assert type(result) is np.ndarray
    assert result.dtype == result_dtype(op, given_buffers[0].dtype)
    assert result.dtype.isnative
    assert result.flags.writeable
    assert not any(np.shares_memory(result, buffer) for buffer in given_buffers)
    if dtype in COMPLEX and op is ReduceOp.PRODUCT:
        assert_same_bits(result, reduce(op, buffers, accumulate=accumulate))
        return
    wanted = np.array(expected(op, buffers, accumulate), result.dtype).reshape(shape)
    if op in ORDERED:  # which of 0.0 and -0.0 is greater is left open
        result, wanted = result + result.dtype.type(0), wanted + wanted.dtype.type(0)
    assert_same_bits(result, wanted)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@given(count=arrays.counts, seed=arrays.seeds)
def test_complex_product_is_the_fold_of_contiguous_products(dtype: np.dtype, count: int, seed: int) -> None:
    buffers = arrays.buffers(seed, count, (23,), dtype)
    wanted = buffers[0]
    with np.errstate(all="ignore"):
        for buffer in buffers[1:]:
            wanted = wanted * buffer
    assert_same_bits(reduce(ReduceOp.PRODUCT, buffers), wanted)
    assert_same_bits(reduce(ReduceOp.PRODUCT, [arrays.laid_out(b, "reversed") for b in buffers]), wanted)


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=arrays.name)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_reduce_large_buffers_as_small_ones(op: ReduceOp, dtype: np.dtype, count: int) -> None:
    shape = (4, 40_000)
    buffers = arrays.buffers(3, count, shape, dtype)
    rows = np.stack([reduce(op, [b[:, i : i + 8_000] for b in buffers]) for i in range(0, shape[1], 8_000)])
    wanted = np.moveaxis(rows, 0, 1).reshape(shape)
    assert_same_bits(reduce(op, buffers), wanted)
    assert_same_bits(reduce(op, [arrays.laid_out(b, "F") for b in buffers]), wanted)
    assert_same_bits(reduce(op, [arrays.laid_out(b, "strided") for b in buffers]), wanted)
    out = arrays.laid_out(wanted, "strided")
    out[...] = 1
    assert reduce(op, buffers, out=out) is out
    assert_same_bits(out, wanted)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT], ids=arrays.name)
@pytest.mark.parametrize("size", [1, 40, 100_000])
def test_out_overlaps_an_input(op: ReduceOp, dtype: np.dtype, size: int) -> None:
    for place, count in [(p, n) for n in (1, 2, 3, 5) for p in range(n)]:
        apart = arrays.buffers(11, count, (size,), dtype)
        wanted = reduce(op, apart)
        for shift in (0, 1, -1):
            memory = np.zeros(size + 2, dtype)
            buffers = list(apart)
            memory[1:-1] = buffers[place]
            buffers[place] = memory[1:-1]
            out = memory[1 + shift : size + 1 + shift]
            assert reduce(op, buffers, out=out) is out
            assert_same_bits(out, wanted)


def test_out_may_be_an_input_of_a_wider_dtype() -> None:
    memory = np.arange(4.0)
    integers = memory.view(np.int64)
    integers[...] = [1, 2, 3, 4]
    result = reduce(ReduceOp.MEAN, [integers, integers.copy(), integers.copy()], out=memory)
    assert result is memory
    assert result.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("op", ReduceOp, ids=arrays.name)
def test_inputs_stay_as_they_are(op: ReduceOp) -> None:
    buffers = arrays.buffers(5, 4, (33,), np.dtype(np.float32))
    before = [buffer.tobytes() for buffer in buffers]
    reduce(op, buffers)
    assert [buffer.tobytes() for buffer in buffers] == before


@pytest.mark.parametrize("shape", [(), (1,), (5,)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_buffer_is_copied(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    buffer = np.ones(shape, dtype)
    result = reduce(ReduceOp.SUM, [buffer])
    assert_same_bits(result, buffer)
    assert not np.shares_memory(result, buffer)


def test_the_same_array_counts_each_time_it_is_passed() -> None:
    array = np.array([1.5, 2.5])
    assert reduce(ReduceOp.SUM, [array, array, array]).tolist() == [4.5, 7.5]


@pytest.mark.parametrize("count", [1, 3, 6, 7, 12, 13, 64])
@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=arrays.name)
def test_number_alone_has_the_bits_that_it_has_among_others(op: ReduceOp, dtype: np.dtype, count: int) -> None:
    buffers = arrays.buffers(5, count, (17,), dtype)
    for accumulate in ACCUMULATE:
        wanted = reduce(op, buffers, accumulate=accumulate)
        rows = [[buffer[place] for buffer in buffers] for place in range(17)]
        alone = [reduce_scalars(op, row, accumulate) for row in rows]
        assert {type(number) for number in alone} == {wanted.dtype.type}
        assert_same_bits(np.array(alone), wanted)
        reduced = [reduce(op, [np.asarray(number) for number in row], accumulate=accumulate) for row in rows]
        assert {(type(array), array.shape, array.dtype) for array in reduced} == {(np.ndarray, (), wanted.dtype)}
        assert_same_bits(np.array(reduced), wanted)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_numpy_scalars_are_arrays_of_no_dimension(dtype: np.dtype) -> None:
    result = reduce(ReduceOp.MAX if dtype not in COMPLEX else ReduceOp.SUM, [dtype.type(1), dtype.type(0)])
    assert type(result) is np.ndarray
    assert_same_bits(result, np.ones((), dtype))


def test_fold_starts_from_the_first_buffer() -> None:
    zeros = [np.array([-0.0], np.float32)] * 3
    assert np.signbit(reduce(ReduceOp.SUM, zeros)).all()
    assert np.signbit(reduce(ReduceOp.MEAN, zeros)).all()


def test_integers_wrap() -> None:
    assert reduce(ReduceOp.SUM, [np.array([100], np.int8)] * 2).tolist() == [-56]
    assert reduce(ReduceOp.PRODUCT, [np.array(200, np.uint8)] * 2).tolist() == 64


def test_infinities_and_nan_give_no_warning() -> None:
    inputs = [np.array([np.inf, 3e38, np.nan], np.float32), np.array([-np.inf, 3e38, 1], np.float32)]
    assert str(reduce(ReduceOp.SUM, inputs).tolist()) == "[nan, inf, nan]"
    assert str(reduce(ReduceOp.SUM, [i[:1] for i in inputs]).tolist()) == "[nan]"
    assert reduce(ReduceOp.SUM, [np.array(3e38, np.float32)] * 2) == np.inf
    assert reduce(ReduceOp.MEAN, [np.array(65504, np.float16)] * 3) == 65504


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("op", list(ReduceOp))
def test_reduce_alike_is_reduce_for_buffers_that_have_been_compared(op: ReduceOp, count: int) -> None:
    buffers = [np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32) for seed in range(count)]
    assert reduce_alike(op, buffers).tobytes() == reduce(op, buffers).tobytes()
    assert reduce_alike(op, buffers, "float64").tobytes() == reduce(op, buffers, accumulate="float64").tobytes()


class Subclass(np.ndarray):
    """An array whose operators mean something else."""

    def __mul__(self, other: Any) -> Any:
        return self + other


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", [Subclass, np.matrix])
def test_subclasses_of_arrays_are_reduced_as_arrays(op: ReduceOp, count: int, kind: Any) -> None:
    buffers = [np.arange(6.0).reshape(2, 3) + i for i in range(count)]
    for brought in ([buffer.view(kind) for buffer in buffers], [*buffers[:-1], buffers[-1].view(kind)]):
        result = reduce(op, brought)
        assert type(result) is np.ndarray
        assert_same_bits(result, reduce(op, buffers))
