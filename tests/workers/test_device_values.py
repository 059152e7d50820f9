"""Device arrays on planted GPUs have the same bits as host arrays, in and outside of replicas of several workers."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist
from aiodist import ReduceOp, ReplicaContext
from aiodist._arrays import devices
from tests.gpu.conftest import Machine, PlantedArray, plant
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits
from tests.workers.simulated import Job, on_trio_too

Plant = Callable[..., Machine]
Call = Callable[[ReplicaContext, Any], Any]
Layout = tuple[int, ...]
pytestmark = pytest.mark.anyio
__all__ = ["plant"]

SINGLE = np.dtype(np.float32)
LAYOUTS = [(3,), (1, 3, 2)]


class DeviceJob(Job):
    """Simulated workers whose first two replicas each are on the first planted GPU, the others on the second."""

    def __init__(self, machine: Machine | None, *counts: int, **options: Any) -> None:
        super().__init__(*counts, kind="GPU", **options)
        self.machine = machine
        self.counts = counts

    def ordinal_of(self, replica_id: int) -> int:
        index_on_worker = [index for count in self.counts for index in range(count)][replica_id]
        return int(index_on_worker >= 2)


def planted(plant: Plant, **options: Any) -> Machine:
    machine = plant(2, **options)
    aiodist.set_logical_devices("GPU:0", 2)
    return machine


async def check(machine: Machine, layout: Layout, call: Call, values: list[np.ndarray], **options: Any) -> None:
    """Compare the results of device arrays, alone and in a nest with host arrays, with those of host arrays."""
    job = DeviceJob(machine, *layout, **options)
    values = values[: sum(layout)]

    async def on_devices(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        value = machine.put(values[me], job.ordinal_of(me))
        return await call(ctx, value), await call(ctx, {"host": values[me], "value": value, "more": [value]})

    async def on_host(ctx: ReplicaContext) -> Any:
        return await call(ctx, values[ctx.replica_id_in_sync_group])

    wanted = await Job(*layout, **options).values(on_host)
    for me, (alone, nest) in enumerate(await job.values(on_devices)):
        assert_same_bits(nest["host"], wanted[me])
        for result in (alone, nest["value"], nest["more"][0]):
            assert isinstance(result, PlantedArray)
            assert result.ordinal == job.ordinal_of(me)
            assert_same_bits(result.numpy(), wanted[me])
        assert len({id(array.memory) for array in (alone, nest["value"], nest["more"][0])}) == 3


@pytest.mark.parametrize("size", [0, 5, 700], ids=["empty", "in the record", "beside it"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.SUM, SINGLE), (ReduceOp.MEAN, BFLOAT16), (ReduceOp.MAX, SINGLE), (ReduceOp.MEAN, np.dtype(np.uint32)),
        (ReduceOp.PRODUCT, np.dtype(np.complex64)),
    ],
    ids=str,
)  # fmt: skip
async def test_all_reduce(plant: Plant, op: ReduceOp, dtype: np.dtype, layout: Layout, size: int) -> None:
    values = arrays.buffers(5, sum(layout), (size,), dtype)
    await check(planted(plant), layout, lambda ctx, value: ctx.all_reduce(op, value), values)


@pytest.mark.parametrize("options", [{"reduction": "ordered"}, {"accumulate": "float64"}], ids=str)
async def test_all_reduce_with_options(plant: Plant, options: dict[str, str]) -> None:
    values = arrays.buffers(7, 6, (90,), SINGLE)
    await check(planted(plant), (1, 3, 2), lambda ctx, value: ctx.all_reduce("MEAN", value), values, **options)


@pytest.mark.parametrize("walls", [set(), {frozenset({0, 1})}], ids=["peers", "no peers"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_what_moves_values(plant: Plant, layout: Layout, walls: Any) -> None:
    n = sum(layout)
    machine = planted(plant, walls=walls, unloaded=True)
    values = arrays.buffers(3, n, (2 * n, 3 * n), SINGLE)
    calls: list[Call] = [
        lambda ctx, value: ctx.broadcast(value, n - 1),
        lambda ctx, value: ctx.all_gather(value, 1),
        lambda ctx, value: ctx.reduce_scatter("SUM", value, 1),
        lambda ctx, value: ctx.all_to_all(value, 0, 1),
    ]
    for call in calls:
        await check(machine, layout, call, values)


async def test_replicas_that_have_joined_contribute_nothing(plant: Plant) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 2, 1, 1)
    seen: dict[int, list[Any]] = {me: [] for me in range(4)}

    async def program(ctx: ReplicaContext) -> None:
        me = ctx.replica_id_in_sync_group
        for step in range(me + 1):
            value = machine.put(np.full(200, me + step, SINGLE), job.ordinal_of(me))
            total = await ctx.all_reduce("SUM", {"v": value})
            whole = await ctx.all_gather(value, 0)
            seen[me].append((set(total["v"].numpy()), set(whole.numpy())))
        await ctx.join()

    await job.values(program)
    steps = [({6}, {0, 1, 2, 3}), ({9}, {2, 3, 4}), ({9}, {4, 5}), ({6}, {6})]
    assert seen == {me: steps[: me + 1] for me in range(4)}


ROWS = [range(1), range(1, 3)]
"""The replicas of each of two workers."""


def per_replica(job: DeviceJob, machine: Machine, rank: int, values: list[np.ndarray]) -> aiodist.PerReplica[Any]:
    return aiodist.PerReplica([machine.put(values[me], job.ordinal_of(me)) for me in ROWS[rank]])


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.int32)], ids=str)
@pytest.mark.parametrize("axis", [None, 0, (0, 1)], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.MEAN, ReduceOp.MAX])
async def test_reduce_outside(plant: Plant, op: ReduceOp, axis: Any, dtype: np.dtype) -> None:
    values = [arrays.values(k, (4 if axis is None else 2 + k, 3), dtype) for k in range(3)]
    machine = planted(plant)
    job, plain = DeviceJob(machine, 1, 2), Job(1, 2)
    rows = [aiodist.PerReplica([values[me] for me in row]) for row in ROWS]

    async def on_host(strategy: Any) -> Any:
        return await strategy.reduce(op, rows[plain.strategies.index(strategy)], axis)

    async def on_devices(strategy: Any) -> Any:
        rank = job.strategies.index(strategy)
        nest = {"x": per_replica(job, machine, rank, values), "host": rows[rank], "none": None}
        return await strategy.reduce(op, nest, axis)

    with np.errstate(all="ignore"):
        wanted = await plain.everywhere(on_host)
        found = await job.everywhere(on_devices)
    for nest, same in zip(found, wanted, strict=True):
        assert isinstance(nest["x"], PlantedArray), nest
        assert nest["x"].ordinal == 0
        assert_same_bits(nest["x"].numpy(), same)
        assert_same_bits(nest["host"], same)
        assert nest["none"] is None


@on_trio_too
async def test_call_is_cancelled_while_devices_copy_its_values(plant: Plant) -> None:
    machine = planted(plant)
    gate = machine.driver.gate = threading.Event()
    job = DeviceJob(machine, 1, 2)
    scopes = [anyio.CancelScope(), anyio.CancelScope()]

    async def one(strategy: Any) -> Any:
        here = job.strategies.index(strategy)
        value = per_replica(job, machine, here, [np.ones(4, SINGLE)] * 3)
        try:
            with scopes[here]:
                await strategy.reduce("SUM", value, None)
        except aiodist.IncompleteCollectiveError:  # the other's cancellation has come first
            return True
        return scopes[here].cancelled_caught

    async def cancel() -> None:
        await anyio.to_thread.run_sync(machine.driver.waited_for.wait)
        for scope in scopes:
            scope.cancel()
        await anyio.wait_all_tasks_blocked()
        gate.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel)
        assert await job.everywhere(one) == [True, True]


@pytest.mark.skipif(not devices.find_gpus().gpus, reason=f"no GPU: {devices.find_gpus().missing}")
async def test_on_a_gpu() -> None:
    cuda: Any = importlib.import_module("numba.cuda")
    job = DeviceJob(None, 1, 1)

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        value = cuda.to_device(np.arange(100_000, dtype=SINGLE) * (me + 1))
        mean, whole = await ctx.all_reduce("MEAN", value), await ctx.all_gather(value, 0)
        return mean.copy_to_host(), whole.copy_to_host()

    both = np.concatenate([np.arange(100_000, dtype=SINGLE), np.arange(100_000, dtype=SINGLE) * 2])
    for mean, whole in await job.values(program):
        assert_same_bits(mean, np.arange(100_000, dtype=SINGLE) * SINGLE.type(1.5))
        assert_same_bits(whole, both)
