"""Templates take apart exactly the nests that are like the one that they were made for."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from aiodist._arrays import nests

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
def test_a_template_agrees_with_optree(nest: Any) -> None:
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
def test_what_differs_is_not_matched(nest: Any, other: Any) -> None:
    template = nests.template(nest)
    assert template is not None
    assert template.match(other) is None


def test_equal_keys_that_are_other_objects_are_matched() -> None:
    template = nests.template({f"{X.ndim} layer": X})
    assert template is not None
    assert template.match({f"{X.ndim} layer": Y[0]}) is None
    assert template.match({f"{X.ndim} layer": X}) == [X]


@pytest.mark.parametrize("nest", [{}, [[]], {1: X}, OrderedDict(a=X), [OrderedDict(a=X)], [X] * 1000], ids=type)
def test_other_nests_have_no_template(nest: Any) -> None:
    assert nests.template(nest) is None
