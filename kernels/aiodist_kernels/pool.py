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

There is no lock: a lease may die anywhere, also in the middle of `empty`, in the same thread. Each step on the lists of
free blocks is one that stands that: appending, popping, removing, and iterating over the list itself, which at worst
misses a block. (Not copying it: CPython 3.11 may collect garbage while it makes a tuple of a list, and a lease that
dies then would move the list away under its hands. The kinds can be copied: no lease that dies adds one.)

Results that come one by one are left to the C library up to 1 MiB: it keeps what was given back last at hand. When many
go at a time, the leaves of a nest, it may give their memory back to the system, and the pages that come anew cost three
times as much as the sums that they are for. So these lie in blocks from 128 KiB on.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

import numpy as np
from numpy import asarray, ndarray
from numpy.typing import NDArray

KIB: Final = 1024
MIB: Final = 1024 * KIB

Array = NDArray[Any]
Memory = NDArray[np.uint8]

POOLED_FROM: Final = MIB
"""Bytes of a result from which it lies in a block."""

POOLED_AMONG_FROM: Final = 128 * KIB
"""The same for one of several that live as long as each other."""

MOST_IDLE: Final = 512 * MIB
"""Bytes that may lie idle; what comes back beyond goes to the system, the longest idle first. (Small blocks, of which
there are many, may be some more: the whole is not counted for each.)"""

ALIGNMENT: Final = 64
"""Of blocks, in bytes: a cache line, and the longest vector."""

_UNCOUNTED: Final = 128  # parts of what may lie idle: as long as a kind has less than one, nobody counts the whole


def _kind(nbytes: int) -> int:
    """Return the kind of blocks for so many bytes; kinds differ by an eighth or less, so one serves down to 7/8."""
    bits = max(nbytes.bit_length() - 4, 0)
    return 8 * bits - (-nbytes >> bits)


def _size(kind: int) -> int:
    """Return the bytes of blocks of a kind."""
    bits = max(kind // 8 - 1, 0)
    return (kind - 8 * bits) << bits


class _Block:
    """Aligned memory of one size.

    Attributes:
        memory: it.
        kind: the place of its like in a pool.
        shown: how it shows itself to NumPy; made once, since that takes as long as to give it out.
        returned: when it was given back last, in a pool's count.
    """

    __slots__ = ("kind", "memory", "returned", "shown")

    def __init__(self, nbytes: int, kind: int) -> None:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.memory: Memory = raw[start : start + nbytes]
        self.kind = kind
        self.shown = {"shape": (nbytes,), "typestr": "|u1", "data": (self.memory.ctypes.data, False), "version": 3}
        self.returned = 0


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
    """Blocks of memory that lie idle.

    Args:
        most_idle: how many bytes of them, at most.
    """

    def __init__(self, most_idle: int = MOST_IDLE) -> None:
        self._most_idle = most_idle
        self._idle: dict[int, list[_Block]] = {}  # of each kind, the longest idle first
        self._returns = count(1)

    @property
    def idle_bytes(self) -> int:
        """How many bytes lie idle."""
        return sum([len(self._idle[kind]) * _size(kind) for kind in list(self._idle)])

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], order: Any = "C", *, among: bool = False) -> Array:
        """Return an array of any values, in memory that nobody else sees.

        Args:
            shape: its shape.
            dtype: its dtype.
            order: "C" or "F".
            among: it is one of several that live as long as each other.
        """
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes < (POOLED_AMONG_FROM if among else POOLED_FROM):
            return np.empty(shape, dtype, order)
        kind = _kind(nbytes)
        alike = self._idle.get(kind)
        if alike is None:
            alike = self._idle.setdefault(kind, [])
        try:
            block = alike.pop()  # the last one used, which may be in a cache still
        except IndexError:
            block = _Block(_size(kind), kind)
        lease = _Lease(block, self)
        return ndarray(shape, dtype, asarray(lease), 0, None, order)  # by position: by keyword it takes thrice as long

    def take_back(self, block: _Block) -> None:
        """Let a block serve again, which nobody sees any more; for leases alone."""
        block.returned = next(self._returns)
        alike = self._idle[block.kind]
        alike.append(block)
        if len(alike) * block.memory.nbytes > self._most_idle // _UNCOUNTED:
            self._let_go()

    def _let_go(self) -> None:
        """Let go of what has been idle for longest, while too much is."""
        while self.idle_bytes > self._most_idle:
            block = self._longest_idle()
            if block is None:
                return
            with suppress(ValueError):  # another thread has taken it
                self._idle[block.kind].remove(block)

    def _longest_idle(self) -> _Block | None:
        found = None
        for kind in list(self._idle):
            for block in self._idle[kind]:
                if found is None or block.returned < found.returned:
                    found = block
                break
        return found


results: Final = Pool()
"""Where results of reductions lie."""
