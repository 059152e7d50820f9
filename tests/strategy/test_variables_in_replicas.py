"""Variables in replica functions: assignments are collectives, creation happens once; large values leave the loop."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import (
    CollectiveMismatchError,
    CommunicationOptions,
    PerReplica,
    Reason,
    ReplicaContextError,
    Variable,
)
from aiodist._strategy import variable
from aiodist._strategy.variable import updated
from aiodist_kernels import policy
from tests.runtime.programs import Relay, here, mirrored, replica, still_works
from tests.strategy.test_variables import AGGREGATED, CHANGES, under

pytestmark = pytest.mark.anyio


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the worker thread that a new value is made in; every value counts as large."""
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 8)
    seen: list[int] = []
    loop = threading.get_ident()

    def spy(plain: Any, *args: Any, **settings: Any) -> Any:
        if threading.get_ident() != loop:
            seen.append(threading.get_ident())
        return plain(*args, **settings)

    monkeypatch.setattr(variable, "updated", partial(spy, updated))
    return seen


# Assigning.


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


@pytest.mark.parametrize("size", [5, 100_000])
async def test_different_values_without_aggregation_change_nothing(size: int) -> None:
    strategy = mirrored(3)
    v = under(strategy, np.zeros(size), name="w")

    async def program() -> None:
        await v.assign(np.full(size, 1.0 if replica() < 2 else 2.0))

    with pytest.raises(ValueError, match=r"variable 'w' would get different values: replica 2's is not replica 0's"):
        await strategy.run(program)
    assert not v.numpy().any()
    assert v.assign_add(np.ones(size)).numpy().all()
    await still_works(strategy)


@pytest.mark.parametrize(("accumulate", "expected"), [("native", 0), ("float64", 1)])
async def test_sum_is_a_left_fold_in_replica_order_whoever_comes_first(accumulate: Any, expected: float) -> None:
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


async def test_assignments_take_effect_in_order_also_where_nobody_awaits_between(threads: list[int]) -> None:
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


async def test_what_is_wrong_in_one_replica_is_refused_at_the_call() -> None:
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


# Creating.


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
async def test_variable_is_created_once_from_replica_0(count: int, synchronization: str) -> None:
    async def program() -> Variable:
        v = Variable(replica() + 1.0, synchronization=synchronization, aggregation="mean")
        assert v.read_value() == 1
        return await v.assign_add(2.0)  # type: ignore[no-any-return]

    strategy = mirrored(count)
    v = await strategy.run(program)
    assert isinstance(v, Variable)  # the identical object on every replica
    assert [float(c) for c in v.values] == [3] * count
    assert await strategy.run(program) is not v


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
async def test_replicas_that_create_different_variables(settings: list[dict[str, Any]], text: str) -> None:
    def program() -> None:
        Variable(**{"initial_value": 1.0, **settings[replica()]})

    strategy = mirrored(2)
    with pytest.raises(ValueError, match=rf"different variables as their #0: replica 0 at .*{text}"):
        await strategy.run(program)
    await still_works(strategy)


async def test_replicas_that_create_in_another_order() -> None:
    async def program(name: str | None) -> None:
        _ = Variable(1.0, name=name) if replica() else None
        _ = Variable(2.0, name=name) if not replica() else None

    await mirrored(2).run(program, args=("one",))
    await mirrored(2, order_check="signature").run(program, args=(None,))
    with pytest.raises(ValueError, match=r"different variables as their #0: replica 0 at .*; replica 1 at"):
        await mirrored(2).run(program, args=(None,))
    with pytest.raises(ValueError, match="different numbers of variables: replica 0: 0, replica 1: 1"):
        await mirrored(3).run(lambda: [Variable(1.0) for _ in range(replica() == 1)] and None)


async def test_variables_of_concurrent_runs_are_apart() -> None:
    strategy, found = mirrored(2), list[Variable]()

    async def program() -> Variable:
        v = Variable(0.0)
        await here().barrier()
        return v

    async def one() -> None:
        found.append(await strategy.run(program))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
    assert found[0] is not found[1]


@pytest.mark.parametrize("order_check", ["call_site", "call_path"])
async def test_assignment_may_be_the_replicas_function_itself(order_check: str) -> None:
    strategy = mirrored(2, order_check=order_check)
    with strategy.scope():
        mean = Variable(1.0, aggregation="mean")
    assert await strategy.run(mean.assign, (PerReplica([2.0, 4.0]),)) is mean
    assert mean.numpy() == 3
