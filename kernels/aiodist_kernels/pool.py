# SPDX-License-Identifier: Apache-2.0
"""Memory for large results, reused once nothing refers to it any more.

Fresh memory costs as much as a reduction, because the system provides it page by page and clears each. So large results
use blocks that return here. A block is free when nothing refers any more to the array that was returned, nor to a view,
a slice, a `memoryview` or another library's array over it. All of these hold, directly or through each other, the
`_Lease` from which the array was made, because an array over foreign memory keeps the object that exports it. The lease
returns the block when it dies.

No reference counts are ever read. A lease dies with the last reference to it, on any interpreter and in any thread. The
cyclic garbage collector cannot finalise a lease early that an array holds: it never finalises objects that are held
from outside the objects that it tracks, and it does not track arrays. A finalised lease makes no more arrays.

A lease may die anywhere, even in the middle of `empty` in the same thread. So the only lock is reentrant, and each step
on the lists of free blocks tolerates that.
"""

import math
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Final

import numpy as np
from numpy import asarray, ndarray

from aiodist_kernels.rules import Array, DType

KIB: Final = 1024
MIB: Final = 1024 * KIB

Memory = np.ndarray[Any, np.dtype[np.uint8]]

POOLED_FROM: Final = MIB
"""Bytes from which a single result should lie in a block. The C library keeps one or two smaller ones, but may return
larger memory to the system, and then all pages are new."""

POOLED_AMONG_FROM: Final = 128 * KIB
"""The same for one of several results that are made and released together, the leaves of a nest: the C library may
return their memory to the system, and new pages cost three to ten times as much as the sums themselves."""

MOST_IDLE: Final = 512 * MIB  # bytes that may be idle; if there are more, all return to the system
ALIGNMENT: Final = 64  # the alignment of blocks in bytes: a cache line, and the longest vector


class _Block:
    """Memory, with its array interface for NumPy, which is cached because creating it takes as long as a lease."""

    __slots__ = ("memory", "shown")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.shown = memory.__array_interface__


def _aligned(nbytes: int) -> Memory:
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class _Lease:
    """A block in use. When it dies, nothing refers to the block any more."""

    __slots__ = ("__array_interface__", "_block", "_pool")

    def __init__(self, block: _Block, pool: "Pool") -> None:
        self._block = block
        self._pool = pool
        self.__array_interface__ = block.shown

    def __del__(self) -> None:
        del self.__array_interface__
        self._pool.take_back(self._block)


class Pool:
    """Idle blocks of memory: `idle_bytes` in all, at most `most_idle`; `allocate` makes memory for new ones."""

    def __init__(self, most_idle: float = MOST_IDLE, allocate: Callable[[int], Memory] = _aligned) -> None:
        self._most_idle = most_idle
        self._allocate = allocate
        self._idle: dict[int, list[_Block]] = {}  # by size
        self._lock = RLock()
        self.idle_bytes = 0

    def empty(self, shape: Sequence[int], dtype: DType, order: Any = "C") -> Array:
        """Return an uninitialised array: in a block, unless it is small."""
        nbytes = dtype.itemsize * math.prod(shape)
        if nbytes < POOLED_AMONG_FROM:
            return np.empty(shape, dtype, order)
        lease = self.lease(nbytes)
        return ndarray(shape, dtype, asarray(lease), 0, None, order)  # by position: by keyword it takes thrice as long

    def lease(self, nbytes: int) -> object:
        """Return a lease of a block; the block returns once the lease and all arrays made from it are gone."""
        with self._lock:
            idle = self._idle.get(nbytes)
            if idle:
                self.idle_bytes -= nbytes  # first: leases that die in between may empty the pool
                block = idle.pop()  # the last one used, which may still be in a cache
            else:
                block = _Block(self._allocate(nbytes))
        return _Lease(block, self)

    def take_back(self, block: _Block) -> None:
        """Make a block available again; called by its lease when nothing refers to the block any more."""
        nbytes = block.memory.nbytes
        with self._lock:
            self.idle_bytes += nbytes
            if self.idle_bytes > self._most_idle:
                self._idle, self.idle_bytes = {}, 0
            else:
                self._idle.setdefault(nbytes, []).append(block)


results: Final = Pool()  # the memory of results


def empty_like(array: Array, dtype: DType) -> Array:
    """Return an uninitialised array for a large result, with the shape and the order of `array`."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return results.empty(array.shape, dtype, "F" if fortran else "C")
