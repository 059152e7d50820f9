# SPDX-License-Identifier: Apache-2.0
"""The table of a tabled kernel: which block takes which part of which leaf, and where buffers lie.

64-bit words, uploaded by one copy:

    for each chunk      place of its leaf's row in the table, in words; the lane at which it begins; the one at which
                        its vectors end, and single elements begin; the one behind its end
    for each leaf       address of its result; addresses of its buffers
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiodist_kernels.cuda.forms import VECTOR_BYTES, Form

ENTRY: Final = 4
"""Words of a chunk's entry."""


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
    """A table, and how many chunks stand at its head."""

    words: NDArray[np.int64]
    chunks: int


def allow_vectors(addresses: Iterable[int]) -> bool:
    """Return whether these addresses allow accesses to whole vectors."""
    together = 0
    for address in addresses:
        together |= address
    return not together % VECTOR_BYTES


def vectors(form: Form, leaf: Leaf, lanes: int) -> int:
    """Return how many whole vectors a leaf has; 0 where an address does not allow them."""
    return lanes // form.width if allow_vectors((leaf.out, *leaf.buffers)) else 0


class Layout:
    """The head of a table for leaves of one dtype and number of buffers, which does not depend on addresses.

    Args:
        form: the kernel's.
        lanes: how many each leaf has; empty ones take no part.

    Attributes:
        chunks: how many entries there are.
    """

    def __init__(self, form: Form, lanes: Sequence[int]) -> None:
        self._lanes = np.array(lanes, np.int64)
        self._whole = self._lanes // form.width * form.width
        counts = -(-self._lanes // form.chunk)
        self.chunks = int(counts.sum())
        self._leaf_of = np.repeat(np.arange(len(lanes)), counts)
        self._low = form.chunk * (np.arange(self.chunks) - (np.cumsum(counts) - counts)[self._leaf_of])
        self._high = np.minimum(self._low + form.chunk, self._lanes[self._leaf_of])
        self._middle = np.clip(self._whole[self._leaf_of], self._low, self._high)

    def fill(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the words of the table.

        Args:
            rows: for each leaf the addresses of its result and of its buffers.
        """
        aligned = np.bitwise_or.reduce(rows, axis=1) % VECTOR_BYTES == 0
        words = np.empty(ENTRY * self.chunks + rows.size, np.int64)
        heads = words[: ENTRY * self.chunks].reshape(-1, ENTRY)
        heads[:, 0] = ENTRY * self.chunks + rows.shape[1] * self._leaf_of
        heads[:, 1], heads[:, 3] = self._low, self._high
        heads[:, 2] = self._middle if aligned.all() else np.where(aligned[self._leaf_of], self._middle, self._low)
        words[ENTRY * self.chunks :] = rows.reshape(-1)
        return words


def pack(form: Form, leaves: Sequence[Leaf], components: int) -> Table:
    """Write the table for leaves of one dtype and number of buffers.

    Args:
        form: the kernel's.
        leaves: their reductions; empty ones take no part.
        components: lanes of one element of the dtype.
    """
    layout = Layout(form, [leaf.elements * components for leaf in leaves])
    return Table(layout.fill(np.array([(leaf.out, *leaf.buffers) for leaf in leaves], np.int64)), layout.chunks)
