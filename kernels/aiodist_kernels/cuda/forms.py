# SPDX-License-Identifier: Apache-2.0
"""The kernels for a rule, and how work is distributed over their threads.

Each rule has two forms. A **direct** kernel takes the addresses of one leaf's buffers as arguments, so that nothing has
to be uploaded; it is compiled for 2, 3, 4, 8 and 16 buffers. A **tabled** kernel reads addresses from a table in device
memory, for many leaves in one launch, and for any number of buffers.

Every thread takes 16 bytes of each buffer at a time, the widest access, if all addresses are multiples of 16. It takes
single elements otherwise, and at the end of a leaf.

A tabled kernel reads 64-bit words from two tables:

    heads, for each chunk   offset of its leaf's row, in words; its first lane; the end of its vectors, where single
                            elements begin; its end
    rows, for each leaf     1 if its addresses allow vectors, else 0; address of its result; addresses of its buffers

The heads do not depend on addresses: they are uploaded once for leaves of the same sizes. The rows are small.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiodist_kernels.rules import ReduceOp, Rule, has_kernels, lane, rule_for

VECTOR_BYTES: Final = 16
THREADS: Final = 256
GRID: Final = 2**31 - 1  # the largest number of blocks in one launch
VECTORS_PER_THREAD: Final = 4  # a chunk of a leaf is 16 KiB of each buffer for one block, a few microseconds of work

DIRECT_COUNTS: Final = (2, 3, 4, 8, 16)
UNROLLED: Final = 8
"""Buffers that a kernel for any number of them loads in one step: enough loads in flight to hide their latency."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One kernel."""

    rule: Rule
    count: int  # of buffers; 0 stands for any number, and 1 makes it a copy
    tabled: bool  # addresses come from a table rather than from arguments

    @property
    def width(self) -> int:
        """Lanes in one vector of a buffer."""
        return VECTOR_BYTES // lane(self.rule.dtype).itemsize

    @property
    def chunk(self) -> int:
        """Lanes in one chunk, which one block of a tabled kernel takes at a time."""
        return self.width * THREADS * VECTORS_PER_THREAD


@functools.lru_cache(maxsize=1024)
def form_for(rule: Rule, count: int, *, leaves: int = 1) -> Form:
    """Return the kernel that reduces `leaves` leaves of `count` buffers each; a TypeError for long double."""
    if not has_kernels(rule):
        raise TypeError(f"{rule.op.name} of {rule.dtype}: GPUs do not support this dtype; cast first, e.g. to float64")
    if count not in DIRECT_COUNTS:
        return Form(rule, 0, tabled=True)
    return Form(rule, count, tabled=leaves > 1)


@functools.cache
def copying(size: int) -> Form:
    """Return the kernel that copies leaves with elements of `size` bytes: it folds one buffer.

    Lanes have at most four bytes, because complex numbers are only as aligned as their parts.
    """
    return Form(rule_for(ReduceOp.SUM, np.dtype(f"i{min(size, 4)}")), 1, tabled=True)


def blocks(work: int) -> int:
    """Return the number of blocks to launch: one thread for each item of work, up to the limit of a grid."""
    # A grid that just fills the device, and loops, was 2 to 6 % slower on an H100 wherever memory is the limit.
    return max(1, min(-(-work // THREADS), GRID))


# Tables.

ENTRY: Final = 4  # words of a chunk's entry in the heads
FIRST: Final = 2  # words of a row before the addresses of buffers


class Leaf(NamedTuple):
    """One reduction, by addresses; the result may be one of the buffers, but must not overlap them otherwise."""

    out: int
    buffers: tuple[int, ...]
    elements: int


def allow_vectors(addresses: Iterable[int]) -> bool:
    """Return whether these addresses allow access to whole vectors."""
    return not functools.reduce(operator.or_, addresses) % VECTOR_BYTES


class Layout:
    """The tables for leaves with given numbers of lanes and one number of buffers, without the addresses."""

    def __init__(self, form: Form, lanes: Sequence[int], count: int) -> None:
        sizes = np.array(lanes, np.int64)
        counts = -(-sizes // form.chunk)
        leaf_of = np.repeat(np.arange(len(lanes)), counts)
        self.chunks = int(counts.sum())  # none of empty leaves
        self.heads = np.empty((self.chunks, ENTRY), np.int64)
        row, low, middle, high = self.heads.T
        row[:] = (FIRST + count) * leaf_of
        low[:] = form.chunk * (np.arange(self.chunks) - (np.cumsum(counts) - counts)[leaf_of])
        np.minimum(low + form.chunk, sizes[leaf_of], out=high)
        np.clip((sizes // form.width * form.width)[leaf_of], low, high, out=middle)

    def rows(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the table of rows, from the addresses of each leaf's result and buffers."""
        words = np.empty((addresses.shape[0], 1 + addresses.shape[1]), np.int64)
        words[:, 1:] = addresses
        words[:, 0] = np.bitwise_or.reduce(addresses, axis=1) % VECTOR_BYTES == 0
        return words
