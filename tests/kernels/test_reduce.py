# SPDX-License-Identifier: Apache-2.0
"""Every way to reduce arrays gives what exact arithmetic gives, whatever their layout, alone and in pieces."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist_kernels import (
    Accumulate,
    ReduceOp,
    cost,
    cut,
    nest_reduction,
    policy,
    reduce,
    reduce_alike,
    reduce_scalars,
    reduction,
    result_dtype,
)
from aiodist_kernels.pool import MIB
from tests.kernels import arrays, oracle
from tests.kernels.arrays import ALL, BFLOAT16, BOOL, COMPLEX, FLOATS, assert_same_bits

ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
ACCUMULATE: tuple[Accumulate, ...] = ("native", "float64")


def defined(op: ReduceOp, dtype: np.dtype) -> bool:
    return op in ORDERED if dtype == BOOL else not (dtype in COMPLEX and op in ORDERED)


DEFINED = [(op, dtype) for op, dtype in itertools.product(ReduceOp, ALL) if defined(op, dtype)]

SIZES = {ReduceOp.SUM: 1, ReduceOp.MEAN: 8, ReduceOp.MIN: 1, ReduceOp.MAX: 4, ReduceOp.PRODUCT: 2}
COMPILED = [(op, dtype) for op, dtype in DEFINED if dtype.kind not in "iu" or dtype.itemsize == SIZES[op]]
"""What to compile, which takes its time: every op on every kind of number, with integers of each size under one."""


def expected(op: ReduceOp, buffers: list[np.ndarray], accumulate: str) -> list[Any]:
    dtype = buffers[0].dtype
    columns = zip(*(np.ravel(buffer).tolist() for buffer in buffers), strict=True)
    if dtype in COMPLEX:
        name = f"float{4 * dtype.itemsize}"
        return [oracle.reduce_complex(op, column, name, accumulate) for column in columns]
    if dtype in FLOATS:
        return [oracle.reduce_floats(op, list(map(float, c)), dtype.name, accumulate) for c in columns]
    return [oracle.reduce_integers(op, column, dtype) for column in columns]


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
    assert_same_bits(reduce_alike(op, passed, accumulate), result)
    small = reduction(op, passed[0].dtype, passed[0].shape, len(passed), accumulate)
    nest = nest_reduction(op, [passed[0].dtype] * 2, [passed[0].shape] * 2, len(passed))
    if nest is not None and accumulate == "native":
        for leaf in nest([[buffer, buffer] for buffer in passed]):
            assert_same_bits(leaf, result)
    assert_same_bits(small(passed), result)
    assert_same_bits(in_pieces(op, passed, 4, accumulate=accumulate), result)
    assert [buffer.tobytes() for buffer in passed] == before
    if dtype in COMPLEX and op is ReduceOp.PRODUCT:  # whose operations NumPy may fuse
        wanted = buffers[0].astype(dtype if accumulate == "native" else np.complex128)
        with np.errstate(all="ignore"):
            for buffer in buffers[1:]:
                wanted = wanted * buffer.astype(wanted.dtype)
            wanted = wanted.astype(dtype)
    else:
        wanted = np.array(expected(op, buffers, accumulate), result.dtype).reshape(shape)
    if op in ORDERED:  # which of 0.0 and -0.0 is greater is left open
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
    [(op, dtype) for op, dtype in COMPILED if op is ReduceOp.SUM or (op, dtype.kind) == (ReduceOp.PRODUCT, "c")],
    ids=arrays.name,
)
@pytest.mark.parametrize("nbytes", [1, 320, 300_000])
def test_out_overlaps_an_input(op: ReduceOp, dtype: np.dtype, nbytes: int) -> None:
    size = -(-nbytes // dtype.itemsize)
    for place, count in [(p, n) for n in (1, 2, 3) for p in range(n)]:
        apart = arrays.buffers(11, count, (size,), dtype)
        wanted = reduce(op, apart)
        for shift, parts in itertools.product((0, 1, -1), (0, 4)):
            memory = np.zeros(size + 2, dtype)
            buffers = list(apart)
            memory[1:-1] = buffers[place]
            buffers[place] = memory[1:-1]
            out = memory[1 + shift : size + 1 + shift]
            assert (in_pieces(op, buffers, parts, out=out) if parts else reduce(op, buffers, out=out)) is out
            assert_same_bits(out, wanted)


def test_out_may_be_an_input_of_a_wider_dtype() -> None:
    memory = np.arange(4.0)
    integers = memory.view(np.int64)
    integers[...] = [1, 2, 3, 4]
    result = reduce(ReduceOp.MEAN, [integers, integers.copy(), integers.copy()], out=memory)
    assert result is memory
    assert result.tolist() == [1, 2, 3, 4]


def test_what_a_reduction_costs() -> None:
    assert cost(ReduceOp.SUM, np.dtype(np.float32), 1000, 3) == 16_000
    assert cost(ReduceOp.MEAN, np.dtype(np.int8), 1000, 3) == 11_000 * policy.SLOWNESS_OF_WIDE_FOLDS
    assert [policy.blocks(moved * MIB) for moved in (60, 70)] == [False, True]
    for moved, workers, parts in ((3, 8, 1), (16, 8, 4), (1024, 8, 8), (1024, 0, 1)):
        assert policy.parts(moved * MIB, workers) == parts


@pytest.mark.parametrize(("op", "dtype"), DEFINED, ids=arrays.name)
def test_number_alone_has_the_bits_that_it_has_among_others(op: ReduceOp, dtype: np.dtype) -> None:
    for count, accumulate in itertools.product((1, 3, 6, 7, 12, 13, 64), ACCUMULATE):
        buffers = arrays.buffers(5, count, (6,), dtype)
        wanted = reduce(op, buffers, accumulate=accumulate)
        rows = [[buffer[place] for buffer in buffers] for place in range(6)]
        alone = [reduce_scalars(op, row, accumulate) for row in rows]
        assert {type(number) for number in alone} == {wanted.dtype.type}
        assert_same_bits(np.array(alone), wanted)
        reduced = [reduce(op, [np.asarray(number) for number in row], accumulate=accumulate) for row in rows]
        assert {(type(array), array.shape, array.dtype) for array in reduced} == {(np.ndarray, (), wanted.dtype)}
        assert_same_bits(np.array(reduced), wanted)


def test_infinities_and_nan_give_no_warning() -> None:
    inputs = [np.array([np.inf, 3e38, np.nan], np.float32), np.array([-np.inf, 3e38, 1], np.float32)]
    assert str(reduce(ReduceOp.SUM, inputs).tolist()) == "[nan, inf, nan]"
    assert reduce(ReduceOp.SUM, [np.array(3e38, np.float32)] * 2) == np.inf
    assert reduce(ReduceOp.MEAN, [np.array(65504, np.float16)] * 3) == 65504


class Subclass(np.ndarray):
    """An array whose operators mean something else."""

    def __mul__(self, other: Any) -> Any:
        return self + other


@pytest.mark.parametrize("op", list(ReduceOp), ids=arrays.name)
@pytest.mark.parametrize("kind", [Subclass, np.matrix, np.memmap])
def test_subclasses_of_arrays_are_reduced_as_arrays(op: ReduceOp, kind: Any) -> None:
    for count in (1, 2, 3):
        buffers = [np.arange(6.0).reshape(2, 3) + i for i in range(count)]
        for passed in ([buffer.view(kind) for buffer in buffers], [*buffers[:-1], buffers[-1].view(kind)]):
            result = reduce(op, passed)
            assert type(result) is np.ndarray
            assert_same_bits(result, reduce(op, buffers))


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
