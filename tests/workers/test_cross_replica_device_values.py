"""reduce, gather and reduce_to of device arrays over several workers: the same bits as of host arrays."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from aiodist import (
    CollectiveMismatchError,
    IncompleteCollectiveError,
    Mirrored,
    PerReplica,
    Reason,
    ReduceOp,
    ReplicaContext,
)
from aiodist._gpu.steps import HOST
from tests.gpu.conftest import Machine, PlantedArray, plant
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, assert_same_bits
from tests.workers.simulated import Job, on_trio_too, unwrapped
from tests.workers.test_device_values import SINGLE, DeviceJob, planted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Plant = Callable[..., Machine]

pytestmark = pytest.mark.anyio
__all__ = ["plant"]

ROWS = [range(1), range(1, 3)]
"""The replicas of the two workers."""


def per_replica(job: DeviceJob, machine: Machine, rank: int, values: list[np.ndarray]) -> PerReplica[Any]:
    return PerReplica([machine.put(values[me], job.ordinal_of(me)) for me in ROWS[rank]])


async def check(machine: Machine, values: list[np.ndarray], done: Callable[[Any, Any], Awaitable[Any]]) -> None:
    """Compare what device arrays in a nest with host arrays give with what host arrays give."""
    job, plain = DeviceJob(machine, 1, 2), Job(1, 2)

    async def on_host(strategy: Any) -> Any:
        rank = plain.strategies.index(strategy)
        return await done(strategy, PerReplica([values[me] for me in ROWS[rank]]))

    async def on_devices(strategy: Any) -> Any:
        rank = job.strategies.index(strategy)
        host = PerReplica([values[me] for me in ROWS[rank]])
        return await done(strategy, {"x": per_replica(job, machine, rank, values), "host": host, "none": None})

    with np.errstate(all="ignore"):
        wanted = await plain.everywhere(on_host)
        found = await job.everywhere(on_devices)
    for nest, same in zip(found, wanted, strict=True):
        assert isinstance(nest["x"], PlantedArray), nest
        assert nest["x"].ordinal == 0
        assert_same_bits(nest["x"].numpy(), same)
        assert_same_bits(nest["host"], same)
        assert nest["none"] is None


@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT16, np.dtype(np.int32)], ids=str)
@pytest.mark.parametrize("axis", [None, 0, (0, 1)], ids=str)
@pytest.mark.parametrize("op", list(ReduceOp))
async def test_reduce(plant: Plant, op: ReduceOp, axis: Any, dtype: np.dtype) -> None:
    values = [arrays.values(k, (4 if axis is None else 2 + k, 3), dtype) for k in range(3)]
    await check(planted(plant), values, lambda strategy, value: strategy.reduce(op, value, axis))


@pytest.mark.parametrize("op", list(ReduceOp))
async def test_reduce_to(plant: Plant, op: ReduceOp) -> None:
    values = arrays.buffers(2, 3, (70,), SINGLE)
    await check(planted(plant), values, lambda strategy, value: strategy.extended.reduce_to(op, value, "GPU:0"))


async def test_results_lie_where_they_are_to_go(plant: Plant) -> None:
    machine = planted(plant, walls={frozenset({0, 1})})
    job = DeviceJob(machine, 1, 3)
    values = [np.arange(50, dtype=SINGLE) + k for k in range(4)]
    wanted = np.add.reduce(values)

    async def reduced(strategy: Any) -> Any:
        rank = job.strategies.index(strategy)
        mine = [0] if rank == 0 else [1, 2, 3]
        value = PerReplica([machine.put(values[me], job.ordinal_of(me)) for me in mine])
        host = PerReplica([np.ones(2)] * len(mine))
        pairs = [({"x": value, "h": host}, ["GPU:1", "GPU:2"]), (value, value), (host, "CPU:0"), (value, "GPU:2")]
        return await strategy.extended.batch_reduce_to("SUM", pairs)

    for rank, (nest, everywhere, plain, alone) in enumerate(await job.everywhere(reduced)):
        assert plain.tolist() == [4, 4]
        assert [part.tolist() for part in nest["h"].values] == [[4, 4]] * 2
        assert isinstance(nest["x"], Mirrored)
        assert [part.ordinal for part in nest["x"].values] == [0, 1]
        parts = list(everywhere.values) if rank else [everywhere]
        assert [part.ordinal for part in parts] == ([0, 0, 1] if rank else [0])
        assert alone.ordinal == 1
        for part in (*nest["x"].values, *parts, alone):
            assert_same_bits(part.numpy(), wanted)
        assert len({id(part.memory) for part in (*nest["x"].values, *parts, alone)}) == 3 + len(parts)


async def test_merge_functions_reduce_and_gather(plant: Plant) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 1, 2)

    async def merge(strategy: Any, value: Any) -> Any:
        total = await strategy.extended.reduce_to("SUM", value, value)
        mean = await strategy.reduce("MEAN", value, None)
        return total, strategy.experimental_distribute_values_from_function(lambda _: mean)

    async def program(ctx: ReplicaContext) -> Any:
        me = ctx.replica_id_in_sync_group
        value = machine.put(np.full(3, me, SINGLE), job.ordinal_of(me))
        total, mean = await ctx.merge_call(merge, (value,))
        assert isinstance(total, PlantedArray)
        return set(total.numpy()), set(mean.numpy())

    assert await job.values(program) == [({3}, {1})] * 3


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("op", [ReduceOp.MEAN, ReduceOp.MAX])
async def test_values_that_are_the_same_everywhere_are_reduced_as_on_one_machine(
    plant: Plant, op: ReduceOp, axis: Any
) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 2, 2)
    values = np.arange(12).reshape(3, 4)
    wanted = values if axis is None else values.mean(0) if op is ReduceOp.MEAN else values.max(0)

    async def reduced(strategy: Any) -> Any:
        mirrored = Mirrored([machine.put(values, 0), machine.put(values, 0)])
        nest = {"mirrored": mirrored, "plain": machine.put(values, 0), "host": values, "both": Mirrored([values] * 2)}
        return await strategy.reduce(op, nest, axis)

    for found in await job.everywhere(reduced):
        for result in (found["mirrored"].numpy(), found["plain"].numpy(), found["host"], found["both"]):
            assert_same_bits(result, wanted.astype(np.float64 if op is ReduceOp.MEAN else np.int64))


async def test_arrays_on_gpus_and_on_the_host_do_not_meet(plant: Plant) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 1, 1)
    values = {job.strategies[0]: machine.put(np.ones(2, SINGLE), 0), job.strategies[1]: np.ones(2, SINGLE)}
    for outcome in await job.everywhere(lambda strategy: strategy.reduce("SUM", values[strategy], None)):
        assert isinstance(outcome, CollectiveMismatchError)
        assert outcome.report.reason is Reason.DEVICE


# What goes wrong.


async def failure_of(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return how a call fails."""
    try:
        await call()
    except Exception as error:  # noqa: BLE001  (it is the outcome)
        return error


