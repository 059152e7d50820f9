"""Devices: their names, the machine's GPUs, and logical devices.

A name has the spellings of TensorFlow and CUDA, and one canonical form, ``CPU:0`` or ``GPU:0``. ``CPU:k`` is a logical
device and exists for every k; each has a worker thread of its own while it is used. ``GPU:k`` is a physical GPU, or one
of several logical devices on one.

Only the driver's library is asked for GPUs; nothing of CUDA is imported. Without a driver this costs one failed library
look-up per process. With one the driver starts, which a program that uses its GPUs needs in any case.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from aiodist._arrays.options import integer
from aiodist._core.errors import DeviceNotFoundError

INSTALL: Final = "pip install 'aiodist[cuda]'"

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class Gpu(NamedTuple):
    """One physical GPU."""

    ordinal: int  # the driver's number for it
    name: str  # the model
    capability: tuple[int, int]  # the compute capability, e.g. (9, 0)


class Found(NamedTuple):
    """The driver's answer."""

    gpus: tuple[Gpu, ...] = ()  # in the driver's order
    driver: str | None = None  # the CUDA version that it supports, e.g. "13.0"; None without a driver
    missing: str = ""  # why there are no GPUs, for users


@cache
def find_gpus() -> Found:
    """Return the driver's answer, from the first call."""
    try:
        library: Any = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return Found(missing="no NVIDIA driver is installed (its library, libcuda, was not found)")
    return query(library)


def query(library: Any) -> Found:
    """Ask the driver's library."""
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    error = library.cuInit(0)
    if error == _NO_DEVICE:
        missing = "the NVIDIA driver sees no GPU (does CUDA_VISIBLE_DEVICES hide it?)"
        return Found(driver=driver, missing=missing)
    if error:
        return Found(driver=driver, missing=f"the NVIDIA driver does not start (cuInit returns error {error})")
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetCount(ctypes.byref(count))
    gpus = []
    for ordinal in range(count.value):
        library.cuDeviceGet(ctypes.byref(device), ordinal)
        library.cuDeviceGetName(name, len(name), device)
        library.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        library.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        gpus.append(Gpu(ordinal, name.value.decode(), (major.value, minor.value)))
    return Found(tuple(gpus), driver)


class LogicalGpus:
    """The devices ``GPU:0``, ``GPU:1`` …: each a physical GPU, or one of several on a physical GPU."""

    def __init__(self) -> None:
        self.split: dict[int, int] = {}
        self.in_use = False

    def ordinals(self) -> tuple[int, ...]:
        """Return the physical GPU of each logical device, by the logical device's index."""
        return tuple(gpu.ordinal for gpu in find_gpus().gpus for _ in range(self.split.get(gpu.ordinal, 1)))

    def names(self) -> tuple[str, ...]:
        """Return the devices' canonical names."""
        return tuple(f"GPU:{index}" for index in range(len(self.ordinals())))


logical = LogicalGpus()


def gpu_number(name: str) -> int:
    """Return the driver's number for the physical GPU of an existing device."""
    return logical.ordinals()[int(name.removeprefix("GPU:"))]


def why_absent() -> str:
    """Return a sentence on why there are no GPUs, or no more, and what to do."""
    found = find_gpus()
    if found.gpus:
        return 'one GPU serves as several devices after set_logical_devices("GPU:0", count)'
    return f"{found.missing}; replicas run on CPU:k, and on GPUs with a driver and {INSTALL}"


# Names.

