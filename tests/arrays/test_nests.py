"""Nests: structures, their leaves' paths, and where two of them differ."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest

from aiodist._arrays import nests
from tests.collectives.kinds_of_values import Fields, Ordered, Pair


class OtherPair(NamedTuple):
    left: int
    right: int


def test_paths_are_code() -> None:
    for grads in ({"w": [1, (2,)], 3: 4}, Fields(a=[1, 2])):
        leaves, structure = nests.flatten_with_none(grads)
        paths = nests.leaf_paths(structure, "grads")
        assert [eval(path, {"grads": grads}) for path in paths] == leaves


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ({"w": 1}, {"w": 1, "b": 2}, "value['b'] is on there only"),
        ([1, 2], [1], "value[1] is on here only"),
        ([1], (1,), "value is [*] on here and (*,) on there"),
        ({"w": {"x": 1}, "b": 1}, {"w": {"y": 1}, "b": 1}, "value['w']['x'] is on here only"),
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
def test_difference_of_large_nests_is_described_in_few_words(a: Any, b: Any) -> None:
    assert len(nests.difference(nests.flatten(a)[1], nests.flatten(b)[1], "value", "here", "there")) < 1000


# Subclasses of dict, which nobody has registered.


def same(nest: Any) -> Any:
    """Take a nest apart, and put it together again."""
    leaves, structure = nests.flatten_with_none(nest)
    return structure.unflatten(leaves)


class Counts(defaultdict[str, Any]):
    """A subclass of another dict, which is made with a factory first."""


@pytest.mark.parametrize("nest", [Fields(z=1, a=[2]), Ordered(z=1, a=[2]), Counts(int, z=1, a=2), Fields()], ids=repr)
def test_nest_comes_back_as_what_it_was(nest: Any) -> None:
    again = same({"deep": nest})["deep"]
    assert type(again) is type(nest)
    assert again == nest
    assert list(again) == list(nest)
    assert getattr(again, "default_factory", None) is getattr(nest, "default_factory", None)


def test_order_of_keys_does_not_matter_and_type_does() -> None:
    structures = [
        nests.flatten_with_none(n)[1] for n in (Fields(a=1, b=2), Fields(b=1, a=2), {"a": 1, "b": 2}, Fields(a=1))
    ]
    assert structures[0] == structures[1]
    assert hash(structures[0]) == hash(structures[1])
    assert structures[0] not in structures[2:]
