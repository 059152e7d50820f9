"""all_reduce of device arrays in replica functions, on planted GPUs, on every event loop; and strategy.warmup."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import pytest

import aiodist_kernels as kernels
from aiodist import (
    CollectiveMismatchError,
    MirroredStrategy,
    Reason,
    ReduceOp,
    get_replica_context,
    set_logical_devices,
)
from aiodist._gpu import enqueue
from aiodist._strategy import strategy as strategies
from aiodist_kernels import reduce
from tests.gpu.conftest import Machine, Plant, PlantedArray, cancelled_while_devices_work
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, SINGLE, assert_same_bits

pytestmark = pytest.mark.anyio


async def all_reduced(
    machine: Machine, op: ReduceOp, dtype: np.dtype, ordinals: list[int], shape: tuple[int, ...]
) -> None:
    """Reduce a nest of replicas on these GPUs, and check the results."""
    strategy = MirroredStrategy()
    assert strategy.num_replicas_in_sync == len(ordinals)
    buffers = arrays.buffers(5, len(ordinals), shape, dtype)
    wanted = reduce(op, buffers)

    async def step() -> tuple[dict[str, Any], PlantedArray]:
        ctx = get_replica_context()
        me = ctx.replica_id_in_sync_group
        value = machine.put(buffers[me], ordinals[me])
        nest = await ctx.all_reduce(op, {"value": value, "other": [value], "loss": float(me), "host": np.ones(2)})
        return nest, await ctx.all_reduce(op, value)

    for nest, single in strategy.experimental_local_results(await strategy.run(step)):
        assert isinstance(nest["host"], np.ndarray)
        for result in (nest["value"], nest["other"][0], single):
            assert isinstance(result, PlantedArray)
            assert_same_bits(result.numpy(), wanted)


async def test_work_that_is_done_at_once_needs_no_thread(plant: Plant) -> None:
    machine = plant(2)
    machine.driver.eager = True
    await all_reduced(machine, ReduceOp.SUM, SINGLE, [0, 1], (6,))
    assert machine.driver.host_waits == 0


async def test_work_is_ordered_with_framework_and_replica_streams(plant: Plant) -> None:
    machine = plant(2)
    frameworks = {("foreign", 0, 7), ("foreign", 1, 7)}
    for theirs in (frameworks, frameworks | {("replica", "GPU:0", 0), ("replica", "GPU:1", 1)}):
        machine.driver.log.clear()
        await all_reduced(machine, ReduceOp.SUM, SINGLE, [0, 1], (6,))
        for what in ("record", "wait"):
            assert {entry[1] for entry in machine.driver.log if entry[0] == what and entry[1][0] != "own"} == theirs
        for k in range(2):
            machine.driver.stream(k, f"GPU:{k}")  # as `run_sync` does


async def test_per_thread_streams_are_used_in_the_loops_thread_only(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = plant(2, unloaded=True)
    machine.stream = 2
    threads: set[int] = set()
    record = machine.driver.record

    def noted(stream: Any) -> Any:
        threads.add(threading.get_ident())
        return record(stream)

    monkeypatch.setattr(machine.driver, "record", noted)
    await all_reduced(machine, ReduceOp.SUM, SINGLE, [0, 1], (6,))
    assert threads == {threading.get_ident()}


def summing(machine: Machine) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        ctx = get_replica_context()
        me = ctx.replica_id_in_sync_group
        await ctx.all_reduce(ReduceOp.SUM, machine.put(np.full(8, 1 + me, SINGLE), me))

    return step


async def test_cancelled_run_waits_for_the_device(plant: Plant) -> None:
    machine = plant(2)
    strategy = MirroredStrategy()
    await cancelled_while_devices_work(machine, lambda: strategy.run(summing(machine)))
    await all_reduced(machine, ReduceOp.SUM, SINGLE, [0, 1], (6,))


async def test_device_error_is_raised_by_the_run(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = plant(2)

    def fail(event: Any) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch, anyio.fail_after(10):
        patch.setattr(machine.driver, "is_done", fail)
        with pytest.raises(RuntimeError, match="an illegal memory access"):
            await MirroredStrategy().run(summing(machine))


async def test_host_and_device_arrays_mismatch(plant: Plant) -> None:
    machine = plant(2)
    strategy = MirroredStrategy()

    async def step() -> None:
        ctx = get_replica_context()
        value = np.ones(3, SINGLE)
        mine = machine.put(value, 0) if ctx.replica_id_in_sync_group == 0 else value
        await ctx.all_reduce(ReduceOp.SUM, mine)

    with pytest.raises(CollectiveMismatchError) as caught:
        await strategy.run(step)
    assert caught.value.report.reason is Reason.DEVICE
    assert "all_reduce(SUM, planted.float32[3] on a GPU)" in str(caught.value)
    assert "all_reduce(SUM, float32[3])" in str(caught.value)


async def test_warmup_loads_all_kernels(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = plant(2, unloaded=True)
    set_logical_devices("GPU:0", 2)
    strategy = MirroredStrategy()
    monkeypatch.setattr(strategies, "warm", lambda _: pytest.fail("there is no replica on a CPU"))
    threads: list[int] = []
    load = machine.driver.load

    def noted(device: int, form: Any) -> None:
        threads.append(threading.get_ident())
        load(device, form)

    monkeypatch.setattr(machine.driver, "load", noted)
    await strategy.warmup({"w": np.zeros(3, SINGLE), "b": [machine.put(np.zeros(2, BFLOAT16), 0)]})
    assert {device for device, _ in machine.driver.loaded} == {0, 1}
    assert threading.get_ident() not in threads
    monkeypatch.setattr(machine.driver, "load", lambda *_: pytest.fail("it should be loaded"))

    async def step() -> None:
        me = get_replica_context().replica_id_in_sync_group
        for dtype in (SINGLE, BFLOAT16):
            value = machine.put(np.ones(3, dtype), [0, 0, 1][me])
            for op in ("SUM", "MEAN"):
                await get_replica_context().all_reduce(op, value)
                await get_replica_context().all_reduce(op, [value, value])
                await get_replica_context().all_reduce(op, [value] * 8)

    await strategy.run(step)


async def test_warmup_of_cpu_replicas_loads_no_gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[kernels.Plan] = []
    monkeypatch.setattr(strategies, "warm", warmed.extend)
    monkeypatch.setattr(enqueue, "queue", lambda: pytest.fail("there is no replica on a GPU"))
    await MirroredStrategy(["CPU:0", "CPU:1"]).warmup()
    assert {spec.count for spec in warmed} == {2}