_SPELLING = re.compile(
    r"""
    (?: /? job:[a-z][a-z0-9_]* / replica: (?P<replica> \d+ ) / task: (?P<task> \d+ ) (?= / ) )?   # TensorFlow's
    (?: / )? (?: device: )?
    (?P<kind> [a-z]+ ) : (?P<index> \d+ )
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
_KINDS = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU"}


def canonical(device: str) -> str:
    """Return the canonical form of a device's name, e.g. ``"CPU:0"`` for ``"/cpu:0"``.

    Raises:
        TypeError: ``device`` is not a string.
        ValueError: it is not spelled as a device, or its kind is unknown.
        DeviceNotFoundError: it is a device of another task.
    """
    if not isinstance(device, str):
        raise TypeError(f"a device is named by a string such as 'CPU:0', got {device!r}")
    match = _SPELLING.fullmatch(device)
    if match is None:
        raise ValueError(f"expected a device such as 'CPU:0' or 'GPU:1', got {device!r}")
    kind = _KINDS.get(match["kind"].lower())
    if kind is None:
        raise ValueError(f"unknown kind of device {match['kind']!r} in {device!r}; the kinds are CPU and GPU")
    if int(match["replica"] or 0) or int(match["task"] or 0):
        raise DeviceNotFoundError(
            f"{device!r} is a device of another task; a strategy's devices are those of this machine, and over several "
            f"workers each names its own: '{kind}:{int(match['index'])}'"
        )
    return f"{kind}:{int(match['index'])}"


def available() -> tuple[str, ...]:
    """Return the devices of this machine, in canonical form; CPU:0 stands for all CPU devices."""
    return ("CPU:0", *logical.names())


def resolve(devices: int | Sequence[str] | None) -> tuple[str, ...]:
    """Return the canonical names of ``devices``, and check that they exist and differ.

    A number n stands for CPU:0 to CPU:n-1, and None for all GPUs, or CPU:0 if there are none.
    """
    given: Any = devices
    if given is None:
        names = logical.names() or ("CPU:0",)
    elif isinstance(given, (int, float, np.number)):
        if isinstance(given, (bool, float, np.inexact)) or given < 1:
            raise ValueError(f"devices must be a number of replicas, at least 1, or a list of devices, got {given!r}")
        names = tuple(f"CPU:{k}" for k in range(int(given)))
    else:
        names = _named(given)
    if any(name.startswith("GPU") for name in names):
        logical.in_use = True
    return names


def _named(devices: Any) -> tuple[str, ...]:
    is_ordered = isinstance(devices, Iterable) and not isinstance(devices, AbstractSet)
    if not is_ordered or isinstance(devices, str):
        raise TypeError(f"devices must be a sequence of strings, such as ['CPU:0'], got {devices!r}")
    names = tuple(map(canonical, devices))
    if not names:
        raise ValueError("devices must name at least one device, got none; write ['CPU:0']")
    if len(set(names)) < len(names):
        name = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"each replica needs a device of its own, got {name!r} twice in {list(devices)}")
    absent = [name for name in names if name.startswith("GPU:") and name not in logical.names()]
    if absent:
        raise DeviceNotFoundError(
            f"there is no device {absent[0]!r} here; these exist: {', '.join(available())} (and CPU:k for every k); "
            f"{why_absent()}"
        )
    return names


def set_logical_devices(device: str, count: int) -> None:
    """Split one physical GPU into several logical devices, so that several replicas run on it.

    The logical devices of all GPUs are numbered consecutively: after ``set_logical_devices("GPU:0", 2)`` on a machine
    with two GPUs, GPU:0 and GPU:1 are the first, and GPU:2 is the second. Each has a stream of its own; they share the
    memory. CPUs need no splitting: CPU:k exists for every k.

    Args:
        device: a physical GPU, by its name before any GPU is split.
        count: the number of logical devices.

    Raises:
        DeviceNotFoundError: there is no such GPU.
        RuntimeError: a strategy uses GPUs already.
        TypeError: ``device`` is not a string, or ``count`` is not an int.
        ValueError: ``device`` is misspelled or not a GPU, or ``count`` is less than 1.
    """
    name = canonical(device)
    if not name.startswith("GPU:"):
        raise ValueError(f"expected a GPU, got {device!r}: CPU:k exists for every k, with nothing to set")
    integer("count", count, 1)
    if logical.in_use:
        raise RuntimeError(
            "the GPUs are already in use under their present names; call set_logical_devices before the first strategy"
        )
    ordinal, physical = int(name.removeprefix("GPU:")), [gpu.ordinal for gpu in find_gpus().gpus]
    if ordinal not in physical:
        exist = ", ".join(f"GPU:{k}" for k in physical) or "none"
        raise DeviceNotFoundError(f"there is no GPU {name!r} to split; these exist: {exist}; {why_absent()}")
    logical.split[ordinal] = count


set_logical_devices.__module__ = "aiodist"
