"""Variables in replica functions: assignments are collectives, creation happens once."""

from __future__ import annotations

import sys
from typing import Any

import anyio
import ml_dtypes
import numpy as np
import pytest

from aiodist import (
    CollectiveMismatchError,
    CommunicationOptions,
    IncompleteCollectiveError,
    PerReplica,
    Reason,
    ReplicaContextError,
    Variable,
)
from tests.runtime.programs import Relay, here, mirrored, on_each, replica, still_works

pytestmark = pytest.mark.anyio


def under(strategy: Any, *args: Any, **settings: Any) -> Variable:
    """Return a variable of that strategy."""
    with strategy.scope():
        return Variable(*args, **settings)


# Assigning.


@pytest.mark.parametrize(
    ("method", "aggregation", "expected"),
    [
        ("assign", "sum", 6),
        ("assign", "mean", 2),
        ("assign", "only_first_replica", 1),
        ("assign_add", "sum", 106),
        ("assign_add", "mean", 102),
        ("assign_add", "only_first_replica", 101),
        ("assign_sub", "sum", 94),
        ("assign_sub", "mean", 98),
        ("assign_sub", "only_first_replica", 99),
    ],
)
async def test_assignment_to_a_mirrored_variable_is_aggregated(method: str, aggregation: str, expected: float) -> None:
    strategy = mirrored(3)
    v = under(strategy, np.float32(100), aggregation=aggregation)

    async def program() -> float:
        assert await getattr(v, method)(replica() + 1.0) is v
        return float(v)

    assert strategy.experimental_local_results(await strategy.run(program)) == (expected,) * 3
    assert [float(c) for c in v.values] == [expected] * 3
    assert len({id(c) for c in v.values}) == 1  # nothing can change it, so one serves all replicas


async def test_assignment_without_aggregation_takes_equal_values() -> None:
    strategy = mirrored(3)
    v = under(strategy, [0.0, 0.0])

    async def program() -> None:
        await v.assign([1.0, float("nan")])
        await v.assign_add([1.0, 1.0])

    await strategy.run(program)
    assert v.numpy()[0] == 2
    assert np.isnan(v.numpy()[1])


async def test_assignment_without_aggregation_of_different_values_raises() -> None:
    strategy = mirrored(3)
    v = under(strategy, 0.0, name="w")

    async def program() -> None:
        await v.assign(1.0 if replica() < 2 else 2.0)

    with pytest.raises(ValueError, match=r"different values to the mirrored variable 'w'.*replica 2's is not"):
        await strategy.run(program)
    assert v.read_value() == 0
    await still_works(strategy)


@pytest.mark.parametrize(("aggregation", "read"), [("sum", 36), ("mean", 12), ("only_first_replica", 11)])
async def test_sync_on_read_variable_changes_by_replica(aggregation: str, read: float) -> None:
    strategy = mirrored(3)
    v = under(strategy, 0.0, synchronization="on_read", aggregation=aggregation)

    async def program() -> float:
        if replica() == 1:  # no collective: nobody else need come
            await v.assign(99.0)
        await v.assign(10.0)
        assert await v.assign_add(replica() + 2.0) is v
        await v.assign_sub(1.0)
        return float(v)

    assert strategy.experimental_local_results(await strategy.run(program)) == (11, 12, 13)
    assert v.read_value() == read


async def test_sum_is_a_left_fold_in_replica_order_whoever_comes_first() -> None:
    values = [1e8, 1.0, -1e8]
    relay = Relay([2, 0, 1])
    strategy = mirrored(3)
    v = under(strategy, np.float32(0), aggregation="sum")

    async def program() -> None:
        await relay.turn()
        pending = v.assign(values[replica()])
        relay.pass_on()
        await pending

    await strategy.run(program)
    expected = np.float32(values[0]) + np.float32(values[1]) + np.float32(values[2])
    assert v.numpy() == expected


async def test_options_of_the_strategy_hold() -> None:
    strategy = mirrored(3, communication_options=CommunicationOptions(accumulate="float64"))
    v = under(strategy, np.float32(0), aggregation="sum")

    async def program() -> None:
        await v.assign([1e8, 1.0, -1e8][replica()])

    await strategy.run(program)
    assert v.numpy() == 1