GPU_WANTED = "an array on a GPU can only go to GPUs, got the destination 'CPU:0'"


@pytest.mark.parametrize(
    ("rank", "kind", "text"),
    [
        (0, TypeError, GPU_WANTED),
        (1, TypeError, GPU_WANTED),
        (0, ValueError, "expected 1 components"),
        (1, ValueError, "expected 2 components"),
        (1, ValueError, "must have the same type"),
    ],
)
async def test_call_that_is_refused_on_one_worker_fails_on_all(
    plant: Plant, rank: int, kind: type[Exception], text: str
) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 1, 2)
    values = [np.ones(4, SINGLE)] * 3

    async def one(strategy: Any) -> Any:
        here = job.strategies.index(strategy)
        value, destination = per_replica(job, machine, here, values), "GPU:0"
        if here == rank and text == GPU_WANTED:
            destination = "CPU:0"
        elif here == rank and "components" in text:
            value = PerReplica([*value.values, value.values[0]])
        elif here == rank:
            value = PerReplica([values[1], value.values[0]])
        return await failure_of(lambda: strategy.extended.reduce_to("SUM", value, destination))

    outcomes = await job.everywhere(one)
    assert isinstance(outcomes[rank], kind), outcomes
    assert text in str(outcomes[rank])
    assert isinstance(outcomes[1 - rank], IncompleteCollectiveError)
    assert text in unwrapped(outcomes[1 - rank])


async def test_copy_down_that_fails_on_one_worker_fails_on_all(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = planted(plant)
    job = DeviceJob(machine, 1, 2)
    copy, left = machine.driver.copy, [1]

    def fail_once(*arguments: Any) -> None:
        if left and arguments[1] == HOST:
            left.pop()
            raise RuntimeError("the CUDA driver's cuMemcpyDtoHAsync failed: planted")
        copy(*arguments)

    monkeypatch.setattr(machine.driver, "copy", fail_once)

    async def one(strategy: Any) -> Any:
        value = per_replica(job, machine, job.strategies.index(strategy), [np.ones(4, SINGLE)] * 3)
        return await failure_of(lambda: strategy.reduce("SUM", value, None))

    outcomes = sorted(await job.everywhere(one), key=lambda error: isinstance(error, IncompleteCollectiveError))
    assert str(outcomes[0]).endswith("failed: planted")
    assert isinstance(outcomes[1], IncompleteCollectiveError)
    assert "RuntimeError: the CUDA driver's cuMemcpyDtoHAsync failed: planted" in unwrapped(outcomes[1])


@on_trio_too
async def test_cancelled_call_is_held_back_until_devices_are_done(plant: Plant) -> None:
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
        except IncompleteCollectiveError:  # it has heard of the other first
            return gate.is_set()
        return gate.is_set() and scopes[here].cancelled_caught

    async def cancel() -> None:
        await anyio.to_thread.run_sync(machine.driver.waited_for.wait)
        for scope in scopes:
            scope.cancel()
        await anyio.wait_all_tasks_blocked()
        gate.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel)
        assert await job.everywhere(one) == [True, True]
