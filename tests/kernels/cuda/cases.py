# SPDX-License-Identifier: Apache-2.0
"""Every reduction that has a GPU kernel, and the forms that serve it; host memory as kernels see a device's."""

from __future__ import annotations

import dataclasses

import numpy as np

from aiodist_kernels import Accumulate, ReduceOp, reduce
from aiodist_kernels.cuda.forms import DIRECT_COUNTS, Form, Layout, Leaf, allow_vectors, form_for
from aiodist_kernels.rules import Rule, rule_for
from tests.kernels import arrays
from tests.kernels.arrays import BFLOAT16, COMPLEX, FLOATS, assert_same_bits
from tests.kernels.test_reduce import COMPILED, DEFINED

ANY_COUNTS = (1, 5, 9, 10, 17, 20)
"""Numbers of buffers that the kernel for any number serves: below, at and beyond one and two unrolled steps."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One op on one dtype."""

    op: ReduceOp
    dtype: np.dtype
    accumulate: Accumulate

    def __str__(self) -> str:
        return f"{self.op.name}-{self.dtype}" + ("" if self.accumulate == "native" else "-float64")

    @property
    def rule(self) -> Rule:
        return rule_for(self.op, self.dtype, self.accumulate)

    def forms(self) -> list[tuple[Form, int]]:
        """Return each kernel with a number of buffers for it."""
        fixed = [(form_for(self.rule, count, leaves=leaves), count) for count in DIRECT_COUNTS for leaves in (1, 2)]
        return [*fixed, *((form_for(self.rule, count), count) for count in ANY_COUNTS)]


WIDENED = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT)

CASES = [
    *[Case(op, dtype, "native") for op, dtype in DEFINED],
    *[Case(op, dtype, "float64") for op in WIDENED for dtype in (*FLOATS[:3], COMPLEX[0])],
]

SOME_CASES = [
    *[Case(op, dtype, "native") for op, dtype in COMPILED],
    *[Case(ReduceOp.SUM, dtype, "float64") for dtype in (*FLOATS[:3], COMPLEX[0])],
    Case(ReduceOp.MEAN, BFLOAT16, "float64"),
]

ONE_OF_EACH_LAYOUT = [
    Case(ReduceOp.SUM, np.dtype(np.float32), "native"),
    Case(ReduceOp.MEAN, BFLOAT16, "native"),
    Case(ReduceOp.MEAN, np.dtype(np.int8), "native"),
    Case(ReduceOp.PRODUCT, COMPLEX[1], "native"),
    Case(ReduceOp.MAX, np.dtype(bool), "native"),
]
"""Lanes of 4, 2 and 1 bytes, a result wider than the buffers, elements of two lanes, one vector an element."""


# Memory: addresses of leaves, poisoned results with guards around them.

GUARD = 64
POISON = 0xA5


def aligned(nbytes: int, offset: int) -> np.ndarray:
    """Return poisoned bytes, and a guard behind them, that begin `offset` bytes behind a multiple of 16."""
    raw = np.full(nbytes + GUARD + 32, POISON, np.uint8)
    start = -raw.ctypes.data % 16 + offset
    return raw[start : start + nbytes + GUARD]


def placed(values: np.ndarray, offset: int) -> np.ndarray:
    """Return a copy of `values` that begins `offset` bytes behind a multiple of 16."""
    memory = aligned(values.nbytes, offset)[: values.nbytes].view(values.dtype)
    memory[...] = values
    return memory


@dataclasses.dataclass
class Reduction:
    """One leaf: its buffers, where its result goes, and what that must be."""

    buffers: list[np.ndarray]
    memory: np.ndarray
    out: np.ndarray
    wanted: np.ndarray

    @property
    def leaf(self) -> Leaf:
        return Leaf(self.out.ctypes.data, tuple([buffer.ctypes.data for buffer in self.buffers]), self.wanted.size)

    def check(self) -> None:
        """Compare the result's bits, and see that nothing behind it was written."""
        assert_same_bits(self.out, self.wanted)
        assert (self.memory[self.out.nbytes :] == POISON).all(), "written behind the end"


def pack(form: Form, leaves: list[Leaf], components: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables of heads and of rows for leaves of one dtype, of so many lanes an element."""
    layout = Layout(form, [leaf.elements * components for leaf in leaves], len(leaves[0].buffers))
    return layout.heads, layout.rows(np.array([(leaf.out, *leaf.buffers) for leaf in leaves], np.int64))


def direct_arguments(form: Form, leaf: Leaf, components: int) -> list[int]:
    """Return what a kernel without tables is launched with."""
    lanes, addresses = leaf.elements * components, (leaf.out, *leaf.buffers)
    return [*addresses, lanes // form.width if allow_vectors(addresses) else 0, lanes]


def reduction(
    op: ReduceOp,
    dtype: np.dtype,
    count: int,
    size: int,
    *,
    seed: int = 0,
    accumulate: Accumulate = "native",
    offset: int = 0,
    in_place: int | None = None,
) -> Reduction:
    """Make a leaf of random values; its result may go to the memory of one of the buffers."""
    buffers = [placed(values, offset) for values in arrays.buffers(seed, count, (size,), dtype)]
    wanted = reduce(op, [buffer.copy() for buffer in buffers], accumulate=accumulate)
    memory = aligned(wanted.nbytes, offset if wanted.dtype == dtype else 0)
    out = memory[: wanted.nbytes].view(wanted.dtype)
    if in_place is not None:
        out = buffers[in_place]
        memory = out.view(np.uint8)
    return Reduction(buffers, memory, out, wanted)


def copy_of(dtype: np.dtype, size: int, *, offset: int = 0) -> Reduction:
    """Make a leaf of one buffer of any bits, whose result is a copy."""
    bits = np.random.default_rng(size).integers(0, 256, size * dtype.itemsize, np.uint8)
    buffer = placed(bits.view(dtype), offset)
    memory = aligned(buffer.nbytes, offset)
    return Reduction([buffer], memory, memory[: buffer.nbytes].view(dtype), buffer.copy())
