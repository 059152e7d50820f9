"""Nests: structures, their leaves' paths, and where two of them differ."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest

from aiodist.vocabulary import nests


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
        ({"w": 1}, {"w": 1, "b": 2}, "value['b'] stands on one side only"),
        ([1, 2], [1], "value[1] stands on one side only"),
        ([1], (1,), "value is [*] on one side and (*,) on the other"),
    ],
)
def test_difference(a: Any, b: Any, text: str) -> None:
    assert nests.difference(nests.flatten(a)[1], nests.flatten(b)[1], "value").startswith(text)
