"""Variables: created, read and assigned under a scope, outside and in a merge function."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import (
    Mirrored,
    PerReplica,
    ReplicaContextError,
    Variable,
    VariableAggregation,
    VariableSynchronization,
)
from tests.runtime.programs import here, mirrored, replica, still_works

pytestmark = pytest.mark.anyio

AGGREGATIONS = ["none", "sum", "mean", "only_first_replica"]


def variable(count: int, initial_value: Any, **settings: Any) -> Variable:
    """Return a variable of a strategy of so many replicas."""
    with mirrored(count).scope():
        return Variable(initial_value, **settings)


# What it is.


def test_variable_under_a_scope_has_a_component_for_each_replica() -> None:
    v = variable(3, np.float32(2), name="w")
    assert [c.tolist() for c in v.values] == [2, 2, 2]
    assert (v.name, v.shape, v.trainable) == ("w", (), True)
    assert v.dtype == np.float32
    assert v.synchronization is VariableSynchronization.ON_WRITE
    assert v.aggregation is VariableAggregation.NONE


def test_variable_outside_any_scope_has_one_component() -> None:
    v = Variable([1, 2])
    assert len(v.values) == 1
    assert v.assign([3, 4]) is v
    assert v.numpy().tolist() == [3, 4]
    assert v.name == "Variable"
    assert "int64[2], mirrored" in repr(v)


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_components_are_read_only_and_share_no_memory_with_what_was_given(synchronization: str) -> None:
    initial = np.zeros(4)
    v = variable(2, initial, synchronization=synchronization)
    before = v.values
    given = np.ones(4)
    v.assign(given)
    assert not any(np.shares_memory(a, b) for a in (*before, *v.values) for b in (initial, given))
    assert not any(np.shares_memory(a, b) for a in before for b in v.values)
    assert not any(component.flags.writeable for component in v.values)
    initial[:] = given[:] = 9
    assert v.values[0].tolist() == v.values[1].tolist() == [1, 1, 1, 1]


def test_value_that_was_read_stays_what_it_was() -> None:
    v = variable(2, 1.0)
    before = v.read_value()
    v.assign(2.0)
    assert before == 1.0
    assert v.value() == 2.0


def test_initial_value_may_be_a_function() -> None:
    assert variable(2, lambda: [1.5]).numpy().tolist() == [1.5]


def test_dtype_is_taken_from_the_value_or_given() -> None:
    assert variable(1, 1).dtype == np.int64
    assert variable(1, 1, dtype="float32").dtype == np.float32
    assert variable(1, np.zeros(2, ">f4")).dtype.isnative
    with pytest.raises(TypeError, match="fit int32, got float64"):
        variable(1, 1.5, dtype=np.int32)
    for bad in ("text", object(), None):
        with pytest.raises(TypeError):
            variable(1, bad)


def test_trainable_unless_it_is_sync_on_read() -> None:
    assert variable(2, 0.0).trainable
    assert not variable(2, 0.0, trainable=False).trainable
    assert not variable(2, 0.0, synchronization="on_read").trainable
    with pytest.raises(ValueError, match="not trainable"):
        variable(2, 0.0, synchronization="on_read", trainable=True)


def test_names_of_enums_are_accepted_in_any_case_and_others_refused() -> None:
    v = variable(2, 0.0, synchronization="ON_Read", aggregation="Mean")
    assert v.synchronization is VariableSynchronization.ON_READ
    assert v.aggregation is VariableAggregation.MEAN
    assert variable(2, 0.0, synchronization=VariableSynchronization.AUTO).synchronization == "on_write"
    for bad in ("median", 7, None):
        with pytest.raises(ValueError, match="VariableAggregation must be one of 'none', 'sum'"):
            variable(2, 0.0, aggregation=bad)
        with pytest.raises(ValueError, match="VariableSynchronization must be one of"):
            variable(2, 0.0, synchronization=bad)
    with pytest.raises(ValueError, match="synchronization NONE"):
        variable(2, 0.0, synchronization="none")


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_mean_of_integers_is_refused(synchronization: str) -> None:
    with pytest.raises(ValueError, match="MEAN needs a variable of floating-point"):
        variable(2, 0, synchronization=synchronization, aggregation="mean")


@pytest.mark.parametrize("name", ["", 3])
def test_name_is_a_text(name: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="name must"):
        Variable(0.0, name=name)


def test_variable_is_collected_with_its_owner() -> None:
    v = variable(2, 0.0)
    gone = weakref.ref(v)
    del v
    gc.collect()
    assert gone() is None


# As an array.


def test_arithmetic_is_that_of_the_value() -> None:
    v = variable(2, np.array([1.0, 2.0], np.float32))
    w = variable(2, np.array([3.0, 4.0], np.float32))
    for result, expected in [
        (v + 1, [2, 3]),
        (1 - v, [0, -1]),
        (v * w, [3, 8]),
        (np.array([2, 2], np.float32) / v, [2, 1]),
        (v**2, [1, 4]),
        (-v, [-1, -2]),
        (abs(v - 3), [2, 1]),
        (np.exp(v - v), [1, 1]),
    ]:
        assert isinstance(result, np.ndarray)
        assert result.dtype == np.float32
        assert result.tolist() == expected
    assert v @ w == 11
    assert (v == [1, 5]).tolist() == [True, False]
    assert np.mean(v) == 1.5
    assert v[1] == 2
    assert len(v) == 2
    assert list(v) == [1, 2]
    assert np.asarray(v, np.float64).dtype == np.float64
    assert np.array(v).flags.writeable


def test_scalar_variable_is_a_number() -> None:
    v = variable(2, 3)
    assert (int(v), float(v), complex(v), bool(v), [0, 1, 2, 3][v]) == (3, 3.0, 3 + 0j, True, 3)
    assert {v: "as a key it is itself"}[v]


def test_change_in_place_is_refused_and_says_what_to_do() -> None:
    v = variable(2, np.zeros(2))
    with pytest.raises(TypeError, match="assign_add"):
        v += 1
    with pytest.raises(TypeError, match="assign"):
        v[0] = 1
    with pytest.raises(TypeError, match="assign"):
        np.add(1, 2, out=v)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


# Assigned from outside.


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_mirrored_variable_outside_replicas(aggregation: str) -> None:
    v = variable(2, 1.0, aggregation=aggregation)
    assert v.assign(5) is v
    assert v.assign_add(2) is v
    assert v.assign_sub(0.5) is v
    assert [float(c) for c in v.values] == [6.5, 6.5]


@pytest.mark.parametrize(
    ("aggregation", "components", "read"),
    [("sum", [3, 3], 6), ("mean", [6, 6], 6), ("only_first_replica", [6, 6], 6)],
)
def test_sync_on_read_variable_outside_replicas(aggregation: str, components: list[float], read: float) -> None:
    v = variable(2, 1.0, synchronization="on_read", aggregation=aggregation)
    v.assign(6)
    assert [float(c) for c in v.values] == components
    assert v.read_value() == read


def test_sum_of_integers_reads_as_it_was_assigned() -> None:
    v = variable(3, 0, synchronization="on_read", aggregation="sum")
    for value in (7, -7, 0, 2):
        v.assign(value)
        assert v.read_value() == value
    assert [int(c) for c in v.values] == [1, 1, 0]
    small = variable(300, np.int8(0), synchronization="on_read", aggregation="sum")
    small.assign(-100)
    assert small.read_value() == -100


@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
def test_sync_on_read_assign_add_outside_replicas(aggregation: str) -> None:
    v = variable(2, 1.0, synchronization="on_read", aggregation=aggregation)
    v.assign_add(2)
    v.assign_sub(0.5)
    assert [float(c) for c in v.values] == [2.5, 2.5]


@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
def test_sync_on_read_sum_cannot_be_added_to_from_outside(method: str) -> None:
    v = variable(2, 1.0, synchronization="on_read", aggregation="sum")
    for value in (1.0, Mirrored([1.0, 1.0]), PerReplica([1.0, 2.0])):
        with pytest.raises(ValueError, match="aggregation is SUM"):
            getattr(v, method)(value)
    assert v.read_value() == 2


def test_variable_of_no_strategy_is_added_to_whatever_its_aggregation() -> None:
    v = Variable(1.0, synchronization="on_read", aggregation="sum")
    assert v.assign_add(2.0).read_value() == 3


def test_sync_on_read_without_aggregation_has_no_value_outside() -> None:
    v = variable(2, 1.0, synchronization="on_read")
    with pytest.raises(ValueError, match="aggregation NONE"):
        v.read_value()
    assert Variable(1.0, synchronization="on_read").read_value() == 1


@pytest.mark.parametrize(("aggregation", "expected"), [("sum", 4), ("mean", 2), ("only_first_replica", 1)])
def test_per_replica_value_is_what_replicas_would_assign(aggregation: str, expected: float) -> None:
    v = variable(2, 0.0, aggregation=aggregation)
    v.assign(PerReplica([1.0, 3.0]))
    assert [float(c) for c in v.values] == [expected] * 2
    w = variable(2, 0.0, synchronization="on_read", aggregation=aggregation)
    w.assign(PerReplica([1.0, 3.0]))
    assert [float(c) for c in w.values] == [1, 3]
    assert w.read_value() == expected


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_mirrored_value_is_one_value(aggregation: str) -> None:
    six = Mirrored([6.0, 6.0])
    v = variable(2, 1.0, aggregation=aggregation)
    assert v.assign(six).read_value() == 6
    assert v.assign_add(six).read_value() == 12
    w = variable(2, 1.0, synchronization="on_read", aggregation=aggregation)
    assert w.assign(six).read_value() == 6


async def test_reduced_value_is_assigned_as_it_is() -> None:
    v = variable(3, 0.0, aggregation="sum")
    extended = v.state.strategy.extended
    assert v.assign(await extended.reduce_to("sum", PerReplica([1.0, 2.0, 3.0]), v)).read_value() == 6


def test_different_components_without_aggregation_are_refused() -> None:
    v = variable(2, 0.0, name="w")
    with pytest.raises(ValueError, match="different values to the mirrored variable 'w'"):
        v.assign(PerReplica([1.0, 2.0]))
    assert v.read_value() == 0
    v.assign(Mirrored([np.nan, np.nan]))
    assert np.isnan(v)
    with pytest.raises(ValueError, match="2 components, one for each replica, got a PerReplica with 3"):
        v.assign(PerReplica([1.0] * 3))


def test_value_of_another_shape_or_kind_is_refused() -> None:
    v = variable(2, np.zeros(2, np.float32))
    for bad in (1.0, [1.0], np.zeros((1, 2))):
        with pytest.raises(ValueError, match="nothing is broadcast"):
            v.assign(bad)
    with pytest.raises(TypeError, match="fit float32, got complex128"):
        v.assign([1j, 0])
    counter = variable(2, np.uint8(0))
    counter.assign(255)
    with pytest.raises(OverflowError):
        counter.assign(256)
    with pytest.raises(TypeError, match="fit uint8, got float64"):
        counter.assign(1.0)
    with pytest.raises(TypeError, match="fit uint8, got int64"):
        counter.assign(np.int64(1))


@pytest.mark.parametrize(
    "value",
    [None, "ab", pytest.param(object(), id="object"), ["a", "b"], np.array(["2026"], "datetime64[Y]")],
    ids=repr,
)
def test_value_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a variable expects an array of numbers, or a number, got"):
        Variable(value)
    with pytest.raises(TypeError, match="the variable 'w' expects an array of numbers, or a number, got"):
        variable(2, np.zeros(2), name="w").assign(value)


def test_another_strategys_variable_is_refused() -> None:
    v = variable(2, 0.0, name="w")
    other = mirrored(2)
    with other.scope(), pytest.raises(ValueError, match=r"'w' was created under .* cannot be assigned to under"):
        v.assign(1.0)
    with other.scope(), pytest.raises(ValueError, match=r"under another strategy, .*; create it in that one's scope"):
        v.assign(1.0)
    plain = Variable(0.0)
    with other.scope():
        assert plain.assign(1.0) is plain


# With the strategy's own functions.


async def test_reduce_gather_and_local_results_take_a_variable() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = Variable([1.0], synchronization="on_read", aggregation="sum")
        m = Variable([5.0])
    v.assign(PerReplica([[1.0], [2.0]]))
    assert [c.tolist() for c in strategy.experimental_local_results(v)] == [[1], [2]]
    assert (await strategy.reduce("mean", v, None)).tolist() == [1.5]
    assert (await strategy.reduce("max", {"m": m}, None))["m"].tolist() == [5]
    assert (await strategy.reduce("sum", m, 0)).tolist() == 10
    assert (await strategy.gather(v, 0)).tolist() == [1, 2]


async def test_variable_is_passed_to_replicas_and_returned_as_it_is() -> None:
    strategy = mirrored(3)
    with strategy.scope():
        v = Variable(1.0)

    def program(nest: Any) -> Any:
        assert nest["v"] is v
        return nest

    assert (await strategy.run(program, args=({"v": v},)))["v"] is v


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
async def test_merge_function_assigns_at_once(aggregation: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = Variable(1.0, aggregation=aggregation)

    def merge(strategy: Any, x: Any) -> None:
        assert v.assign_add(2.0) is v
        assert v.read_value() == 3

    async def program() -> float:
        await here().merge_call(merge, args=(replica(),))
        return float(v)

    assert strategy.experimental_local_results(await strategy.run(program)) == (3.0, 3.0)


async def test_variable_of_another_strategy_in_a_replica() -> None:
    v = variable(2, 1.0)
    plain = Variable(1.0)

    def program() -> None:
        assert plain.read_value() == 1
        with pytest.raises(ValueError, match="created under the default strategy and cannot be assigned to in a rep"):
            plain.assign(2.0)
        with pytest.raises(ValueError, match="cannot be read in a replica"):
            v.read_value()
        with pytest.raises(ValueError, match="cannot be assigned to in a replica"):
            v.assign(2.0)

    strategy = mirrored(2)
    await strategy.run(program)
    await still_works(strategy)


async def test_replica_of_the_default_strategy() -> None:
    v = Variable(1.0)

    async def program() -> Variable:
        result: Variable = await v.assign_add(2.0)
        return result

    assert await aiodist.get_strategy().run(program) is v
    assert v.read_value() == 3


async def test_assignment_in_a_worker_thread_is_refused() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v = Variable(1.0)

    def work() -> float:
        with pytest.raises(ReplicaContextError, match=r"variable.assign of replica \d of 2 was called in the thread"):
            v.assign(2.0)
        with pytest.raises(ReplicaContextError, match="in the thread"):
            Variable(0.0)
        return float(v)

    async def program() -> float:
        return await here().run_sync(work)

    assert strategy.experimental_local_results(await strategy.run(program)) == (1.0, 1.0)
