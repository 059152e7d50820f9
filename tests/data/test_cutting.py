"""The rule by which a global batch is cut, against its own words."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import IndexedSlices, PerReplica
from aiodist.data.cutting import cut, group
from tests.data.batches import lists

sizes = st.integers(0, 40)
counts = st.integers(2, 12)


class Pair(NamedTuple):
    x: Any
    y: Any


@given(sizes, counts)
def test_parts_are_consecutive_and_complete(m: int, n: int) -> None:
    batch = np.arange(m)
    parts = cut(batch, n).values
    assert len(parts) == n
    assert np.concatenate(parts).tolist() == batch.tolist()


@given(sizes, counts)
def test_parts_are_full_until_the_rows_run_out(m: int, n: int) -> None:
    full = math.ceil(m / n)
    assert [len(part) for part in cut(np.arange(m), n).values] == [max(0, min(full, m - k * full)) for k in range(n)]


@given(sizes, counts)
def test_arrays_of_a_nest_are_cut_alike(m: int, n: int) -> None:
    batch = {"x": [np.arange(2 * m).reshape(m, 2)], "y": Pair(np.arange(m), None)}
    parts = cut(batch, n)
    assert parts["y"].y is None
    for x, y in zip(parts["x"][0].values, parts["y"].x.values, strict=True):
        assert x.shape == (len(y), 2)
        assert x[:, 0].tolist() == (2 * y).tolist()


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (5, 2, [[0, 1, 2], [3, 4]]),
        (5, 4, [[0, 1], [2, 3], [4], []]),
        (2, 3, [[0], [1], []]),
        (0, 2, [[], []]),
    ],
)
def test_examples_of_the_rule(m: int, n: int, expected: list[list[int]]) -> None:
    assert lists(cut(np.arange(m), n)) == expected


def test_parts_are_views() -> None:
    batch = np.arange(6)
    assert all(part.base is batch for part in cut(batch, 2).values)


def test_one_replica_gets_the_batch_itself() -> None:
    batch = (np.arange(3), None)
    assert cut(batch, 1) is batch


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"x": np.zeros(4), "y": np.zeros(3)}, ValueError, r"batch\['x'\] has 4, batch\['y'\] has 3"),
        ((np.zeros(4), np.zeros(())), ValueError, r"batch\[1\] must have a first axis.*batched"),
        (np.float32(1), ValueError, "batch must have a first axis"),
        ([1, 2, 3], TypeError, r"batch\[0\] must be an array.* builtins\.int; .*np\.asarray"),
        ({"id": "a"}, TypeError, r"batch\['id'\] must be an array.* builtins\.str"),
        (PerReplica([np.zeros(2)] * 2), TypeError, r"batch must be an array.*PerReplica"),
        ((), ValueError, "batch must hold at least one array"),
        (None, ValueError, "batch must hold at least one array"),
        (IndexedSlices(np.zeros((1, 2)), [0]), TypeError, "batch must be an array.*IndexedSlices"),
    ],
)
def test_what_cannot_be_cut_is_named(n: int, batch: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cut(batch, n)


def test_group_gives_the_kth_batch_to_replica_k() -> None:
    assert lists(group([np.arange(2), np.arange(3)], 2)) == [[0, 1], [0, 1, 2]]


def test_group_fills_up_with_batches_without_rows() -> None:
    x, y = group([(np.ones((2, 3), np.float32), np.arange(2))], 3)
    assert [(part.shape, part.dtype) for part in x.values] == [((n, 3), np.float32) for n in (2, 0, 0)]
    assert lists(y) == [[0, 1], [], []]


def test_group_of_one_replica_is_bare() -> None:
    batch = np.arange(2)
    assert group([batch], 1) is batch


def test_group_of_other_structures_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"batches must have the same structure: value\['x'\] stands on replica 0 only"
    ):
        group([{"x": np.arange(2)}, {"y": np.arange(2)}], 2)


def test_batches_of_anything_fill_a_complete_step_only() -> None:
    assert group(["a", "a"], 2).values == ("a", "a")
    with pytest.raises(TypeError, match=r"batch must be an array.* builtins\.str"):
        group(["a"], 2)
