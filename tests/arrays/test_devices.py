"""Device names: every spelling, one canonical form."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist import DeviceNotFoundError, MirroredStrategy
from aiodist._arrays.devices import available, canonical, resolve


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("CPU:0", "CPU:0"),
        ("cpu:1", "CPU:1"),
        ("/cpu:1", "CPU:1"),
        ("Cpu:007", "CPU:7"),
        ("device:CPU:3", "CPU:3"),
        ("/device:CPU:3", "CPU:3"),
        ("GPU:0", "GPU:0"),
        ("/gpu:12", "GPU:12"),
        ("cuda:0", "GPU:0"),
        ("CUDA:1", "GPU:1"),
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
    [
        "",
        "CPU",
        "CPU:",
        ":0",
        "CPU:-1",
        "CPU:0:1",
        "CPU 0",
        " CPU:0",
        "CPU:0\n",
        "/job:x/CPU:0",
        "CPU:x",
        "//CPU:0",
        "CPU:٣",
    ],
)
def test_misspelled_device(spelling: str) -> None:
    with pytest.raises(ValueError, match="expected a device such as 'CPU:0' or 'GPU:1', got "):
        canonical(spelling)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"unknown kind of device 'TPU' in 'TPU:0'; the kinds are CPU and GPU"):
        MirroredStrategy(["CPU:0", "TPU:0"])


@pytest.mark.parametrize("device", [0, None, b"CPU:0", ("CPU", 0)])
def test_device_that_is_no_string(device: Any) -> None:
    with pytest.raises(TypeError, match="a device is named by a string"):
        MirroredStrategy([device])


def test_a_single_string_is_no_sequence_of_devices() -> None:
    with pytest.raises(TypeError, match=r"write \['CPU:0'\]"):
        MirroredStrategy("CPU:0")


def test_devices_have_an_order() -> None:
    with pytest.raises(TypeError, match="for replicas have an order"):
        MirroredStrategy({"CPU:0", "CPU:1"})  # type: ignore[arg-type]


def test_no_devices() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        MirroredStrategy([])


@pytest.mark.parametrize("devices", [["CPU:0", "CPU:0"], ["CPU:1", "CPU:0", "/cpu:1"], ["cpu:0", "/device:CPU:00"]])
def test_device_given_twice(devices: list[str]) -> None:
    with pytest.raises(ValueError, match=r"each replica needs a device of its own, got 'CPU:\d' twice"):
        MirroredStrategy(devices)


def test_absent_device_lists_what_exists() -> None:
    with pytest.raises(DeviceNotFoundError, match=r"no device 'GPU:63' here; these exist: .*CPU:0.*CPU:k for every k"):
        MirroredStrategy(["CPU:0", "cuda:63"])
    assert issubclass(DeviceNotFoundError, ValueError)


def test_any_cpu_exists() -> None:
    assert resolve(["CPU:0", "CPU:99999"]) == ("CPU:0", "CPU:99999")


def test_no_choice_means_all_gpus_or_one_cpu() -> None:
    devices = resolve(None)
    gpus = tuple(name for name in available() if name.startswith("GPU"))
    assert devices == (gpus or ("CPU:0",))


def test_any_sequence_of_names_serves() -> None:
    assert resolve(("cpu:2", "cpu:1")) == ("CPU:2", "CPU:1")


@pytest.mark.parametrize("name", ["/job:worker/replica:0/task:1/device:CPU:0", "/job:a/replica:1/task:0/GPU:0"])
def test_device_of_another_task(name: str) -> None:
    with pytest.raises(DeviceNotFoundError, match="is a device of another task"):
        canonical(name)


def test_number_of_devices() -> None:
    assert resolve(3) == ("CPU:0", "CPU:1", "CPU:2")
    for number in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="must be a number of replicas, at least 1"):
            resolve(number)  # type: ignore[arg-type]
