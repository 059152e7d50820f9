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

There is no lock: a lease may die anywhere, also in the middle of `empty`, in the same thread. Each step on the
list of free blocks is one that stands that: appending, popping, removing, and iterating over the list itself, which
at worst misses a block. (Not copying it: CPython 3.11 may collect garbage while it makes a tuple of a list, and
a lease that dies then would move the list away under its hands.)
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy import asarray, ndarray
from numpy.typing import NDArray

from aiodist_kernels.policy import MIB

Memory = NDArray[np.uint8]

POOLED_FROM: Final = MIB
"""Bytes of a result from which it lies in a block: below, the C library keeps memory at hand itself."""

MOST_IDLE: Final = 512 * MIB
"""Bytes that may lie idle; what comes back beyond goes to the system, the longest idle first."""

ALIGNMENT: Final = 64
"""Of blocks, in bytes: a cache line, and the longest vector."""

_SPARE: Final = 8  # a block serves results down to 7/8 of its size


class _Block:
    """Aligned memory of one size.

    Attributes:
        memory: it.
        nbytes: its size.
        shown: how it shows itself to NumPy; made once, since that takes as long as to give it out.
    """

    __slots__ = ("memory", "nbytes", "shown")

    def __init__(self, nbytes: int) -> None:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.memory: Memory = raw[start : start + nbytes]
        self.nbytes = nbytes
        self.shown = {"shape": (nbytes,), "typestr": "|u1", "data": (self.memory.ctypes.data, False), "version": 3}


class _Lease:
    """A block, given out. Its death is the sign that nobody sees the block any more."""

    __slots__ = ("__array_interface__", "_block", "_pool")

    def __init__(self, block: _Block, pool: "Pool") -> None:
        self._block = block
        self._pool = pool
        self.__array_interface__ = block.shown

    def __del__(self) -> None:
        del self.__array_interface__
        self._pool._take_back(self._block)


class Pool:
    """Blocks of memory that lie idle.

    Args:
        most_idle: how many bytes of them, at most.
    """

    def __init__(self, most_idle: int = MOST_IDLE) -> None:
        self._most_idle = most_idle
        self._idle: list[_Block] = []  # the longest idle first

    @property
    def idle_bytes(self) -> int:
        """How many bytes lie idle."""
        total = 0
        for block in self._idle:
            total += block.nbytes
        return total

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], order: Any = "C") -> NDArray[Any]:
        """Return an array of any values, in memory that nobody else sees.

        Args:
            shape: its shape.
            dtype: its dtype.
            order: "C" or "F".
        """
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes < POOLED_FROM:
            return np.empty(shape, dtype, order)
        lease = _Lease(self._find(nbytes) or _Block(nbytes), self)
        return ndarray(shape, dtype, asarray(lease), 0, None, order)  # by position: by keyword it takes thrice as long

    def _find(self, nbytes: int) -> _Block | None:
        most = nbytes + nbytes // (_SPARE - 1)
        for block in reversed(self._idle):  # the last one used may be in a cache still
            if nbytes <= block.nbytes <= most:
                try:
                    self._idle.remove(block)
                except ValueError:  # another thread was quicker
                    return self._find(nbytes)
                return block
        return None

    def _take_back(self, block: _Block) -> None:
        self._idle.append(block)
        while self.idle_bytes > self._most_idle:
            try:
                self._idle.pop(0)
            except IndexError:
                return


results: Final = Pool()
"""Where results of reductions lie."""
