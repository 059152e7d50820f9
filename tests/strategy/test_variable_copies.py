"""Copies of variables: another variable with the same value; pickles: refused, with the way out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from aiodist import MirroredStrategy, ReplicaContextError, Variable
from tests.runtime.programs import mirrored, replica


def variable(strategy: MirroredStrategy, **settings: Any) -> Variable:
    with strategy.scope():
        return Variable([1.0, 2.0], name="w", **settings)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("settings", [{"aggregation": "mean"}, {"synchronization": "on_read", "aggregation": "sum"}])
def test_copy_is_another_variable_of_the_same_strategy(make: Any, settings: dict[str, str]) -> None:
    strategy = mirrored(2)
    v = variable(strategy, **settings)
    other = make(v)
    assert strategy.extended.variable_created_in_scope(other)
    assert (other.name, other.aggregation, other.synchronization) == ("w", v.aggregation, v.synchronization)
    other.assign([5.0, 5.0])
    assert v.numpy().tolist() == (np.array([1, 2]) * (2 if settings["aggregation"] == "sum" else 1)).tolist()
    assert other.numpy().tolist() == [5, 5]


def test_deep_copy_of_a_nest_copies_its_variables() -> None:
    strategy = mirrored(2)
    model = {"w": variable(strategy), "sizes": [1, 2]}
    other = copy.deepcopy(model)
    other["w"].assign_add([1.0, 1.0])  # type: ignore[attr-defined]
    assert model["w"].numpy().tolist() == [1, 2]  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_component_of_a_copy_is_its_own() -> None:
    strategy = mirrored(2)
    v = variable(strategy, synchronization="on_read", aggregation="sum")
    other = copy.deepcopy(v)

    async def program() -> None:
        await other.assign_add([float(replica()), 0.0])

    await strategy.run(program)
    assert [component.tolist() for component in v.values] == [[1, 2], [1, 2]]
    assert [component.tolist() for component in other.values] == [[1, 2], [2, 2]]


@pytest.mark.anyio
async def test_copy_in_a_replica_is_refused() -> None:
    strategy = mirrored(2)
    v = variable(strategy)
    with pytest.raises(ReplicaContextError, match=r"'w' was copied in a replica.*Variable\(variable\.read_value\(\)\)"):
        await strategy.run(copy.deepcopy, (v,))


def test_pickling_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'w' cannot be pickled.*variable\.numpy\(\)"):
        pickle.dumps(variable(mirrored(2)))
