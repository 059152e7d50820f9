"""The rule by which a global batch is cut, against its own words."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import IndexedSlices, PerReplica
from aiodist._data.distributed import cut, group


class Pair(NamedTuple):
    x: Any
    y: Any


@given(st.integers(0, 40), st.integers(2, 12))
def test_parts_are_consecutive_and_full_until_the_rows_run_out(m: int, n: int) -> None:
    batch = {"x": [np.arange(2 * m).reshape(m, 2)], "y": Pair(np.arange(m), None)}
    parts, full = cut(batch, n, range(n)), math.ceil(m / n)
    assert parts["y"].y is None
    y = parts["y"].x.values
    assert [len(part) for part in y] == [max(0, min(full, m - k * full)) for k in range(n)]
    assert np.concatenate(y).tolist() == list(range(m))
    for rows, numbers in zip(parts["x"][0].values, y, strict=True):
        assert rows[:, 0].tolist() == (2 * numbers).tolist()
        assert rows.base is batch["x"][0].base, "parts are views"


class Rows:
    """As much of another library's array as a dataset needs: a shape, and slices along the first axis."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.shape = rows, (len(rows),)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.rows[rows])


def test_array_of_another_library_is_cut() -> None:
    assert [part.rows for part in cut([Rows(["a", "b", "c"])], 2, range(2))[0].values] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"x": np.zeros(4), "y": np.zeros(3)}, ValueError, r"batch\['x'\] has 4, batch\['y'\] has 3"),
        ((np.zeros(4), np.zeros(())), ValueError, r"batch\[1\] must have a first axis.*batched"),
        (np.float32(1), ValueError, "batch must have a first axis"),
        ([1, 2, 3], TypeError, r"batch\[0\] must be an array.* int; .*np\.asarray"),
        (PerReplica([np.zeros(2)] * 2), TypeError, r"batch must be an array.*PerReplica"),
        (None, ValueError, "batch must hold arrays.* there are none"),
        (IndexedSlices(np.zeros((1, 2)), [0]), TypeError, "batch must be an array.*IndexedSlices"),
    ],
)
def test_what_cannot_be_cut_is_named(n: int, batch: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cut(batch, n, range(n))


def test_group_needs_batches_that_are_alike_and_fills_up_arrays_alone() -> None:
    assert group(["a", "a"], 2).values == ("a", "a")
    with pytest.raises(TypeError, match=r"batch must be an array.* str"):
        group(["a"], 2)
    with pytest.raises(ValueError, match=r"batches must have the same structure: value\['x'\] is on replica 0"):
        group([{"x": np.arange(2)}, {"y": np.arange(2)}], 2)
