"""Variables: their properties, their use as arrays, assignments outside of replicas and in them, and creation."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiodist import (
    CollectiveMismatchError,
    CommunicationOptions,
    Mirrored,
    PerReplica,
    Reason,
    ReplicaContextError,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    get_strategy,
)
from aiodist._strategy.variable import updated
from aiodist_kernels import policy
from tests.runtime.programs import Relay, here, mirrored, replica, still_works

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
    """Return a variable of a strategy."""
    with strategy.scope():
        return Variable(*args, **settings)


def variable(count: int, *args: Any, **settings: Any) -> Variable:
    """Return a variable of a strategy with ``count`` replicas."""
    return under(mirrored(count), *args, **settings)


# Properties.


async def test_variable_of_a_strategy_and_of_the_default_one() -> None:
    v = variable(3, np.float32(2), name="w")
    assert [c.tolist() for c in v.values] == [2, 2, 2]
    assert (v.name, v.shape, v.trainable, v.dtype) == ("w", (), True, np.float32)
    assert (v.synchronization, v.aggregation) == (VariableSynchronization.ON_WRITE, VariableAggregation.NONE)
    plain = Variable([1, 2])
    assert len(plain.values) == 1
    assert await plain.assign([3, 4]) is plain  # as in a step for `run` that is called directly
    assert plain.numpy().tolist() == plain.value().tolist() == [3, 4]
    assert repr(plain) == "<Variable 'Variable': int64[2], mirrored, aggregation NONE>"


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_components_are_read_only_and_share_no_memory(synchronization: str) -> None:
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


def test_settings_have_defaults_and_names_in_any_case() -> None:
    v = variable(2, 0.0, synchronization="ON_Read", aggregation="Mean")
    assert (v.synchronization, v.aggregation) == (VariableSynchronization.ON_READ, VariableAggregation.MEAN)
    assert not v.trainable
    assert variable(2, 0.0, trainable=True, synchronization="on_read").trainable
    assert variable(2, 0.0, synchronization=VariableSynchronization.AUTO).synchronization == "on_write"
    assert variable(2, lambda: [1.5]).numpy().tolist() == [1.5]
    assert (variable(1, 1).dtype, variable(1, 1, dtype="float32").dtype) == (np.int64, np.float32)
    assert variable(1, np.zeros(2, ">f4")).dtype.isnative


def test_variable_without_references_is_collected() -> None:
    strategy = mirrored(2)
    created = asyncio.run(strategy.run(lambda: Variable(0.0)))
    gone = [weakref.ref(variable(2, 0.0)), weakref.ref(created)]
    del created
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# As an array.


def test_variable_in_arithmetic_and_numpys_functions() -> None:
    v = variable(2, np.array([1.0, 2.0], np.float32))
    w = variable(2, np.array([3.0, 4.0], np.float32))
    for result, expected in [
        (1 - v * w, [-2, -7]),
        (np.array([2, 2], np.float32) / v, [2, 1]),
        (-(v**2), [-1, -4]),
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
    assert {n: "hashed by identity"}[n]


def test_change_in_place_is_refused() -> None:
    v = variable(2, np.zeros(2))
    with pytest.raises(TypeError, match="assign_add"):
        v += 1
    with pytest.raises(TypeError, match="assign"):
        v[0] = 1
    with pytest.raises(TypeError, match="assign"):
        np.add(1, 2, out=v)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


# Assignments.


def modelled(components: list[Any], mirror: bool, aggregation: str, method: str, where: str, values: list[Any]) -> Any:
    """Return the components after an assignment, computed in plain NumPy."""
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
def test_assignments_agree_with_a_model(count: int, mirror: bool, aggregation: str, dtype: Any, steps: Any) -> None:
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


def test_assigned_sum_reads_as_it_was_assigned() -> None:
    v = variable(3, 0, synchronization="on_read", aggregation="sum")
    for value in (7, -7, 0, 2):
        assert v.assign(value).read_value() == value
    assert [int(c) for c in v.values] == [1, 1, 0]
    small = variable(300, np.int8(0), synchronization="on_read", aggregation="sum")
    assert small.assign(-100).read_value() == -100
    whole = complex(np.inf, 1)  # a complex division makes it NaN, even by 1
    for size in (1, 2):
        assert variable(size, 0j, synchronization="on_read", aggregation="sum").assign(whole).read_value() == whole


def test_variable_without_aggregation() -> None:
    assert np.isnan(variable(2, 0.0).assign(PerReplica([np.nan, np.nan])))
    assert Variable(1.0, synchronization="on_read").read_value() == 1
    assert Variable(1.0, synchronization="on_read", aggregation="sum").assign_add(2.0).read_value() == 3


async def test_variable_of_another_strategy_is_refused() -> None:
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
    refused = pytest.raises(ReplicaContextError, match=r"'w': .* was not created under <MirroredStrategy")
    for combined in (
        other.reduce("sum", {"w": v}, None),
        other.gather(v, 0),
        other.extended.reduce_to("sum", v, "CPU:0"),
    ):
        with refused:
            await combined
    with refused:
        other.experimental_local_results([v])
    assert (await other.run(plain.read_value)).values == (1, 1)
    assert await other.reduce("mean", plain, None) == 1
    assert other.experimental_local_results(plain) == (1, 1)
    await still_works(other)


async def test_methods_of_the_strategy_take_variables() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        v, m = Variable([1.0], synchronization="on_read", aggregation="sum"), Variable([5.0])
    v.assign(PerReplica([[1.0], [2.0]]))
    assert [c.tolist() for c in strategy.experimental_local_results(v)] == [[1], [2]]
    assert [nest["v"].tolist() for nest in strategy.experimental_local_results({"v": v})] == [[1], [2]]
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
async def test_copy_is_another_variable_of_the_strategy(settings: dict[str, str]) -> None:
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


# Assignments in replicas.


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treat all values as large; return a list of the worker threads that compute new values."""
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 8)
    seen: list[int] = []
    loop = threading.get_ident()

    def spy(plain: Any, *args: Any, **settings: Any) -> Any:
        if threading.get_ident() != loop:
            seen.append(threading.get_ident())
        return plain(*args, **settings)

    monkeypatch.setattr("aiodist._strategy.variable.updated", partial(spy, updated))
    return seen


