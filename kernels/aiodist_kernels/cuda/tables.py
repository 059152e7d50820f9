# SPDX-License-Identifier: Apache-2.0
"""The tables of a tabled kernel: which block takes which part of which leaf, and where buffers lie.

64-bit words, in two tables:

    heads, for each chunk   place of its leaf's row, in words; the lane at which it begins; the one at which its vectors
                            end, and single elements begin; the one behind its end
    rows, for each leaf     1 where its addresses allow vectors, else 0; address of its result; addresses of its buffers

The heads do not depend on addresses: they are uploaded once for leaves of the same sizes. The rows are small.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiodist_kernels.cuda.forms import VECTOR_BYTES, Form

ENTRY: Final = 4
"""Words of a chunk's entry."""

FIRST: Final = 2
"""Words of a row in front of the addresses of buffers."""


class Leaf(NamedTuple):
    """One reduction: n buffers to one.

    Attributes:
        out: address of the result; it may be one of the buffers, and overlaps none otherwise.
        buffers: addresses of the buffers, in their order.
        elements: in each buffer.
    """

    out: int
    buffers: tuple[int, ...]
    elements: int


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Both tables."""

    heads: NDArray[np.int64]
    rows: NDArray[np.int64]


def allow_vectors(addresses: Iterable[int]) -> bool:
    """Return whether these addresses allow accesses to whole vectors."""
    return not functools.reduce(operator.or_, addresses) % VECTOR_BYTES


def vectors(form: Form, leaf: Leaf, lanes: int) -> int:
    """Return how many whole vectors a leaf has; 0 where an address does not allow them."""
    return lanes // form.width if allow_vectors((leaf.out, *leaf.buffers)) else 0


class Layout:
    """The tables for leaves of one dtype and number of buffers, but for the addresses.

    Args:
        form: the kernel's.
        lanes: how many each leaf has; empty ones take no part.
        count: of the buffers of each.

    Attributes:
        chunks: how many entries there are.
        heads: the table of those.
    """

    def __init__(self, form: Form, lanes: Sequence[int], count: int) -> None:
        sizes = np.array(lanes, np.int64)
        counts = -(-sizes // form.chunk)
        leaf_of = np.repeat(np.arange(len(lanes)), counts)
        self.chunks = int(counts.sum())
        self.heads = np.empty((self.chunks, ENTRY), np.int64)
        row, low, middle, high = self.heads.T
        row[:] = (FIRST + count) * leaf_of
        low[:] = form.chunk * (np.arange(self.chunks) - (np.cumsum(counts) - counts)[leaf_of])
        np.minimum(low + form.chunk, sizes[leaf_of], out=high)
        np.clip((sizes // form.width * form.width)[leaf_of], low, high, out=middle)

    def rows(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the table of rows.

        Args:
            addresses: for each leaf those of its result and of its buffers.
        """
        words = np.empty((addresses.shape[0], 1 + addresses.shape[1]), np.int64)
        words[:, 1:] = addresses
        words[:, 0] = np.bitwise_or.reduce(addresses, axis=1) % VECTOR_BYTES == 0
        return words


def pack(form: Form, leaves: Sequence[Leaf], components: int) -> Table:
    """Write the tables for leaves of one dtype and number of buffers.

    Args:
        form: the kernel's.
        leaves: their reductions; empty ones take no part.
        components: lanes of one element of the dtype.
    """
    layout = Layout(form, [leaf.elements * components for leaf in leaves], len(leaves[0].buffers))
    return Table(layout.heads, layout.rows(np.array([(leaf.out, *leaf.buffers) for leaf in leaves], np.int64)))
