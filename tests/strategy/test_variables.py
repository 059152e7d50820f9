"""Variables outside of replicas: what they are, read as, and are assigned under a scope and in a merge function."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiodist import (
    Mirrored,
    PerReplica,
    ReplicaContextError,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_strategy,
)
from tests.runtime.programs import mirrored, replica, still_works

pytestmark = pytest.mark.anyio

AGGREGATED: dict[str, Callable[..., Any]] = {
    "sum": lambda values: np.sum(values, 0),
    "mean": lambda values: np.mean(values, 0),
    "only_first_replica": lambda values: values[0],
}
CHANGES: dict[str, Callable[..., Any]] = {
    "assign": lambda _, x: x,
    "assign_add": lambda old, x: old + x,
    "assign_sub": lambda old, x: old - x,
}


def under(strategy: Any, *args: Any, **settings: Any) -> Variable:
    """Return a variable of that strategy."""
    with strategy.scope():
        return Variable(*args, **settings)


def variable(count: int, *args: Any, **settings: Any) -> Variable:
    """Return a variable of a strategy of so many replicas."""
    return under(mirrored(count), *args, **settings)


# What it is.


def test_variable_has_a_component_for_each_replica_of_its_strategy() -> None:
    v = variable(3, np.float32(2), name="w")
    assert [c.tolist() for c in v.values] == [2, 2, 2]
    assert (v.name, v.shape, v.trainable, v.dtype) == ("w", (), True, np.float32)
    assert (v.synchronization, v.aggregation) == (VariableSynchronization.ON_WRITE, VariableAggregation.NONE)
    plain = Variable([1, 2])
    assert len(plain.values) == 1
    assert plain.assign([3, 4]) is plain
    assert plain.numpy().tolist() == plain.value().tolist() == [3, 4]
    assert repr(plain) == "<Variable 'Variable': int64[2], mirrored, aggregation NONE>"


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_components_are_read_only_and_never_change(synchronization: str) -> None:
    initial, given = np.zeros(4), np.ones(4)
    v = variable(2, initial, synchronization=synchronization)
    before = v.values
    v.assign(given)
    assert not any(np.shares_memory(a, b) for a in (*before, *v.values) for b in (initial, given))
    assert not any(np.shares_memory(a, b) for a in before for b in v.values)
    assert not any(component.flags.writeable for component in v.values)
    for component in v.values:
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            component.flags.writeable = True
    initial[:] = given[:] = 9
    assert [c.tolist() for c in (*before, *v.values)] == [[0] * 4] * 2 + [[1] * 4] * 2


def test_settings_are_accepted_by_name_in_any_case() -> None:
    v = variable(2, 0.0, synchronization="ON_Read", aggregation="Mean")
    assert (v.synchronization, v.aggregation) == (VariableSynchronization.ON_READ, VariableAggregation.MEAN)
    assert not v.trainable
    assert variable(2, 0.0, trainable=True, synchronization="on_read").trainable
    assert variable(2, 0.0, synchronization=VariableSynchronization.AUTO).synchronization == "on_write"
    assert variable(2, lambda: [1.5]).numpy().tolist() == [1.5]
    assert (variable(1, 1).dtype, variable(1, 1, dtype="float32").dtype) == (np.int64, np.float32)
    assert variable(1, np.zeros(2, ">f4")).dtype.isnative


def test_variable_is_collected_with_its_owner() -> None:
    strategy = mirrored(2)
    created = asyncio.run(strategy.run(lambda: Variable(0.0)))
    gone = [weakref.ref(variable(2, 0.0)), weakref.ref(created)]
    del created
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# As an array.


def test_arithmetic_is_that_of_the_value() -> None:
    v = variable(2, np.array([1.0, 2.0], np.float32))
    w = variable(2, np.array([3.0, 4.0], np.float32))
    for result, expected in [
        (v + 1, [2, 3]),
        (1 - v, [0, -1]),
        (v * w, [3, 8]),
        (np.array([2, 2], np.float32) / v, [2, 1]),
        (-(v**2), [-1, -4]),
        (abs(v - 3), [2, 1]),
        (np.exp(v - v), [1, 1]),
    ]:
        assert isinstance(result, np.ndarray)
        assert (result.dtype, result.tolist()) == (np.float32, expected)
    assert (v @ w, np.mean(v), v[1], len(v), list(v)) == (11, 1.5, 2, 2, [1, 2])
    assert (v == [1, 5]).tolist() == [True, False]
    assert np.asarray(v, np.float64).dtype == np.float64
    assert np.array(v).flags.writeable
    n = variable(2, 3)
    assert (int(n), float(n), complex(n), bool(n), [0, 1, 2, 3][n]) == (3, 3.0, 3 + 0j, True, 3)
    assert complex(variable(2, 1 + 2j)) == 1 + 2j
    assert {n: "as a key it is itself"}[n]


def test_change_in_place_is_refused_and_says_what_to_do() -> None:
    v = variable(2, np.zeros(2))
    with pytest.raises(TypeError, match="assign_add"):
        v += 1
    with pytest.raises(TypeError, match="assign"):
        v[0] = 1
    with pytest.raises(TypeError, match="assign"):
        np.add(1, 2, out=v)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


# Assigned from outside.


def modelled(components: list[Any], mirror: bool, aggregation: str, method: str, where: str, values: list[Any]) -> Any:
    """Return what an assignment makes of components, in plain NumPy."""
    size, combine = len(components), AGGREGATED.get(aggregation, AGGREGATED["only_first_replica"])
    if where in ("plain", "mirrored"):
        if aggregation == "sum" and not mirror:
            values = [values[0] / size] * size
        values = values[:1] * size
    elif mirror:
        if aggregation == "none" and any((value != values[0]).any() for value in values):
            raise ValueError
        values = [combine(values)] * size
    if aggregation == "sum" and not mirror and where != "replicas" and method != "assign":
        raise ValueError
    return [CHANGES[method](old, new) for old, new in zip(components, values, strict=True)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(sorted(CHANGES)),
        st.sampled_from(["replicas", "per replica", "plain", "mirrored"]),
        st.lists(st.integers(-2, 2), min_size=3, max_size=3),
    ),
    max_size=3,
)
DTYPES = [np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.complex64]


@given(st.integers(1, 3), st.booleans(), st.sampled_from(["none", *AGGREGATED]), st.sampled_from(DTYPES), STEPS)
def test_components_are_those_of_a_model(count: int, mirror: bool, aggregation: str, dtype: Any, steps: Any) -> None:
    assume(aggregation != "mean" or dtype is not np.int8)
    settings = {"synchronization": "on_write" if mirror else "on_read", "aggregation": aggregation}
    strategy, wanted = mirrored(count), [np.ones(2)] * count
    v = under(strategy, np.ones(2, dtype), **settings)
    for method, where, numbers in steps:
        given = [np.array([6.0 * number, 6.0]) for number in numbers[:count]]  # 2 and 3 divide them
        values = [value.astype(dtype) for value in given]
        value = {"plain": values[0], "mirrored": Mirrored(values[:1] * count)}.get(where, PerReplica(values))
        outcome: Any = nullcontext()
        try:
            wanted = modelled(wanted, mirror, aggregation, method, where, given)
        except ValueError:
            outcome = pytest.raises(ValueError, match="aggregation")
        with outcome:
            if where == "replicas":
                asyncio.run(strategy.run(getattr(v, method), (value,), {"name": "step"}))
            else:
                assert getattr(v, method)(value) is v
        for found, component in zip(v.values, wanted, strict=True):
            np.testing.assert_array_equal(found, component.astype(dtype), strict=True)
    if not mirror and count > 1 and aggregation != "none":
        np.testing.assert_array_equal(v.read_value(), AGGREGATED[aggregation](wanted).astype(dtype), strict=True)


def test_sum_of_integers_reads_as_it_was_assigned() -> None:
    v = variable(3, 0, synchronization="on_read", aggregation="sum")
    for value in (7, -7, 0, 2):
        assert v.assign(value).read_value() == value
    assert [int(c) for c in v.values] == [1, 1, 0]
    small = variable(300, np.int8(0), synchronization="on_read", aggregation="sum")
    assert small.assign(-100).read_value() == -100


def test_variable_without_aggregation() -> None:
    assert np.isnan(variable(2, 0.0).assign(PerReplica([np.nan, np.nan])))
    assert Variable(1.0, synchronization="on_read").read_value() == 1
    assert Variable(1.0, synchronization="on_read", aggregation="sum").assign_add(2.0).read_value() == 3


async def test_another_strategys_variable_is_refused() -> None:
    v, plain, other = variable(2, 1.0, name="w"), Variable(1.0), mirrored(2)
    with other.scope():
        assert plain.assign(1.0) is plain
        with pytest.raises(ReplicaContextError, match=r"'w' was created under another .* cannot be assigned to under"):
            v.assign(1.0)
        with pytest.raises(ReplicaContextError, match="cannot be read under"):
            v.numpy()
    for strategy, use, text in [
        (other, lambda: plain.assign(2.0), "under the default strategy and cannot be assigned to in a replica"),
        (other, v.read_value, "cannot be read in a replica"),
        (other, lambda: v.assign(2.0), "cannot be assigned to in a replica"),
        (get_strategy(), lambda: v.assign(2.0), "cannot be assigned to in a replica of <_DefaultStrategy"),
    ]:
        with pytest.raises(ReplicaContextError, match=text):
            await strategy.run(use)
    assert (await other.run(plain.read_value)).values == (1, 1)
    await still_works(other)


async def test_step_with_assignments_is_called_directly() -> None:
    v = Variable(1.0)

    async def step() -> Any:
        return await v.assign_add(2.0)

    assert await step() is v
    assert v.numpy() == 3


# With the strategy's own functions.


async def test_strategy_takes_variables() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v, m = Variable([1.0], synchronization="on_read", aggregation="sum"), Variable([5.0])
    v.assign(PerReplica([[1.0], [2.0]]))
    assert [c.tolist() for c in strategy.experimental_local_results(v)] == [[1], [2]]
    assert (await strategy.reduce("mean", v, None)).tolist() == [1.5]
    assert (await strategy.reduce("max", {"m": m}, None))["m"].tolist() == [5]
    assert (await strategy.reduce("sum", m, 0)).tolist() == 10
    assert (await strategy.gather(v, 0)).tolist() == [1, 2]
    w = variable(3, 0.0, aggregation="sum")
    assert w.assign(await mirrored(3).extended.reduce_to("sum", PerReplica([1.0, 2.0, 3.0]), w)).read_value() == 6

    def program(nest: Any) -> Any:
        assert nest["v"] is v
        return nest

    assert (await strategy.run(program, args=({"v": v},)))["v"] is v


@pytest.mark.parametrize("settings", [{"aggregation": "mean"}, {"synchronization": "on_read", "aggregation": "sum"}])
async def test_copy_is_another_variable_of_the_same_strategy(settings: dict[str, str]) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = Variable([1.0, 2.0], name="w", **settings)  # type: ignore[arg-type]
    before, other = v.numpy(), copy.deepcopy({"w": [v]})["w"][0]
    assert strategy.extended.variable_created_in_scope(other)
    assert (other.name, other.aggregation, other.synchronization) == ("w", v.aggregation, v.synchronization)

    async def program() -> None:
        await other.assign_add([float(replica()), 0.0])

    await strategy.run(program)
    assert other.numpy().tolist() != before.tolist() == v.numpy().tolist()
    with pytest.raises(ReplicaContextError, match=r"'w' was copied in a replica.*Variable\(variable\.read_value\(\)\)"):
        await strategy.run(copy.copy, (v,))
    with pytest.raises(TypeError, match=r"'w' cannot be pickled.*variable\.numpy\(\)"):
        pickle.dumps(v)
