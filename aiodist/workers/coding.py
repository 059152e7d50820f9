"""How objects become bytes and back: pickled, with arrays beside the pickle, so that large ones are copied once.

Workers of one job trust each other as the threads of one process do: it is the same program.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from aiodist.workers.communicator import Array

_COUNT: Final = struct.Struct("<Q")
ALIGNMENT: Final = 16


class Packed:
    """An object as a pickle, and the buffers of its arrays where they are.

    Attributes:
        parts: the pickle, and behind it the buffers.
    """

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        raw: list[Any] = [pickled, *(buffer.raw() for buffer in buffers)]
        self.parts: list[Array] = [np.frombuffer(part, np.uint8) for part in raw]

    @property
    def sizes(self) -> list[int]:
        """The sizes of the parts in bytes."""
        return [part.size for part in self.parts]

    @property
    def nbytes(self) -> int:
        """The size of `whole` in bytes."""
        *sizes, last = self.sizes
        return _aligned(8 * (len(sizes) + 2)) + sum(map(_aligned, sizes)) + last

    def whole(self) -> Array:
        """Return all of it in one piece: the number of parts, their sizes, and the parts, aligned."""
        sizes = self.sizes
        header = struct.pack(f"<{len(sizes) + 1}Q", len(sizes), *sizes)
        whole = np.zeros(self.nbytes, np.uint8)
        whole[: len(header)] = np.frombuffer(header, np.uint8)
        at = _aligned(len(header))
        for part, size in zip(self.parts, sizes, strict=True):
            whole[at : at + size] = part
            at += _aligned(size)
        return whole


def encode(value: Any) -> Array:
    """Return an object as an array of bytes."""
    return Packed(value).whole()


def decode(data: Array | memoryview) -> Any:
    """Return the object that was encoded; arrays in it share the memory."""
    view = data if isinstance(data, memoryview) else data.data
    (count,) = _COUNT.unpack_from(view)
    sizes = struct.unpack_from(f"<{count}Q", view, 8)
    at, parts = _aligned(8 * (count + 1)), []
    for size in sizes:
        parts.append(view[at : at + size])
        at += _aligned(size)
    return unpack(parts)


def unpack(parts: Sequence[Any]) -> Any:
    """Return the object whose parts these are; arrays in it share the memory."""
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301  (see the head of this file)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
