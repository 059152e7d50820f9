# SPDX-License-Identifier: Apache-2.0
"""Memory for large results, used again when nobody can see it any more.

Fresh memory costs as much as a reduction: the system hands it out page by page, each cleared. So large results lie in
blocks that come back here. When is a block free? When nobody holds the array that was given out, nor a view, a slice,
a `memoryview` or another library's array over it. All of those hold, directly or through each other, the one `_Lease`
that the array was made of, and only they do: NumPy's way to make an array over foreign memory is to keep the object
that shows it. The lease gives the block back when it dies.

No count of references is ever read. A lease dies when the last reference to it goes, whatever the interpreter and
whichever thread. The cyclic garbage collector cannot end one early that an array holds: it never finalises what is
held from outside what it tracks, and it does not track arrays. A lease that was ended makes no more arrays.

A lease may die anywhere, also in the middle of `empty`, in the same thread: so there is no lock but a reentrant one,
and each step on the lists of free blocks is one that stands that.
"""

import math
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Final

import numpy as np
from numpy import asarray, ndarray

KIB: Final = 1024
MIB: Final = 1024 * KIB

Array = np.ndarray[Any, np.dtype[Any]]
Memory = np.ndarray[Any, np.dtype[np.uint8]]

POOLED_FROM: Final = MIB
"""Bytes from which a result that comes alone should lie in a block: the C library keeps one or two smaller ones. One
larger it returns to the system where the process has freed nothing larger still, and all its pages come anew."""

POOLED_AMONG_FROM: Final = 128 * KIB
"""The same for one of several that come and go together, the leaves of a nest: their memory the C library may give back
to the system, and the pages that come anew cost three to ten times as much as the sums that they are for."""

MOST_IDLE: Final = 512 * MIB
"""Bytes that may lie idle; when there are more, all go to the system."""

ALIGNMENT: Final = 64
"""Of blocks, in bytes: a cache line, and the longest vector."""


class _Block:
    """Memory, and how it shows itself to NumPy: made once, as that takes as long as to give it out."""

    __slots__ = ("memory", "shown")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.shown = memory.__array_interface__


def _aligned(nbytes: int) -> Memory:
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class _Lease:
    """A block, given out. Its death is the sign that nobody sees the block any more."""

    __slots__ = ("__array_interface__", "_block", "_pool")

    def __init__(self, block: _Block, pool: "Pool") -> None:
        self._block = block
        self._pool = pool
        self.__array_interface__ = block.shown

    def __del__(self) -> None:
        del self.__array_interface__
        self._pool.take_back(self._block)


class Pool:
    """Blocks of memory that lie idle: `idle_bytes`, at most `most_idle`; `allocate` makes memory for new ones."""

    def __init__(self, most_idle: float = MOST_IDLE, allocate: Callable[[int], Memory] = _aligned) -> None:
        self._most_idle = most_idle
        self._allocate = allocate
        self._idle: dict[int, list[_Block]] = {}  # by size
        self._lock = RLock()
        self.idle_bytes = 0

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], order: Any = "C") -> Array:
        """Return an array of any values, in memory that nobody else sees: in a block, unless it is small."""
        nbytes = dtype.itemsize * math.prod(shape)
        if nbytes < POOLED_AMONG_FROM:
            return np.empty(shape, dtype, order)
        lease = self.lease(nbytes)
        return ndarray(shape, dtype, asarray(lease), 0, None, order)  # by position: by keyword it takes thrice as long

    def lease(self, nbytes: int) -> object:
        """Return what shows a block to NumPy; the block comes back once this and all arrays of it are gone."""
        with self._lock:
            alike = self._idle.get(nbytes)
            if alike:
                self.idle_bytes -= nbytes  # first, as leases that die in between may release all that lies idle
                block = alike.pop()  # the last one used, which may be in a cache still
            else:
                block = _Block(self._allocate(nbytes))
        return _Lease(block, self)

    def take_back(self, block: _Block) -> None:
        """Let a block serve again, which nobody sees any more; for leases alone."""
        nbytes = block.memory.nbytes
        with self._lock:
            self.idle_bytes += nbytes
            if self.idle_bytes > self._most_idle:
                self._idle, self.idle_bytes = {}, 0
            else:
                self._idle.setdefault(nbytes, []).append(block)


results: Final = Pool()
"""Where results of reductions lie."""


def empty_like(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return memory for a large result: of the shape of `array`, and in Fortran's order if it has that."""
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return results.empty(array.shape, dtype, "F" if fortran else "C")
