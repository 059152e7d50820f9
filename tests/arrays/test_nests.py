"""Nests: structures, the paths of their leaves, and differences."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
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
        (Fields(a=1), {"a": 1}, "value is CustomTreeNode(Fields[dict], [{'a': *}]) on here and {'a': *} on there"),
    ],
)
def test_difference(a: Any, b: Any, text: str) -> None:
    assert nests.difference(nests.flatten(a)[1], nests.flatten(b)[1], "value", "here", "there").startswith(text)


# Subclasses of dict that are not registered.


def same(nest: Any) -> Any:
    """Flatten and rebuild a nest."""
    leaves, structure = nests.flatten_with_none(nest)
    return structure.unflatten(leaves)


class Counts(defaultdict[str, Any]):
    """A subclass of defaultdict."""


@pytest.mark.parametrize("nest", [Fields(z=1, a=[2]), Ordered(z=1, a=[2]), Counts(int, z=1, a=2), Fields()], ids=repr)
def test_subclass_of_dict_is_rebuilt(nest: Any) -> None:
    again = same({"deep": nest})["deep"]
    assert type(again) is type(nest)
    assert again == nest
    assert list(again) == list(nest)
    assert getattr(again, "default_factory", None) is getattr(nest, "default_factory", None)


def test_structures_compare_types_and_not_the_order_of_keys() -> None:
    structures = [
        nests.flatten_with_none(n)[1] for n in (Fields(a=1, b=2), Fields(b=1, a=2), {"a": 1, "b": 2}, Fields(a=1))
    ]
    assert structures[0] == structures[1]
    assert hash(structures[0]) == hash(structures[1])
    assert structures[0] not in structures[2:]


def test_subclass_of_dict_that_takes_no_mapping_is_explained() -> None:
    class Fixed(dict[str, int]):
        def __init__(self) -> None:
            super().__init__(a=1)

    leaves, structure = nests.flatten(Fixed())
    with pytest.raises(TypeError, match="positional argument") as caught:
        structure.unflatten(leaves)
    assert "calling the class with a mapping; if that is not possible, register" in caught.value.__notes__[0]


def test_values_come_from_the_subclass() -> None:
    class Halves(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return super().__getitem__(key) / 2

    leaves, structure = nests.flatten_with_none(Halves(b=4, a=2))
    assert leaves == [1, 2]
    again: Any = structure.unflatten(leaves)
    assert list(again.items()) == [("b", 2), ("a", 1)]


# Templates match exactly the nests that are like their own.

X, Y, Z = np.zeros(3, np.float32), np.ones((2, 2)), np.full((), 5, np.int8)

NESTS: list[Any] = [
    [X],
    (X, Y),
    {"b": X, "a": Y},
    {"a": X, "b": [Y, (Z,)]},
    [{}, X, None, ()],
    {f"layer {index}": {"w": X, "b": [Y] * index} for index in range(12)},
]


@pytest.mark.parametrize("nest", NESTS, ids=repr)
def test_template_agrees_with_optree(nest: Any) -> None:
    template = nests.template(nest)
    assert template is not None
    leaves, structure = nests.flatten(nest)
    found = template.match(nest)
    assert found is not None
    assert [id(leaf) for leaf in found] == [id(leaf) for leaf in leaves]
    built = template.build(range(len(leaves)))
    assert repr(built) == repr(structure.unflatten(range(len(leaves))))
    assert template.match(structure.unflatten([leaf.copy() for leaf in leaves])) is not None


@pytest.mark.parametrize(
    ("nest", "other"),
    [
        ([X], (X,)),
        ([X], [X, X]),
        ([X], [X.astype(np.float64)]),
        ([X], [X[:2]]),
        ([X], [X.astype(">f4")]),
        ([X], [[X]]),
        ([X], [1.0]),
        ([X, None], [X, X]),
        ([X, None], [X, ()]),
        ({"a": X, "b": Y}, {"b": Y, "a": X}),
        ({"a": X}, {"b": X}),
        ({"a": X}, OrderedDict(a=X)),
        ([X], [np.ma.array(X)]),
    ],
    ids=repr,
)
def test_template_does_not_match_other_nests(nest: Any, other: Any) -> None:
    template = nests.template(nest)
    assert template is not None
    assert template.match(other) is None


def test_template_matches_equal_keys() -> None:
    template = nests.template({f"{X.ndim} layer": X})
    assert template is not None
    assert template.match({f"{X.ndim} layer": Y[0]}) is None
    assert template.match({f"{X.ndim} layer": X}) == [X]


@pytest.mark.parametrize("nest", [{}, [[]], {1: X}, OrderedDict(a=X), [OrderedDict(a=X)], [X] * 1000], ids=type)
def test_nests_without_a_template(nest: Any) -> None:
    assert nests.template(nest) is None
