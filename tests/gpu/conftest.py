"""A machine with planted GPUs, and a framework whose arrays lie on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiodist.gpu import process
from aiodist.gpu.execute import Executor
from aiodist.vocabulary import device_arrays, gpus
from aiodist.vocabulary.device_arrays import DeviceArray, DeviceType
from tests.gpu.fake_driver import FakeDriver, FakeMemory, placed

if TYPE_CHECKING:
    from collections.abc import Callable


class PlantedArray:
    """An array on a planted GPU; its class is its framework's only sign."""

    def __init__(self, memory: FakeMemory, shape: tuple[int, ...], dtype: np.dtype, ordinal: int) -> None:
        self.memory = memory
        self.shape = shape
        self.dtype = dtype
        self.ordinal = ordinal

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.ordinal

    def numpy(self) -> np.ndarray:
        return self.memory.array.copy().view(self.dtype).reshape(self.shape)


class Machine:
    """Planted GPUs and their driver.

    Attributes:
        stream: the handle of the stream on which the framework works.
    """

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.stream = 7

    def put(self, values: np.ndarray, ordinal: int) -> PlantedArray:
        return PlantedArray(placed(self.driver, ordinal, values), values.shape, values.dtype, ordinal)

    def see(self, leaf: Any) -> DeviceArray:
        return DeviceArray(leaf.memory.address, leaf.shape, leaf.dtype, leaf.ordinal, self.stream, leaf)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype, ordinal: int) -> PlantedArray:
        memory = self.driver.allocate(ordinal, int(np.prod(shape)) * dtype.itemsize)
        return PlantedArray(memory, shape, dtype, ordinal)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """Return a function that gives this machine GPUs with a driver, made with the given options."""

    def planted(count: int = 2, **options: Any) -> Machine:
        machine = Machine(FakeDriver(**options))
        found = gpus.Found(tuple(gpus.Gpu(k, "planted", (9, 0)) for k in range(count)), "13.0")
        monkeypatch.setattr(gpus, "logical", gpus.LogicalGpus())
        monkeypatch.setattr(gpus, "find", lambda: found)
        executor = Executor(machine.driver)
        monkeypatch.setattr(process, "executor", lambda: executor)
        kind = DeviceType("planted", machine.see, machine.empty)
        monkeypatch.setitem(device_arrays.TYPES, PlantedArray.__module__.partition(".")[0], kind)
        return machine

    return planted
