"""How objects become bytes and back: pickled, with arrays beside the pickle, so that large ones are copied once.

Workers of one job trust each other as the threads of one process do: it is the same program.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, Final

import numpy as np

from aiodist.workers.communicator import Array

_COUNT: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 16


def encode(value: Any) -> Array:
    """Return an object as an array of bytes: the number of buffers, their lengths, and the buffers, aligned."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts: list[Any] = [pickled, *(buffer.raw() for buffer in buffers)]
    sizes = [len(part) for part in parts]
    header = struct.pack(f"<{len(parts) + 1}Q", len(parts), *sizes)
    whole = np.zeros(_aligned(len(header)) + sum(map(_aligned, sizes[:-1])) + sizes[-1], np.uint8)
    whole[: len(header)] = np.frombuffer(header, np.uint8)
    at = _aligned(len(header))
    for part, size in zip(parts, sizes, strict=True):
        whole[at : at + size] = np.frombuffer(part, np.uint8)
        at += _aligned(size)
    return whole


def decode(data: Array | memoryview) -> Any:
    """Return the object that was encoded; arrays in it share the memory."""
    view = data if isinstance(data, memoryview) else data.data
    (count,) = _COUNT.unpack_from(view)
    sizes = struct.unpack_from(f"<{count}Q", view, 8)
    at, parts = _aligned(8 * (count + 1)), []
    for size in sizes:
        parts.append(view[at : at + size])
        at += _aligned(size)
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  (see the head of this file)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
