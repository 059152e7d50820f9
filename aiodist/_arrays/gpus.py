"""GPUs: which ones this machine has, asked of the driver's library alone, and the logical devices made of them.

Nothing of CUDA is imported. Where there is no driver, finding that out costs one failed look-up of a library, once in a
process; where there is one, the driver starts, which a program that uses its GPUs needs in any case.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple

INSTALL = "pip install 'aiodist[cuda]'"

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class Gpu(NamedTuple):
    """One physical GPU."""

    ordinal: int  # the driver's number for it
    name: str  # what its maker calls it
    capability: tuple[int, int]  # its compute capability, e.g. (9, 0)
    uuid: str = ""  # tells it from every other; parts of one GPU (MIG) have the same


class Found(NamedTuple):
    """What the driver says."""

    gpus: tuple[Gpu, ...] = ()  # in its order
    driver: str | None = None  # the CUDA version that it supports, e.g. "13.0"; None where there is no driver
    missing: str = ""  # why there are no GPUs, for a person


@cache
def find() -> Found:
    """Ask the driver, at the first call."""
    try:
        library: Any = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return Found(missing="no NVIDIA driver is installed (its library, libcuda, was not found)")
    return ask(library)


def ask(library: Any) -> Found:
    """Return what the driver's library says."""
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    error = library.cuInit(0)
    if error == _NO_DEVICE:
        missing = "the NVIDIA driver sees no GPU (does CUDA_VISIBLE_DEVICES hide it?)"
        return Found(driver=driver, missing=missing)
    if error:
        return Found(driver=driver, missing=f"the NVIDIA driver does not start (cuInit returns error {error})")
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    return Found(tuple(_describe(library, ordinal) for ordinal in range(count.value)), driver)


def _describe(library: Any, ordinal: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGet(ctypes.byref(device), ordinal)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    uuid = (ctypes.c_ubyte * 16)()
    library.cuDeviceGetUuid(uuid, device)
    return Gpu(ordinal, name.value.decode(), (major.value, minor.value), bytes(uuid).hex())


class LogicalGpus:
    """The devices ``GPU:0``, ``GPU:1`` …: each a physical GPU, or one of several on the same."""

    def __init__(self) -> None:
        self.split: dict[int, int] = {}
        self.in_use = False

    def ordinals(self) -> tuple[int, ...]:
        """Return the physical GPU of each logical device, by the logical device's index."""
        return tuple(gpu.ordinal for gpu in find().gpus for _ in range(self.split.get(gpu.ordinal, 1)))

    def names(self) -> tuple[str, ...]:
        """Return the devices' canonical names."""
        return tuple(f"GPU:{index}" for index in range(len(self.ordinals())))

    def ordinal(self, name: str) -> int:
        """Return the physical GPU of a device that exists."""
        return self.ordinals()[int(name.removeprefix("GPU:"))]


logical = LogicalGpus()


def why_absent() -> str:
    """Return why there are no, or no more, GPUs, and what to do, as a sentence."""
    found = find()
    if found.gpus:
        return 'one GPU serves as several devices after set_logical_devices("GPU:0", count)'
    return f"{found.missing}; replicas run on CPU:k, and on GPUs with a driver and {INSTALL}"
