"""all_gather, broadcast, reduce_scatter and all_to_all of device arrays in replica functions, on planted GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist import MirroredStrategy, ReduceOp, ReplicaContext, get_replica_context, set_logical_devices
from aiodist.gpu import plan
from aiodist_kernels import reduce
from tests.gpu.conftest import Machine, PlantedArray, cancelled_and_held_back
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    Plant = Callable[..., Machine]

pytestmark = pytest.mark.anyio

SINGLE = np.dtype(np.float32)
ORDINALS = [0, 0, 1]
WALLS = {frozenset({0, 1})}


def replica() -> ReplicaContext:
    return get_replica_context()


def planted(plant: Plant, **options: Any) -> Machine:
    """Three replicas on two GPUs."""
    machine = plant(2, **options)
    set_logical_devices("GPU:0", 2)
    return machine


async def check(
    machine: Machine,
    call: Callable[[ReplicaContext, Any], Any],
    values: list[np.ndarray],
    wanted: list[np.ndarray],
) -> None:
    """Let replicas call a collective with an array, and with a nest of arrays on GPUs and the host; check bits."""
    strategy = MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(values)

    async def step() -> tuple[int, Any, dict[str, Any]]:
        ctx = replica()
        me = ctx.replica_id_in_sync_group
        value = machine.put(values[me], ORDINALS[me])
        alone = await call(ctx, value)
        return me, alone, await call(ctx, {"host": values[me], "value": value, "more": [value]})

    for me, alone, nest in strategy.experimental_local_results(await strategy.run(step)):
        assert_same_bits(nest["host"], wanted[me])
        for result in (alone, nest["value"], nest["more"][0]):
            assert isinstance(result, PlantedArray)
            assert result.ordinal == ORDINALS[me]
            assert_same_bits(result.numpy(), wanted[me])
        assert len({id(array.memory) for array in (alone, nest["value"], nest["more"][0])}) == 3


@pytest.mark.parametrize("walls", [set(), WALLS], ids=["peers", "no peers"])
@pytest.mark.parametrize("source", [0, 2])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 5)], ids=str)
async def test_broadcast(plant: Plant, shape: tuple[int, ...], source: int, walls: set[frozenset[int]]) -> None:
    values = arrays.buffers(1, 3, shape, SINGLE)
    await check(planted(plant, walls=walls), lambda ctx, v: ctx.broadcast(v, source), values, [values[source]] * 3)


@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
async def test_all_gather_of_unequal_sizes(plant: Plant, axis: int, dtype: np.dtype) -> None:
    values = []
    for i, size in enumerate((2, 0, 5)):
        shape = [3, 4, 2]
        shape[axis] = size
        values.append(arrays.values(i, tuple(shape), dtype))
    whole = np.concatenate(values, axis=axis)
    await check(planted(plant, walls=WALLS), lambda ctx, v: ctx.all_gather(v, axis), values, [whole] * 3)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("walls", [set(), WALLS], ids=["peers", "no peers"])
@pytest.mark.parametrize("axis", [0, 1])
async def test_reduce_scatter(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, axis: int, walls: set[frozenset[int]], *, shards: bool
) -> None:
    monkeypatch.setattr(plan, "SHARD_FROM", 0 if shards else 1 << 60)
    values = arrays.buffers(2, 3, (60, 45), np.dtype(np.int32))
    wanted = np.split(reduce(ReduceOp.MEAN, values), 3, axis=axis)
    machine = planted(plant, walls=walls, unloaded=True)
    await check(machine, lambda ctx, v: ctx.reduce_scatter("MEAN", v, axis), values, wanted)


@pytest.mark.parametrize("split_axis", [0, 1, 2])
@pytest.mark.parametrize("concat_axis", [0, 1, 2])
async def test_all_to_all(plant: Plant, split_axis: int, concat_axis: int) -> None:
    values = arrays.buffers(3, 3, (3, 6, 9), SINGLE)
    split = [np.split(value, 3, axis=split_axis) for value in values]
    wanted = [np.concatenate(parts, axis=concat_axis) for parts in zip(*split, strict=True)]
    await check(planted(plant, walls=WALLS), lambda ctx, v: ctx.all_to_all(v, split_axis, concat_axis), values, wanted)


async def test_what_a_device_gets_crosses_once(plant: Plant) -> None:
    machine = plant(2)
    set_logical_devices("GPU:1", 3)

    async def step() -> None:
        me = replica().replica_id_in_sync_group
        await replica().broadcast(machine.put(np.ones(4, SINGLE), min(me, 1)), source=0)

    await MirroredStrategy().run(step)
    copies = [entry for entry in machine.driver.log if entry[0] == "copy"]
    assert copies == [("copy", 0, 0), ("copy", 1, 0), ("copy", 1, 1), ("copy", 1, 1)]


async def test_replicas_that_have_joined_bring_nothing(plant: Plant) -> None:
    machine = plant(3)
    seen: dict[int, Any] = {}

    async def step() -> None:
        me = replica().replica_id_in_sync_group
        if me != 1:
            value = machine.put(np.full(2, me, SINGLE), me)
            whole, sent = await replica().all_gather(value, 0), await replica().broadcast(value, source=2)
            seen[me] = whole.numpy().tolist(), sent.numpy().tolist()
        await replica().join()

    await MirroredStrategy().run(step)
    assert seen == {0: ([0, 0, 2, 2], [2, 2]), 2: ([0, 0, 2, 2], [2, 2])}


async def test_cancelled_exchange_keeps_its_memory_until_the_device_is_done(plant: Plant) -> None:
    machine = plant(2)

    async def step() -> None:
        me = replica().replica_id_in_sync_group
        await replica().all_gather(machine.put(np.full((4, 3), me, SINGLE), me), 1)

    await cancelled_and_held_back(machine, lambda: MirroredStrategy().run(step))
