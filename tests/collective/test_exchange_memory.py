"""What is gathered, copied and exchanged lies in memory of its own, large results in blocks that are used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiodist.collective.exchange import copied, exchanged, gathered
from aiodist_kernels import pool
from tests.kernels import arrays

DTYPES = [np.dtype(np.float32), np.dtype(np.int16), np.dtype(np.complex64), arrays.BFLOAT16]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the size of each block that is made; every result counts as large."""
    sizes: list[int] = []
    plain = pool._Block

    def make(nbytes: int, kind: int) -> Any:
        sizes.append(nbytes)
        return plain(nbytes, kind)

    monkeypatch.setattr(pool, "_Block", make)
    monkeypatch.setattr(pool, "POOLED_FROM", 1)
    monkeypatch.setattr(pool, "results", pool.Pool())
    return sizes


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 4),
    rows=st.integers(0, 3),
    axes=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dtype=st.sampled_from(DTYPES),
    layout=arrays.layouts,
    seed=arrays.seeds,
)
def test_values_are_those_of_numpy_in_every_layout(
    blocks: list[int],
    *,
    count: int,
    rows: int,
    axes: tuple[int, int],
    dtype: np.dtype,
    layout: str,
    seed: int,
) -> None:
    plain = arrays.buffers(seed, count, (rows * count, 2 * count, count), dtype)
    laid_out = [arrays.laid_out(array, layout, index) for index, array in enumerate(plain)]
    pieces = [np.split(array, count, axis=axes[0]) for array in plain]
    results = [copied(laid_out[0]), gathered(laid_out, axes[0]), *exchanged(laid_out, axes)]
    wanted = [
        plain[0],
        np.concatenate(plain, axis=axes[0]),
        *[np.concatenate(column, axis=axes[1]) for column in zip(*pieces, strict=True)],
    ]
    for result, expected in zip(results, wanted, strict=True):
        assert type(result) is np.ndarray
        assert not result.flags.writeable
        assert result.dtype == dtype
        assert not any(np.shares_memory(result, array) for array in laid_out)
        arrays.assert_same_bits(result, expected)


def test_a_thousand_steps_use_a_few_blocks(blocks: list[int]) -> None:
    values = arrays.buffers(1, 2, (6, 4), np.dtype(np.float32))
    kept: list[Any] = []
    for _ in range(1000):
        kept = [copied(values[0]), gathered(values, 0), exchanged(values, (0, 1)), *kept[:3]]
    assert 4 <= len(blocks) <= 16
    before = [array.tobytes() for array in kept[:2]]
    for _ in range(20):  # what is held is not given out again
        gathered(values[::-1], 0)
        copied(values[1])
    assert [array.tobytes() for array in kept[:2]] == before