@pytest.mark.parametrize("aggregation", ["none", *AGGREGATED])
@pytest.mark.parametrize("method", CHANGES)
async def test_large_assignment_is_aggregated_in_a_thread(threads: list[int], method: str, aggregation: str) -> None:
    strategy = mirrored(3)
    contributions = [np.array([1.0, np.nan, k * (aggregation != "none")]) for k in range(3)]
    v = under(strategy, np.full(3, 100.0), aggregation=aggregation)

    async def program() -> Any:
        assert await getattr(v, method)(contributions[replica()]) is v
        return v.numpy()

    whole = contributions[0] if aggregation == "none" else AGGREGATED[aggregation](contributions)
    for found in strategy.experimental_local_results(await strategy.run(program)):
        np.testing.assert_array_equal(found, CHANGES[method](100.0, whole))
        assert not found.flags.writeable
        assert not any(np.shares_memory(found, array) for array in contributions)
    assert len({id(c) for c in v.values}) == 1  # nothing can change it, so one serves all replicas
    assert len(threads) == 1


@pytest.mark.parametrize(("accumulate", "expected"), [("native", 0), ("float64", 1)])
async def test_sum_is_a_left_fold_in_replica_order_whatever_the_arrival(accumulate: Any, expected: float) -> None:
    relay = Relay([2, 0, 1])
    strategy = mirrored(3, communication_options=CommunicationOptions(accumulate=accumulate))
    v = under(strategy, np.float32(0), aggregation="sum")

    async def program() -> None:
        await relay.turn()
        pending = v.assign([1e8, 1.0, -1e8][replica()])
        relay.pass_on()
        await pending

    await strategy.run(program)
    assert v.numpy() == expected


async def test_assignments_that_are_not_awaited_take_effect_in_order(threads: list[int]) -> None:
    strategy = mirrored(2)
    v = under(strategy, np.zeros(5), aggregation="sum")

    async def program() -> Any:
        handles: list[Any] = []
        for step in range(20):
            handles.append(v.assign_add(np.full(5, 1.0)))
            if step % 5 == 4:
                handles.append(v.assign(v.read_value() * 0 + step))
        handles.append(here().all_reduce("SUM", 1))
        return [await handle for handle in handles][-1]

    assert (await strategy.run(program)).values == (2, 2)
    assert v.numpy().tolist() == [38.0] * 5
    assert len(threads) == 24


@pytest.mark.usefixtures("threads")
async def test_update_follows_an_assignment_still_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, over, loop = mirrored(2), threading.Event(), threading.get_ident()
    v = under(strategy, np.zeros(5), aggregation="sum")

    def held(*args: Any, **settings: Any) -> Any:
        assert threading.get_ident() == loop or over.wait(60)
        return updated(*args, **settings)

    async def update(_: Any) -> None:
        try:
            await strategy.extended.update(v, lambda component: component.assign_add(np.full(5, 10.0)))
        finally:
            over.set()

    async def program() -> None:
        pending = v.assign_add(np.ones(5))
        await here().merge_call(update)
        await pending

    monkeypatch.setattr("aiodist._strategy.variable.updated", held)
    await strategy.run(program)
    assert v.numpy().tolist() == [12.0] * 5


