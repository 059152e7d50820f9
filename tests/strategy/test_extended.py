"""`StrategyExtended` and the cross-device ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from anyio.lowlevel import checkpoint

import aiodist
from aiodist import (
    CollectiveHints,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    Mirrored,
    MirroredStrategy,
    NcclAllReduce,
    PerReplica,
    ReductionToOneDevice,
    Variable,
)
from tests.runtime.programs import here, mirrored
from tests.strategy.test_variables import under
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio


async def test_reduce_to_returns_a_component_for_each_destination() -> None:
    strategy, value = mirrored(3), PerReplica([1.0, 2.0, 3.0])
    v, extended = under(strategy, 0.0, synchronization="on_read"), strategy.extended
    for one in ("CPU:0", ["cpu:7"], ("/job:localhost/replica:0/task:0/device:CPU:0",)):
        assert await extended.reduce_to("mean", value, one) == 2
    for several, count in [(["CPU:0", "CPU:5"], 2), (value, 3), (v, 3), (extended.worker_devices, 3)]:
        result = await extended.reduce_to("sum", value, several)
        assert (type(result), result.values) == (Mirrored, (6.0,) * count)
    nest = {"w": PerReplica([np.ones(2)] * 3), "b": [None, PerReplica([1, 2, 3])]}
    result = await extended.reduce_to("SUM", nest, v, options=CollectiveHints(bytes_per_pack=1))
    assert [c.tolist() for c in result["w"].values] == [[3, 3]] * 3
    assert (result["b"][0], result["b"][1].values) == (None, (6, 6, 6))
    v.assign(value)
    assert await extended.reduce_to("mean", v, "CPU:0") == 2


async def test_batch_reduce_to_keeps_the_order_of_the_pairs() -> None:
    extended = mirrored(2).extended
    one, two = PerReplica([1, 2]), PerReplica([10, 20])
    results = await extended.batch_reduce_to("sum", [(two, "CPU:0"), (one, ["CPU:0", "CPU:1"])])
    assert results[0] == 30
    assert results[1].values == (3, 3)
    assert await extended.batch_reduce_to("sum", []) == []


async def test_broadcast_to_returns_read_only_copies() -> None:
    extended = mirrored(2).extended
    given = np.arange(3)
    alone = await extended.broadcast_to(given, "CPU:1")
    several = await extended.broadcast_to({"x": given, "n": 5}, ["CPU:0", "CPU:1", "CPU:2"])
    given[:] = 9
    assert alone.tolist() == [0, 1, 2]
    assert not alone.flags.writeable
    assert [c.tolist() for c in several["x"].values] == [[0, 1, 2]] * 3
    assert several["n"].values == (5, 5, 5)
    assert (await extended.broadcast_to(Variable([1.0]), "CPU:0")).tolist() == [1]
    alone_too = Job(1, 2).strategies[1].extended  # without the other worker
    assert (await alone_too.broadcast_to(given, "CPU:0")).tolist() == [9, 9, 9]


async def test_update_calls_the_function_on_each_component() -> None:
    strategy = mirrored(2)
    v = under(strategy, [1.0, 2.0], name="w", synchronization="on_read", aggregation="sum")

    unchanged: list[Any] = []

    async def fn(component: Any, x: float, nest: Any, *, scale: float) -> float:
        await checkpoint()
        assert nest is unchanged
        assert aiodist.get_strategy() is strategy
        assert (component.name, component.shape, component.dtype) == ("w", (2,), np.float64)
        assert strategy.extended.value_container(component) is v
        assert not component.trainable
        assert await component.assign_sub(component * x).assign_add([scale, scale]).assign(component + 1) is component
        return x

    result = await strategy.extended.update(v, fn, (PerReplica([1.0, 2.0]), unchanged), {"scale": 10.0})
    assert result.values == (1.0, 2.0)
    assert [c.tolist() for c in v.values] == [[11, 11], [10, 9]]
    assert await strategy.extended.update(v, lambda c: c.shape, group=False) == ((2,), (2,))
    assert await strategy.extended.update(v, lambda c: None) is None
    default, w = aiodist.get_strategy(), Variable(1.0)
    assert await default.extended.update(w, lambda c: (c.assign_add(1.0), aiodist.get_strategy())[1]) is default
    assert w.numpy() == 2
    assert not aiodist.has_strategy()


async def test_update_that_raises_changes_nothing() -> None:
    strategy = mirrored(2)
    v = under(strategy, 1.0)

    def fn(component: Any, x: float) -> None:
        component.assign(x)
        if x == 3:
            raise LookupError

    calls: list[Any] = [
        (fn, (PerReplica([2.0, 3.0]),), pytest.raises(LookupError)),
        (fn, (PerReplica([2.0, 4.0]),), pytest.raises(ValueError, match="different values: replica 1's")),
        (lambda _: v.assign(1.0) and None, (), pytest.raises(RuntimeError, match="was assigned to while it was upd")),
    ]
    for update, arguments, error in calls:
        with error:
            await strategy.extended.update(v, update, arguments)
        assert [float(c) for c in v.values] == [1, 1]


def test_variables_belong_to_a_strategy() -> None:
    strategy, other = MirroredStrategy(["cpu:1", "/cpu:0"]), mirrored(2)
    v, plain = under(strategy, 1.0), Variable(1.0)
    extended = strategy.extended
    assert extended.worker_devices == extended.parameter_devices == ("CPU:1", "CPU:0")
    assert extended.variable_created_in_scope(v)
    assert not other.extended.variable_created_in_scope(v)
    assert not extended.variable_created_in_scope(plain)
    assert aiodist.get_strategy().extended.variable_created_in_scope(plain)
    assert extended.value_container(v) is v
    assert extended.value_container(3) == 3
    with extended.colocate_vars_with(v):
        assert extended.variable_created_in_scope(Variable(1.0))


class Own(CrossDeviceOps):
    def __init__(self, packs: int) -> None:
        self.packs = packs


@pytest.mark.parametrize("ops", [ReductionToOneDevice("/cpu:1"), HierarchicalCopyAllReduce(3), NcclAllReduce(), Own(3)])
async def test_cross_device_ops_never_change_a_result(ops: CrossDeviceOps) -> None:
    strategy, values = MirroredStrategy(3, ops), PerReplica([np.float32(1e8), np.float32(1), np.float32(-1e8)])
    assert (await strategy.run(lambda x: here().all_reduce("sum", x), (values,))).values == (0, 0, 0)
    assert await strategy.extended.reduce_to("sum", values, "CPU:0") == 0
