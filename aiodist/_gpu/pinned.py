"""Page-locked memory of the host, which devices copy to and from while nobody waits.

To lock pages takes as long as to copy them, and unlocking may wait for everything that a device does. So what was given
back is given out again, in sizes of powers of two, and nothing is unlocked before the process ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

_LEAST: Final = 1 << 12


class Memory(Protocol):
    """Memory for as long as this object lives, and the work that was enqueued before its end."""

    @property
    def address(self) -> int:
        """Where it begins."""
        ...


class HostMemory:
    """Page-locked memory, until this object goes."""

    __slots__ = ("_spare", "address")

    def __init__(self, address: int, spare: deque[int]) -> None:
        self.address = address
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.address)


class HostPool:
    """Page-locked memory for a process; `lock` locks that many bytes, and returns where they begin."""

    def __init__(self, lock: Callable[[int], int]) -> None:
        self._lock = lock
        self._spare: defaultdict[int, deque[int]] = defaultdict(deque)  # whose ends any thread may touch

    def take(self, nbytes: int) -> HostMemory:
        """Return memory for at least so many bytes."""
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        spare = self._spare[size]
        try:
            address = spare.pop()
        except IndexError:
            address = self._lock(size)
        return HostMemory(address, spare)


class _Bytes:
    """Bytes of memory as NumPy takes them; the array keeps this, and this keeps the memory."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory = memory
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}


def array_of(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array in the host's memory, which lasts as long as the array does."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.asarray(_Bytes(memory, size)).view(dtype).reshape(shape)