@pytest.mark.parametrize("order_check", ["call_site", "call_path"])
async def test_assignment_from_two_places_needs_a_name(order_check: str) -> None:
    strategy = mirrored(2, order_check=order_check)
    v = under(strategy, 0.0, aggregation="sum")

    async def program(name: str | None) -> None:
        if replica():
            await v.assign_add(1.0, name=name)
        else:
            await v.assign_add(2.0, name=name)

    assert await strategy.run(v.assign, (PerReplica([2.0, 4.0]),)) is v  # the replicas' function may be one itself
    await strategy.run(program, args=("both",))
    assert v.read_value() == 9
    with pytest.raises(CollectiveMismatchError) as caught:
        await strategy.run(program, args=(None,))
    assert caught.value.report.reason is Reason.CALL_SITE
    assert all(r.location is not None and r.location.file == __file__ for r in caught.value.report.replicas)


async def test_bad_assignment_in_a_replica_is_refused_at_the_call() -> None:
    strategy = mirrored(2)
    v = under(strategy, [0.0, 0.0])

    def work() -> None:
        with pytest.raises(ReplicaContextError, match=r"variable.assign of replica \d of 2 was called in the thread"):
            v.assign([2.0, 2.0])
        with pytest.raises(ReplicaContextError, match="in the thread"):
            Variable(0.0)
        assert v.numpy().tolist() == [0, 0]

    async def program() -> None:
        with pytest.raises(ValueError, match="nothing is broadcast"):
            v.assign(1.0)
        with pytest.raises(TypeError, match="not one array"):
            v.assign(await here().merge_call(lambda _: PerReplica([PerReplica([1.0, 2.0])] * 2)))
        await here().run_sync(work)
        await v.assign([1.0, 1.0])

    await strategy.run(program)


# Creation in replicas.


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
async def test_variable_is_created_once_with_the_value_of_replica_0(count: int, synchronization: str) -> None:
    async def program() -> Variable:
        v = Variable(replica() + 1.0, synchronization=synchronization, aggregation="mean")
        assert v.read_value() == 1
        return await v.assign_add(2.0)  # type: ignore[no-any-return]

    strategy = mirrored(count)
    v = await strategy.run(program)
    assert isinstance(v, Variable)  # the identical object on every replica
    assert [float(c) for c in v.values] == [3] * count
    assert await strategy.run(program) is not v


async def test_variable_has_no_value_before_replica_0_creates_it() -> None:
    relay = Relay([1, 0])

    async def program() -> Variable:
        await relay.turn()
        v = Variable(replica() + 1.0, name="late", aggregation="sum")
        if replica() == 1:
            with pytest.raises(ReplicaContextError, match="'late' gets replica 0's initial value"):
                v.read_value()
        pending = v.assign_add(10.0)
        relay.pass_on()
        await pending
        return v

    assert (await mirrored(2).run(program)).read_value() == 21


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([{"name": "a"}, {"name": "b"}], "creates 'a': .*creates 'b': "),
        ([{"dtype": "float32"}, {"dtype": "float64"}], r"float32\[\], .*float64\[\], "),
        ([{"initial_value": [1.0]}, {"initial_value": 1.0}], r"float64\[1\], .*float64\[\], "),
        ([{"trainable": True}, {"trainable": False}], "NONE; .*NONE, not trainable"),
        ([{"aggregation": "sum"}, {"aggregation": "mean"}], "aggregation SUM; .*aggregation MEAN"),
        ([{"trainable": False}, {"synchronization": "on_read"}], "mirrored, .*sync-on-read, "),
    ],
)
async def test_replicas_that_create_different_variables_are_refused(settings: list[dict[str, Any]], text: str) -> None:
    def program() -> None:
        Variable(**{"initial_value": 1.0, **settings[replica()]})

    strategy = mirrored(2)
    with pytest.raises(ValueError, match=rf"different variables as their #0: replica 0 at .*{text}"):
        await strategy.run(program)
    await still_works(strategy)


async def test_replicas_that_create_variables_in_another_order_are_refused() -> None:
    async def program(name: str | None) -> None:
        _ = Variable(1.0, name=name) if replica() else None
        _ = Variable(2.0, name=name) if not replica() else None

    await mirrored(2).run(program, args=("one",))
    await mirrored(2, order_check="signature").run(program, args=(None,))
    with pytest.raises(ValueError, match=r"different variables as their #0: replica 0 at .*; replica 1 at"):
        await mirrored(2).run(program, args=(None,))
    with pytest.raises(ValueError, match="different numbers of variables: replica 0: 0, replica 1: 1"):
        await mirrored(3).run(lambda: [Variable(1.0) for _ in range(replica() == 1)] and None)
