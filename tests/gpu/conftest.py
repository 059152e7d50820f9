"""A machine with planted GPUs, and a framework for arrays on them."""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist._arrays import device as frameworks
from aiodist._arrays import devices
from aiodist._arrays.device import ArraySpec, DeviceArray, DeviceType
from aiodist._gpu import enqueue
from aiodist._gpu.enqueue import Queue
from tests.gpu.fake_driver import FakeDriver, FakeMemory, placed


@dataclass(eq=False)
class PlantedArray:
    """An array on a planted GPU, recognised by its class alone."""

    memory: FakeMemory
    shape: tuple[int, ...]
    dtype: np.dtype
    ordinal: int
    offset: int = 0
    read_only: bool = False

    def numpy(self) -> np.ndarray:
        plain = self.memory.array.copy()[self.offset :]
        return plain[: math.prod(self.shape) * self.dtype.itemsize].view(self.dtype).reshape(self.shape)


@dataclass(eq=False)
class Machine:
    """Planted GPUs and their driver."""

    driver: FakeDriver
    stream: int = 7  # the handle of the framework's current stream

    def put(self, values: np.ndarray, ordinal: int) -> PlantedArray:
        return PlantedArray(placed(self.driver, ordinal, values), values.shape, values.dtype, ordinal)


class Planted(DeviceType):
    """The framework of the planted arrays."""

    name = "planted"

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def is_on_gpu(self, leaf: Any) -> bool:
        return isinstance(leaf, PlantedArray)

    def view(self, leaf: Any) -> DeviceArray:
        address = leaf.memory.address + leaf.offset
        return DeviceArray(address, leaf.shape, leaf.dtype, leaf.ordinal, self.machine.stream, leaf)

    def buffer(self, leaf: Any) -> DeviceArray:
        if leaf.read_only:
            raise TypeError("out must be writeable, got a read-only array")
        return self.view(leaf)

    def make(
        self, specs: Sequence[ArraySpec], ordinal: int, allocate: Callable[[int, int], Any]
    ) -> list[tuple[PlantedArray, int]]:
        made = []
        for shape, dtype in specs:
            memory = self.machine.driver.allocate(ordinal, math.prod(shape) * dtype.itemsize)
            made.append((PlantedArray(memory, shape, dtype, ordinal), memory.address))
        return made

    def stream(self, ordinal: int) -> int:
        return self.machine.stream


Plant = Callable[..., Machine]
"""The fixture `plant`."""


def planted_machine(patch: pytest.MonkeyPatch, count: int = 2, **options: Any) -> Machine:
    """Give this machine GPUs with a driver, made with the given options."""
    machine = Machine(FakeDriver(**options))
    found = devices.Found(tuple(devices.Gpu(k, "planted", (9, 0)) for k in range(count)), "13.0")
    patch.setattr(devices, "logical", devices.LogicalGpus())
    patch.setattr(devices, "find_gpus", lambda: found)
    queue = Queue(machine.driver)
    patch.setattr(enqueue, "queue", lambda: queue)
    patch.setitem(frameworks.TYPES, PlantedArray.__module__.partition(".")[0], Planted(machine))
    return machine


async def cancelled_while_devices_work(machine: Machine, call: Callable[[], Awaitable[object]]) -> None:
    """Cancel a call while devices read its inputs, and check that it ends only when they have finished."""
    gate = machine.driver.gate = threading.Event()
    scope, ended = anyio.CancelScope(), anyio.Event()

    async def wait() -> None:
        with scope:
            await call()
        assert scope.cancelled_caught
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.to_thread.run_sync(machine.driver.waited_for.wait)
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not ended.is_set()
        gate.set()
    assert ended.is_set()
    machine.driver.gate = None


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Return `planted_machine` for this test."""
    return partial(planted_machine, monkeypatch)