async def test_assignments_overlap_in_the_order_of_their_calls() -> None:
    strategy = mirrored(2)
    v = under(strategy, 0.0, aggregation="sum")

    async def program() -> Any:
        pending = [v.assign(1.0), v.assign_add(3.0), here().all_reduce("SUM", 1)]
        return [await handle for handle in pending][2]

    assert await strategy.run(program) == 2
    assert v.read_value() == 8


async def test_mismatch_names_the_variable_and_the_users_lines() -> None:
    strategy = mirrored(3)
    v, w = under(strategy, 0.0, name="v"), under(strategy, 0.0, name="w")
    lines = {}

    async def program() -> None:
        lines["def"] = sys._getframe().f_lineno
        if replica() == 1:
            await w.assign(1.0)
        await v.assign(1.0)

    with pytest.raises(CollectiveMismatchError) as caught:
        await strategy.run(program)
    report = caught.value.report
    assert report.reason is Reason.KIND
    assert report.suspects == (1,)
    assert [r.call for r in report.replicas] == ["v.assign(float64[])", "w.assign(float64[])", "v.assign(float64[])"]
    assert [r.location and (r.location.file, r.location.line - lines["def"]) for r in report.replicas] == [
        (__file__, 3),
        (__file__, 2),
        (__file__, 3),
    ]
    assert v.read_value() == w.read_value() == 0


@pytest.mark.parametrize("order_check", ["call_site", "call_path"])
async def test_same_assignment_from_two_places_is_told_apart_unless_named(order_check: str) -> None:
    strategy = mirrored(2, order_check=order_check)
    v = under(strategy, 0.0, aggregation="sum")

    async def program(name: str | None) -> None:
        if replica():
            await v.assign_add(1.0, name=name)
        else:
            await v.assign_add(2.0, name=name)

    await strategy.run(program, args=("both",))
    assert v.read_value() == 3
    with pytest.raises(CollectiveMismatchError) as caught:
        await strategy.run(program, args=(None,))
    assert caught.value.report.reason is Reason.CALL_SITE
    assert all(r.location is not None and r.location.file == __file__ for r in caught.value.report.replicas)


async def test_replica_that_leaves_an_assignment_out_is_named() -> None:
    strategy = mirrored(3)
    v = under(strategy, 0.0)

    async def program() -> None:
        if replica() != 1:
            await v.assign(1.0)

    with pytest.raises(IncompleteCollectiveError) as caught:
        await strategy.run(program)
    assert caught.value.report.suspects == (1,)
    assert v.read_value() == 0


async def test_bad_value_is_refused_at_the_call() -> None:
    strategy = mirrored(2)
    v = under(strategy, [0.0, 0.0])

    async def program() -> None:
        with pytest.raises(ValueError, match="nothing is broadcast"):
            v.assign(1.0)
        with pytest.raises(TypeError, match="not one array"):
            v.assign(await here().merge_call(_per_replica))
        await v.assign([1.0, 1.0])

    await strategy.run(program)


def _per_replica(strategy: Any) -> Any:
    return PerReplica([PerReplica([1.0, 2.0])] * 2)


# Creating.


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
async def test_variable_is_created_once_from_replica_0(synchronization: str) -> None:
    def program() -> Variable:
        v = Variable(replica() + 1.0, synchronization=synchronization, aggregation="mean")
        assert v.read_value() == 1
        return v

    strategy = mirrored(3)
    v = await strategy.run(program)
    assert isinstance(v, Variable)  # the identical object on every replica
    assert [float(c) for c in v.values] == [1, 1, 1]
    again = await strategy.run(program)
    assert again is not v


