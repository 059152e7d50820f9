"""Device names: the spellings of TensorFlow and CUDA, and the one canonical form, ``CPU:0`` or ``GPU:0``.

``CPU:k`` is a logical device and exists for every k; each has a worker thread of its own while it is used. ``GPU:k`` is
a physical one, or one of several that a physical one was split into.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from aiodist._arrays import gpus
from aiodist._core.errors import DeviceNotFoundError

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
    """Return the devices of this machine, in canonical form; of the logical CPU devices, the first stands for all."""
    return ("CPU:0", *gpus.logical.names())


def resolve(devices: int | Sequence[str] | None) -> tuple[str, ...]:
    """Return the canonical names of ``devices``, which exist and differ.

    For n that is CPU:0 to CPU:n-1, for None all GPUs, or CPU:0 without any.
    """
    if devices is None:
        return _used(gpus.logical.names()) or ("CPU:0",)
    given: Any = devices
    if isinstance(given, float) or hasattr(given, "__index__"):
        if isinstance(given, (bool, float)) or int(given) < 1:
            raise ValueError(f"devices must be a number of replicas, at least 1, or a list of devices, got {given!r}")
        return tuple(f"CPU:{k}" for k in range(int(given)))
    if isinstance(devices, str):
        raise TypeError(f"devices must be a sequence of strings, got the string {devices!r}; write [{devices!r}]")
    if isinstance(devices, AbstractSet):
        raise TypeError(f"devices must be a sequence of strings, for replicas have an order, got {devices!r}")
    names = tuple(canonical(device) for device in given)
    if not names:
        raise ValueError("devices must name at least one device, got none; write ['CPU:0']")
    if len(set(names)) < len(names):
        name = next(name for i, name in enumerate(names) if name in names[:i])
        raise ValueError(f"each replica needs a device of its own, got {name!r} twice in {list(given)}")
    absent = [name for name in names if name.startswith("GPU:") and name not in gpus.logical.names()]
    if absent:
        raise DeviceNotFoundError(
            f"there is no device {absent[0]!r} here; these exist: {', '.join(available())} (and CPU:k for every k); "
            f"{gpus.why_absent()}"
        )
    return _used(names)


def _used(names: tuple[str, ...]) -> tuple[str, ...]:
    if any(name.startswith("GPU") for name in names):
        gpus.logical.in_use = True
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
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"count must be an int, got {count!r}")
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if gpus.logical.in_use:
        raise RuntimeError(
            "the GPUs are already in use under their present names; call set_logical_devices before the first strategy"
        )
    ordinal = int(name.removeprefix("GPU:"))
    physical = [gpu.ordinal for gpu in gpus.find().gpus]
    if ordinal not in physical:
        exist = ", ".join(f"GPU:{k}" for k in physical) or "none"
        raise DeviceNotFoundError(f"there is no GPU {name!r} to split; these exist: {exist}; {gpus.why_absent()}")
    gpus.logical.split[ordinal] = count


set_logical_devices.__module__ = "aiodist"
