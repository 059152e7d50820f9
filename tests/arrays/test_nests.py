"""Nests: structures, their leaves' paths, and where two of them differ."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest

from aiodist._arrays import nests


class Pair(NamedTuple):
    left: int
    right: int


class OtherPair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(
    "nest",
    [
        1,
        [1, (2, {"a": 3})],
        {"b": 1, "a": {"c": [2]}},
        OrderedDict(z=1, a=2),
        defaultdict(int, a=1),
        deque([1, 2], maxlen=3),
        (),
        {"x": ()},
    ],
)
def test_unflatten_undoes_flatten(nest: Any) -> None:
    for flatten in (nests.flatten, nests.flatten_with_none):
        leaves, structure = flatten(nest)
        again = nests.unflatten(structure, leaves)
        assert again == nest
        assert type(again) is type(nest)


def test_none_is_empty_or_a_leaf() -> None:
    assert nests.flatten({"a": None, "b": 1})[0] == [1]
    assert nests.flatten_with_none({"a": None, "b": 1})[0] == [None, 1]


def test_map_leaves_sees_none() -> None:
    assert nests.map_leaves(lambda leaf: [leaf], {"a": None, "b": (1,)}) == {"a": [None], "b": ([1],)}


def test_paths_are_code() -> None:
    leaves, structure = nests.flatten({"w": [1, (2,)], 3: 4})
    paths = nests.leaf_paths(structure, "grads")
    grads = {"w": [1, (2,)], 3: 4}
    assert [eval(path, {"grads": grads}) for path in paths] == leaves


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ({"w": 1}, {"w": 1, "b": 2}, "value['b'] stands on there only"),
        ([1, 2], [1], "value[1] stands on here only"),
        ([1], (1,), "value is [*] on here and (*,) on there"),
        ({"w": {"x": 1}, "b": 1}, {"w": {"y": 1}, "b": 1}, "value['w']['x'] stands on here only"),
        ({"w": 1, "b": (1,)}, {"w": 1, "b": 1}, "value['b'] is (*,) on here and * on there"),
        ({"w": [1, None]}, {"w": [1, 1]}, "value['w'][1] is None on here and * on there"),
        (Pair(1, 2), OtherPair(1, 2), "value is Pair(left=*, right=*) on here and OtherPair(left=*, right=*) on there"),
    ],
)
def test_difference(a: Any, b: Any, text: str) -> None:
    assert nests.difference(nests.flatten(a)[1], nests.flatten(b)[1], "value", "here", "there").startswith(text)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({f"layer {i}": [i] * 100 for i in range(1000)}, {f"layer {i}": (i,) * 100 for i in range(1000)}),
        ({"x" * 10_000: 1}, {"y" * 10_000: 1}),
        (list(range(10_000)), []),
    ],
)
def test_difference_of_large_nests_is_told_in_few_words(a: Any, b: Any) -> None:
    assert len(nests.difference(nests.flatten(a)[1], nests.flatten(b)[1], "value", "here", "there")) < 1000
