# SPDX-License-Identifier: Apache-2.0
"""Reductions cut into pieces for worker threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist_kernels import KernelSpec, ReduceOp, bytes_moved, cut, policy, reduce, warm
from aiodist_kernels.pool import MIB
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, COMPLEX, assert_same_bits

DTYPES = [np.dtype(np.float32), BFLOAT16, np.dtype(np.int16), COMPLEX[0]]
WARM = [KernelSpec(ReduceOp.SUM, dtype, count) for dtype in DTYPES for count in (3, 17)]


@given(
    dtype=st.sampled_from(DTYPES),
    count=st.sampled_from([1, 2, 3, 17]),
    size=st.sampled_from([0, 1, 4095, 4096, 4097, 50_000]),
    parts=st.integers(1, 9),
    order=st.randoms(use_true_random=False),
)
def test_pieces_in_any_order_give_the_same_bits(
    dtype: np.dtype, count: int, size: int, parts: int, order: random.Random
) -> None:
    warm(WARM)
    buffers = arrays.buffers(size + count, count, (size,), dtype)
    pieces = cut(ReduceOp.SUM, buffers, parts=parts)
    assert len(pieces.calls) <= parts
    for call in order.sample(pieces.calls, len(pieces.calls)):
        call()
    assert_same_bits(pieces.result, reduce(ReduceOp.SUM, buffers))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", arrays.LAYOUTS)
def test_pieces_of_any_layout(dtype: np.dtype, layout: str) -> None:
    buffers = arrays.buffers(9, 3, (50, 400), dtype)
    laid_out = [arrays.laid_out(buffer, layout, index) for index, buffer in enumerate(buffers)]
    pieces = cut(ReduceOp.PRODUCT, laid_out, parts=4)
    for call in pieces.calls:
        call()
    assert_same_bits(pieces.result, reduce(ReduceOp.PRODUCT, buffers))


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_pieces_into_an_input(shift: int) -> None:
    buffers = arrays.buffers(9, 3, (50_000,), DTYPES[0])
    wanted = reduce(ReduceOp.SUM, buffers)
    memory = np.zeros(50_002, DTYPES[0])
    memory[1:-1] = buffers[2]
    out = memory[1 + shift : 50_001 + shift]
    pieces = cut(ReduceOp.SUM, [*buffers[:2], memory[1:-1]], out=out, parts=4)
    for call in pieces.calls:
        call()
    assert pieces.result is out
    assert_same_bits(out, wanted)


def test_pieces_in_threads() -> None:
    warm(WARM)
    buffers = arrays.buffers(1, 3, (2_000_000,), DTYPES[0])
    pieces = cut(ReduceOp.SUM, buffers, parts=8)
    assert len(pieces.calls) == 8
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda call: call(), pieces.calls))
    assert_same_bits(pieces.result, reduce(ReduceOp.SUM, buffers))


def test_cut_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="one shape"):
        cut(ReduceOp.SUM, [np.ones(3), np.ones(4)], parts=2)


def test_bytes_moved() -> None:
    assert bytes_moved(ReduceOp.SUM, np.dtype(np.float32), 1000, 3) == 16_000
    assert bytes_moved(ReduceOp.MEAN, np.dtype(np.int8), 1000, 3) == 11_000


def test_policy_for_threads() -> None:
    assert not policy.blocks(3 * MIB)
    assert policy.blocks(5 * MIB)
    assert policy.parts(15 * MIB, 8) == 1
    assert policy.parts(16 * MIB, 8) == 4
    assert policy.parts(1024 * MIB, 8) == 8
    assert policy.parts(1024 * MIB, 0) == 1
