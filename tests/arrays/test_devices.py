"""Device names: every spelling, one canonical form; what a strategy may be given."""

from __future__ import annotations

from typing import Any

import pytest

from aiodist import DeviceNotFoundError, MirroredStrategy
from aiodist._arrays.devices import available, canonical, resolve


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("CPU:0", "CPU:0"),
        ("/cpu:1", "CPU:1"),
        ("Cpu:007", "CPU:7"),
        ("device:CPU:3", "CPU:3"),
        ("/device:CPU:3", "CPU:3"),
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


TASK = "/job:worker/replica:0/task:1/device:CPU:0"


@pytest.mark.parametrize(
    ("devices", "error", "text"),
    [
        (["CPU:0", "TPU:0"], ValueError, "unknown kind of device 'TPU' in 'TPU:0'; the kinds are CPU and GPU"),
        ([None], TypeError, "a device is named by a string"),
        ([("CPU", 0)], TypeError, "a device is named by a string"),
        ("CPU:0", TypeError, r"write \['CPU:0'\]"),
        ({"CPU:0", "CPU:1"}, TypeError, "for replicas have an order"),
        ([], ValueError, "at least one device"),
        (["CPU:1", "CPU:0", "/cpu:1"], ValueError, r"each replica needs a device of its own, got 'CPU:\d' twice"),
        (["CPU:0", "cuda:63"], DeviceNotFoundError, r"no device 'GPU:63' here; these exist: .*CPU:k for every k"),
        ([TASK], DeviceNotFoundError, "is a device of another task"),
        (["/job:a/replica:1/task:0/GPU:0"], DeviceNotFoundError, "is a device of another task"),
        *((number, ValueError, "must be a number of replicas, at least 1") for number in (0, -1, True, 2.5)),
    ],
)
def test_what_a_strategy_refuses(devices: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        MirroredStrategy(devices)


def test_what_a_strategy_takes() -> None:
    assert resolve(3) == ("CPU:0", "CPU:1", "CPU:2")
    assert resolve(("cpu:2", "CPU:99999")) == ("CPU:2", "CPU:99999")
    assert resolve(None) == (tuple(name for name in available() if name.startswith("GPU")) or ("CPU:0",))
