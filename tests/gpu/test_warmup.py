"""strategy.warmup of replicas on GPUs: the kernels that their collectives need, loaded beside the event loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiodist_kernels as kernels
from aiodist import MirroredStrategy, get_replica_context, set_logical_devices
from aiodist._gpu import enqueue
from aiodist._strategy import warmup
from tests.kernels.arrays import BFLOAT16

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

SINGLE = np.dtype(np.float32)


async def test_no_collective_has_to_compile_afterwards(
    plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = plant(2, unloaded=True)
    set_logical_devices("GPU:0", 2)
    strategy = MirroredStrategy()
    monkeypatch.setattr(warmup, "warm", lambda specs: pytest.fail("there is no replica on a CPU"))
    threads: list[int] = []
    load = machine.driver.load

    def noted(device: int, form: Any) -> None:
        threads.append(threading.get_ident())
        load(device, form)

    monkeypatch.setattr(machine.driver, "load", noted)
    await strategy.warmup({"w": np.zeros(3, SINGLE), "b": [machine.put(np.zeros(2, BFLOAT16), 0)]})
    assert {device for device, _ in machine.driver.loaded} == {0, 1}
    assert threading.get_ident() not in threads
    monkeypatch.setattr(machine.driver, "load", lambda *_: pytest.fail("it was to be there"))

    async def step() -> None:
        me = get_replica_context().replica_id_in_sync_group
        for dtype in (SINGLE, BFLOAT16):
            value = machine.put(np.ones(3, dtype), [0, 0, 1][me])
            for op in ("SUM", "MEAN"):
                await get_replica_context().all_reduce(op, value)
                await get_replica_context().all_reduce(op, [value, value])
                await get_replica_context().all_reduce(op, [value] * 8)

    await strategy.run(step)


async def test_replicas_on_cpus_need_no_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[kernels.KernelSpec] = []
    monkeypatch.setattr(warmup, "warm", warmed.extend)
    monkeypatch.setattr(enqueue, "queue", lambda: pytest.fail("there is no replica on a GPU"))
    await MirroredStrategy(["CPU:0", "CPU:1"]).warmup()
    assert {spec.count for spec in warmed} == {2}
