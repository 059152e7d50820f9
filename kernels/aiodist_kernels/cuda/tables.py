# SPDX-License-Identifier: Apache-2.0
"""The table of a tabled kernel: which block takes which part of which leaf, and where buffers lie.

64-bit words, uploaded by one copy:

    for each chunk      place of its leaf's row in the table, in words; the lane at which it begins; the one at which
                        its vectors end, and single elements begin; the one behind its end
    for each leaf       address of its result; addresses of its buffers
"""

import dataclasses
from collections.abc import Sequence
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


def vectors(form: Form, leaf: Leaf, lanes: int) -> int:
    """Return how many whole vectors a leaf has; 0 where an address does not allow them."""
    together = leaf.out
    for address in leaf.buffers:
        together |= address
    return 0 if together % VECTOR_BYTES else lanes // form.width


def pack(form: Form, leaves: Sequence[Leaf], components: int) -> Table:
    """Write the table for leaves of one dtype and number of buffers.

    Args:
        form: the kernel's.
        leaves: their reductions; empty ones take no part.
        components: lanes of one element of the dtype.
    """
    rows = np.array([(leaf.out, *leaf.buffers) for leaf in leaves], np.int64)
    lanes = np.array([leaf.elements for leaf in leaves], np.int64) * components
    aligned = np.bitwise_or.reduce(rows, axis=1) % VECTOR_BYTES == 0
    whole = np.where(aligned, lanes // form.width * form.width, 0)
    counts = -(-lanes // form.chunk)
    chunks = int(counts.sum())
    leaf_of = np.repeat(np.arange(len(leaves)), counts)
    low = form.chunk * (np.arange(chunks) - (np.cumsum(counts) - counts)[leaf_of])
    high = np.minimum(low + form.chunk, lanes[leaf_of])
    middle = np.clip(whole[leaf_of], low, high)
    heads = np.stack([ENTRY * chunks + rows.shape[1] * leaf_of, low, middle, high], axis=1)
    return Table(np.concatenate([heads.reshape(-1), rows.reshape(-1)]), chunks)
