"""Distributed values: the uses that they refuse, and how nests are split and regrouped."""

from __future__ import annotations

import copy
import enum
import operator
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import DistributedValues, Mirrored, PerReplica
from aiodist._arrays import nests
from aiodist._arrays.values import regroup, regroup_arguments, regroup_data, split
from tests.collectives.kinds_of_values import ANYTHING, DTYPES, leaves_of, makers

KINDS = pytest.mark.parametrize("kind", [PerReplica, Mirrored])
HELP = r"a \w+ of 2 components is not one array; pass it to strategy\.run.*strategy\.reduce.*value\.values"


@KINDS
def test_components_survive_copies_and_pickles(kind: Any) -> None:
    value = kind([1, "b"])
    assert value.values == (1, "b")
    assert isinstance(value, DistributedValues)
    assert repr(value) == f"{kind.__name__}:{{\n  0: 1\n  1: 'b'\n}}"
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert (type(other), other.values) == (kind, value.values)
        assert {other: 1}.get(value) is None, "equality is identity"
    with pytest.raises(ValueError, match="needs one component for each replica, got none"):
        kind([])


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ([np.ones(2)] * 4, ["0-3: array([1., 1.])"]),
        ([np.array([np.nan])] * 2 + [np.zeros(1)], ["0-1: array([nan])", "2: array([0.])"]),
        ([np.zeros(3000), np.eye(1, 3000, 1500)[0]], ["0: ", "1: "]),
        ([[np.zeros(3000)], [np.eye(1, 3000, 1500)[0]]], ["0: ", "1: "]),
        ([1, True, True, 1.0], ["0: 1", "1-2: True", "3: 1.0"]),
        (["<b>"] * 2, ["0-1: '<b>'"]),
        (range(40), [*(f"{k}: {k}" for k in range(20)), "…: 20 more"]),
    ],
)
def test_equal_neighbours_are_shown_once(values: Any, lines: list[str]) -> None:
    shown = repr(PerReplica(values)).splitlines()[1:-1]
    assert len(shown) == len(lines)
    assert all(line.strip().startswith(start) for line, start in zip(shown, lines, strict=True))
    html = PerReplica(values)._repr_html_()
    assert html.count("<tr>") == len(lines) + 1
    assert "<b>" not in html


def test_format_applies_to_components() -> None:
    values = [np.float32(1.25), 2.0, np.array(0.5), np.array([1.0, 3.0])]
    assert f"{PerReplica(values):.3f}" == "PerReplica(1.250, 2.000, 0.500, [1.000, 3.000])"
    assert f"{Mirrored([1])}" == repr(Mirrored([1]))
    assert f"{PerReplica(range(22)):02d}".endswith("19, … 2 more)")


def test_common_shape_and_dtype() -> None:
    value = PerReplica([np.zeros((2, 3)), np.ones((2, 3))])
    assert (value.shape, value.dtype) == ((2, 3), np.float64)
    for other in ([np.zeros(2), np.zeros(3, int)], [np.zeros(2), 3.0]):
        for name in ("shape", "dtype"):
            with pytest.raises(AttributeError, match=f"no common {name}; look at value.values"):
                getattr(PerReplica(other), name)


BINARY = [getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "mod", "pow", "matmul", "and_")]
USES: list[Any] = [
    *(iter, len, bool, float, int, np.asarray, operator.neg, sum, range, np.sum),
    lambda v: v[0],
    lambda v: np.array(v, np.float32),
    lambda v: 1 in v,
    lambda v: v < 1,
    lambda v: operator.ge(v, v),
    lambda v: exec("v += 1", {"v": v}),
    lambda v: v == np.ones(2),
    *(lambda v, f=f: f(v, 2) for f in BINARY),
    *(lambda v, f=f: f(np.ones(2), v) for f in [*BINARY, operator.eq]),
]


@KINDS
def test_use_as_one_array_is_refused(kind: Any) -> None:
    for use in USES:
        with pytest.raises(TypeError, match=HELP):
            use(kind([np.ones(2), np.ones(2)]))
    with pytest.raises(TypeError, match="of 1 component is not one array"):
        np.asarray(kind([1]))


# regroup


OBJECTS = [None, object(), ..., int]


@pytest.mark.parametrize("together", [regroup, lambda values: regroup_arguments(values, range(3))])
def test_identical_objects_come_back_bare(together: Any) -> None:
    for leaf in OBJECTS:
        assert together([leaf, leaf, leaf]) is leaf
    assert together([None, 3, None]).values == (None, 3, None)
    on_a_gpu = SimpleNamespace(__cuda_array_interface__={})  # as Numba's arrays are, which have no DLPack
    assert together([on_a_gpu] * 3).values == (on_a_gpu,) * 3


class Mode(enum.StrEnum):
    TRAIN = "train"


def test_bare_strings_in_arguments_and_bare_none_in_data() -> None:
    each = [["SGD", b"x", Mode.TRAIN, letter, 7, np.str_("a")] for letter in "ab"]
    together = regroup_arguments(each, range(2))
    assert together[:3] == ["SGD", b"x", Mode.TRAIN]
    assert [one.values for one in together[3:]] == [("a", "b"), (7, 7), ("a", "a")]
    assert regroup_data([[None, int, "x"]] * 2, "values")[0] is None
    assert [one.values for one in regroup_data([[None, int, "x"]] * 2, "values")[1:]] == [(int, int), ("x", "x")]


@given(makers(False, DTYPES, [*ANYTHING, lambda _: "text", lambda r: b"x" * r]), st.integers(1, 4))
def test_split_undoes_regroup(make: Any, count: int) -> None:
    values = [make(replica_id) for replica_id in range(count)]
    for got, wanted in zip(split(regroup(values), count), values, strict=True):
        for mine, theirs in zip(leaves_of(got), leaves_of(wanted), strict=True):
            assert mine is theirs
        assert nests.flatten(got)[1] == nests.flatten(wanted)[1]
