"""Collectives of device arrays over several workers, on planted GPUs: the same bits as of host arrays."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from aiodist import (
    CollectiveMismatchError,
    CommunicationOptions,
    Reason,
    ReduceOp,
    ReplicaContext,
    set_logical_devices,
)
from aiodist._arrays import gpus
from tests.gpu.conftest import Machine, PlantedArray, plant
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits
from tests.workers.simulated import Job, on_trio_too

if TYPE_CHECKING:
    from collections.abc import Callable

    Plant = Callable[..., Machine]
    Call = Callable[[ReplicaContext, Any], Any]

pytestmark = pytest.mark.anyio
__all__ = ["plant"]

SINGLE = np.dtype(np.float32)
LAYOUTS = [(3,), (1, 3, 2)]


class DeviceJob(Job):
    """Simulated workers whose replicas are on planted GPUs, two on the first and the others on the second."""

    def __init__(self, machine: Machine | None, *counts: int, **options: Any) -> None:
        super().__init__(*counts, kind="GPU", **options)
        self.machine = machine
        self.counts = counts

    def ordinal_of(self, replica_id: int) -> int:
        """Return a replica's GPU."""
        place = [place for count in self.counts for place in range(count)][replica_id]
        return 0 if place < 2 else 1


def planted(plant: Plant, **options: Any) -> Machine:
    machine = plant(2, **options)
    set_logical_devices("GPU:0", 2)
    return machine


async def check(
    machine: Machine, layout: tuple[int, ...], call: Call, values: list[np.ndarray], **options: Any
) -> None:
    """Compare what device arrays give, alone and in a nest with host arrays, with what host arrays give."""
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
async def test_all_reduce(plant: Plant, op: ReduceOp, dtype: np.dtype, layout: tuple[int, ...], size: int) -> None:
    values = arrays.buffers(5, sum(layout), (size,), dtype)
    await check(planted(plant), layout, lambda ctx, value: ctx.all_reduce(op, value), values)


@pytest.mark.parametrize(
    "options", [{"reduction": "ordered"}, {"accumulate": "float64"}, {"implementation": "nccl"}], ids=str
)
async def test_all_reduce_with_options(plant: Plant, options: dict[str, str]) -> None:
    values = arrays.buffers(7, 6, (90,), SINGLE)
    await check(planted(plant), (1, 3, 2), lambda ctx, value: ctx.all_reduce("MEAN", value), values, **options)


async def test_first_replica_says_how_to_accumulate(plant: Plant) -> None:
    async def program(ctx: ReplicaContext, value: Any) -> Any:
        first = ctx.replica_id_in_sync_group == 0
        return await ctx.all_reduce("SUM", value, CommunicationOptions(accumulate="float64") if first else None)

    values = [np.full(300, value, SINGLE) for value in (0.1, 2.0**20, 2.0**21, 0.7)]
    await check(planted(plant), (2, 2), program, values)


@pytest.mark.parametrize("walls", [set(), {frozenset({0, 1})}], ids=["peers", "no peers"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_what_moves_values(plant: Plant, layout: tuple[int, ...], walls: Any) -> None:
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


@on_trio_too
async def test_result_in_buffers_of_ones_own(plant: Plant) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 2, 1)

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        ordinal = job.ordinal_of(me)
        mine = machine.put(np.full(200, me + 1, SINGLE), ordinal)
        out = mine if me == 1 else machine.put(np.zeros(200, SINGLE), ordinal)
        assert await ctx.all_reduce("SUM", mine, out=out) is out
        return out

    for result in await job.values(program):
        assert set(result.numpy()) == {6}


async def test_replicas_that_have_joined_bring_nothing(plant: Plant) -> None:
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


async def test_arrays_that_are_folded_come_down_in_one_copy(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 2, 1)
    pieces: list[int] = []
    host_memory = machine.driver.host_memory

    def noted(nbytes: int) -> Any:
        pieces.append(nbytes)
        return host_memory(nbytes)

    monkeypatch.setattr(machine.driver, "host_memory", noted)
    dtypes = [SINGLE, BFLOAT16, np.dtype(np.int8), np.dtype(np.complex128)]

    def values(me: int) -> list[np.ndarray]:
        return [np.full((k, 3), me + k, dtypes[k % 4]) for k in range(30)]

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        return await ctx.all_reduce("SUM", [machine.put(value, job.ordinal_of(me)) for value in values(me)])

    for found in await job.values(program):
        for k, array in enumerate(found):
            assert_same_bits(array.numpy(), np.full((k, 3), 3 + 3 * k, dtypes[k % 4]))
    down = [entry for entry in machine.driver.log if entry[:2] == ("copy", -1)]
    assert len(down) == 2, "one for two replicas, and one where none is folded"
    assert len(pieces) == 4, "down and up again, on each worker"


async def test_host_and_device_arrays_of_different_workers_do_not_meet(plant: Plant) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 1, 1)

    async def program(ctx: ReplicaContext) -> None:
        value = np.ones(3, SINGLE)
        await ctx.all_reduce("SUM", value if ctx.replica_id_in_sync_group else machine.put(value, 0))

    for outcome in await job.run(program):
        assert isinstance(outcome, CollectiveMismatchError), outcome
        assert outcome.report.reason is Reason.DEVICE
        assert "all_reduce(SUM, planted.float32[3] on a GPU)" in str(outcome)


async def test_event_loop_runs_on_while_a_device_works(plant: Plant) -> None:
    machine = planted(plant)
    gate = machine.driver.gate = threading.Event()
    job = DeviceJob(machine, 2, 1)
    done: list[Any] = []

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        return await ctx.all_reduce("SUM", machine.put(np.full(9, me, SINGLE), job.ordinal_of(me)))

    async def run() -> None:
        done.extend(await job.values(program))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.to_thread.run_sync(machine.driver.waited_for.wait)
        assert not done
        gate.set()
    assert [set(result.numpy()) for result in done] == [{3.0}] * 3


@pytest.mark.skipif(not gpus.find().gpus, reason=f"no GPU: {gpus.find().missing}")
@pytest.mark.timeout(300)
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
