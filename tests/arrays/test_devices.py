"""Devices: the spellings of names, the GPUs that a driver reports, and logical devices."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiodist import DeviceNotFoundError, MirroredStrategy, set_logical_devices
from aiodist._arrays import devices
from aiodist._arrays.devices import available, canonical, resolve
from tests.project.paths import run_python


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("CPU:0", "CPU:0"),
        ("/cpu:1", "CPU:1"),
        ("Cpu:007", "CPU:7"),
        ("device:CPU:3", "CPU:3"),
        ("/gpu:12", "GPU:12"),
        ("cuda:0", "GPU:0"),
        ("/job:localhost/replica:0/task:0/device:GPU:0", "GPU:0"),
        ("/JOB:worker/REPLICA:0/TASK:0/DEVICE:CPU:4", "CPU:4"),
        ("job:localhost/replica:0/task:0/cpu:4", "CPU:4"),
    ],
)
def test_canonical_form(spelling: str, name: str) -> None:
    assert canonical(spelling) == name
    assert canonical(name) == name


@pytest.mark.parametrize(
    "spelling",
    ["", "CPU", "CPU:", ":0", "CPU:-1", "CPU:0:1", "CPU 0", " CPU:0", "CPU:0\n", "/job:x/CPU:0", "//CPU:0", "CPU:٣"],
)
def test_misspelled_device(spelling: str) -> None:
    with pytest.raises(ValueError, match="expected a device such as 'CPU:0' or 'GPU:1', got "):
        canonical(spelling)


def test_resolve() -> None:
    assert resolve(3) == ("CPU:0", "CPU:1", "CPU:2")
    names: list[Any] = [("cpu:2", "CPU:99999"), np.array(["cpu:2", "CPU:99999"])]
    assert [*map(resolve, names)] == [("CPU:2", "CPU:99999")] * 2
    assert resolve(None) == (tuple(name for name in available() if name.startswith("GPU")) or ("CPU:0",))


class PlantedDriver:
    """A driver's library with given answers."""

    def __init__(self, names: list[bytes], error: int = 0) -> None:
        self.names = names
        self.error = error

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.error

    def cuDriverGetVersion(self, version: Any) -> None:  # noqa: N802
        version._obj.value = 13000

    def cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = len(self.names)

    def cuDeviceGet(self, device: Any, ordinal: int) -> None:  # noqa: N802
        device._obj.value = ordinal

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> None:  # noqa: N802
        name.value = self.names[device.value]

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:  # noqa: N802
        value._obj.value = {75: 9, 76: 0}[attribute]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives this machine GPUs with these names, or a driver error."""
    monkeypatch.setattr(devices, "logical", devices.LogicalGpus())

    def plant(*names: bytes, error: int = 0) -> None:
        found = devices.query(PlantedDriver(list(names), error))
        monkeypatch.setattr(devices, "find_gpus", lambda: found)

    return plant


def test_gpus_of_a_driver(machine: Any) -> None:
    machine(b"H200", b"H100")
    both = devices.Gpu(0, "H200", (9, 0)), devices.Gpu(1, "H100", (9, 0))
    assert devices.find_gpus() == devices.Found(both, "13.0")
    assert available() == ("CPU:0", "GPU:0", "GPU:1")
    assert resolve(None) == ("GPU:0", "GPU:1")
    assert MirroredStrategy().num_replicas_in_sync == 2


@pytest.mark.parametrize(("error", "why"), [(100, "sees no GPU"), (999, "does not start .*999")])
def test_driver_without_gpus(machine: Any, error: int, why: str) -> None:
    machine(error=error)
    assert resolve(None) == ("CPU:0",)
    with pytest.raises(DeviceNotFoundError, match=rf"no device 'GPU:0' here; these exist: CPU:0 .*{why}.*pip install"):
        resolve(["GPU:0"])


def test_logical_devices_are_numbered_consecutively(machine: Any) -> None:
    machine(b"A", b"B")
    set_logical_devices("cuda:0", 3)
    assert available() == ("CPU:0", "GPU:0", "GPU:1", "GPU:2", "GPU:3")
    assert [devices.gpu_number(f"GPU:{k}") for k in range(4)] == [0, 0, 0, 1]
    set_logical_devices("GPU:0", 1)
    MirroredStrategy(["CPU:0"])
    set_logical_devices("GPU:0", 2)
    with pytest.raises(DeviceNotFoundError, match=r"exist: CPU:0, GPU:0, GPU:1, GPU:2 .*set_logical_devices\("):
        resolve(["GPU:3"])
    MirroredStrategy(["GPU:2"])
    with pytest.raises(RuntimeError, match="before the first strategy"):
        set_logical_devices("GPU:0", 4)


@pytest.mark.parametrize(
    ("device", "count", "kind", "message"),
    [
        ("CPU:0", 2, ValueError, "expected a GPU"),
        ("GPU:1", 2, DeviceNotFoundError, "no GPU 'GPU:1' to split; these exist: GPU:0"),
        ("GPU:0", 0, ValueError, "at least 1"),
    ],
)
def test_invalid_splits(machine: Any, device: Any, count: Any, kind: type[Exception], message: str) -> None:
    machine(b"A")
    with pytest.raises(kind, match=message):
        set_logical_devices(device, count)


def test_finding_no_gpu_imports_nothing(tmp_path: Path) -> None:
    program = (
        "import aiodist, sys; before = set(sys.modules); aiodist.MirroredStrategy();"
        "print({name.partition('.')[0] for name in set(sys.modules) - before} & {'numba', 'cuda', 'torch', 'cupy'})"
    )
    assert run_python(["-c", program], tmp_path) == "set()\n"
