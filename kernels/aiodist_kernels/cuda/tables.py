# SPDX-License-Identifier: Apache-2.0
"""The table of a tabled kernel: which block takes which part of which leaf, and where buffers lie.

64-bit words, uploaded by one copy:

    for each chunk      place of its leaf's row in the table, in words; first lane of the chunk
    for each leaf       address of its result; lanes; lanes that are taken in vectors; addresses of its buffers
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiodist_kernels.cuda.forms import VECTOR_BYTES, Form


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
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
    lanes = np.array([leaf.elements * components for leaf in leaves], np.int64)
    whole = [form.width * vectors(form, leaf, leaf.elements * components) for leaf in leaves]
    counts = -(-lanes // form.chunk)
    chunks = int(counts.sum())
    row = 3 + len(leaves[0].buffers)
    rows = 2 * chunks + row * np.arange(len(leaves), dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    heads = np.empty((chunks, 2), np.int64)
    heads[:, 0] = np.repeat(rows, counts)
    heads[:, 1] = form.chunk * (np.arange(chunks) - np.repeat(firsts, counts))
    fields = [(leaf.out, n, v, *leaf.buffers) for leaf, n, v in zip(leaves, lanes, whole, strict=True)]
    return Table(np.concatenate([heads.reshape(-1), np.array(fields, np.int64).reshape(-1)]), chunks)