async def test_replica_that_comes_before_replica_0_waits_for_its_value() -> None:
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

    v = await mirrored(2).run(program)
    assert v.read_value() == 21


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([{"name": "a"}, {"name": "b"}], "name is 'a' for replica 0 at .*, 'b' for replica 1"),
        ([{"dtype": "float32"}, {"dtype": "float64"}], "dtype is float32"),
        ([{"initial_value": [1.0]}, {"initial_value": 1.0}], r"shape is \(1,\)"),
        ([{"trainable": True}, {"trainable": False}], "trainable is True"),
        ([{"aggregation": "sum"}, {"aggregation": "mean"}], "aggregation is sum"),
        ([{"synchronization": "on_write", "trainable": False}, {"synchronization": "on_read"}], "synchronization is"),
    ],
)
async def test_replicas_that_create_different_variables(settings: list[dict[str, Any]], text: str) -> None:
    def program() -> None:
        Variable(**{"initial_value": 1.0, **settings[replica()]})

    strategy = mirrored(2)
    with pytest.raises(ValueError, match=rf"different variables as their #0: {text}"):
        await strategy.run(program)
    await still_works(strategy)


async def test_replicas_that_create_in_another_order() -> None:
    async def program(name: str | None) -> None:
        if replica() == 0:
            Variable(1.0, name=name)
        else:
            Variable(2.0, name=name)

    await mirrored(2).run(program, args=("one",))
    await mirrored(2, order_check="signature").run(program, args=(None,))
    with pytest.raises(ValueError, match=r"different variables as their #0: replica 0 at .*, replica 1 at"):
        await mirrored(2).run(program, args=(None,))


async def test_replica_that_creates_more_than_others() -> None:
    def program() -> None:
        if replica() == 1:
            Variable(1.0)

    with pytest.raises(ValueError, match="different numbers of variables: replica 0: 0, replica 1: 1"):
        await mirrored(3).run(program)


async def test_variables_of_concurrent_runs_are_apart() -> None:
    strategy = mirrored(2)
    found: list[Variable] = []

    async def program() -> Variable:
        v = Variable(float(len(found)))
        await here().barrier()
        return v

    async def one() -> None:
        found.append(await strategy.run(program))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
    assert found[0] is not found[1]


async def test_one_replica_creates_and_assigns() -> None:
    async def program() -> float:
        v = Variable(1.0)
        await v.assign_add(2.0)
        return float(v)

    assert await on_each(1, program) == (3.0,)


async def test_training_step_keeps_replicas_equal() -> None:
    strategy = mirrored(4)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 3)), rng.normal(size=16)
    w = under(strategy, np.zeros(3), aggregation="mean")

    async def step() -> None:
        rows = slice(4 * replica(), 4 * replica() + 4)
        await w.assign_sub(0.1 * 2 * x[rows].T @ (x[rows] @ w - y[rows]) / 4)

    expected = np.zeros(3)
    for _ in range(20):
        await strategy.run(step)
        expected -= 0.1 * 2 * x.T @ (x @ expected - y) / 16
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12)
    assert len({component.tobytes() for component in w.values}) == 1


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64]
)
@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
async def test_every_dtype_is_kept(dtype: Any, synchronization: str) -> None:
    strategy = mirrored(2)
    v = under(strategy, 1, dtype=dtype, synchronization=synchronization, aggregation="sum")

    async def program() -> None:
        await v.assign(2)
        await v.assign_add(np.array(3, dtype))
        await v.assign_sub(1)
        assert v.read_value().dtype == v.dtype == dtype

    await strategy.run(program)
    assert v.dtype == v.read_value().dtype == dtype
    assert v.read_value() == 8
    v.assign(5)
    assert v.read_value() == 5


async def test_variable_of_truth_values() -> None:
    strategy = mirrored(2)
    v = under(strategy, False)

    async def program() -> None:
        await v.assign(True)

    await strategy.run(program)
    assert bool(v)
    with pytest.raises(TypeError, match="SUM of bool"):
        under(strategy, False, aggregation="sum")


async def test_counting_a_distributed_dataset() -> None:
    strategy = mirrored(2)
    total = under(strategy, 0.0, synchronization="on_read", aggregation="sum")
    count = under(strategy, 0, synchronization="on_read", aggregation="sum")

    async def program(batch: Any) -> None:
        await total.assign_add(batch.sum())
        await count.assign_add(len(batch))

    batches = iter(strategy.experimental_distribute_dataset([np.array([1.0, 2, 3]), np.array([4.0, 5])]))
    await strategy.experimental_run(program, batches)
    await strategy.experimental_run(program, batches)
    with pytest.raises(StopAsyncIteration):
        await strategy.experimental_run(program, batches)
    assert (float(total), int(count)) == (15, 5)
