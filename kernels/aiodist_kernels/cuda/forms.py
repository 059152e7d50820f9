# SPDX-License-Identifier: Apache-2.0
"""Which kernels there are for a rule, and how work is dealt out to their threads.

Two forms of one recipe. A **direct** kernel takes the addresses of one leaf's buffers as arguments, so
nothing has to be uploaded; it is compiled for 2, 3, 4, 8 and 16 buffers. A **tabled** kernel reads
addresses from a table in device memory, for many leaves in one launch, and for any number of buffers.

Every thread takes 16 bytes of each buffer at a time, the widest access that there is, where all addresses
are multiples of 16, and single elements at the end of a leaf or where they are not.
"""

import dataclasses
import functools
from typing import Final

import numpy as np

from aiodist_kernels.recipes import Recipe, recipe_for
from aiodist_kernels.reduce_op import ReduceOp
from aiodist_kernels.rules import Rule, rule_for

VECTOR_BYTES: Final = 16
THREADS: Final = 256
GRID: Final = 2**31 - 1
"""Blocks that one launch can have."""

VECTORS_PER_THREAD: Final = 4
"""Of one chunk of a leaf: 16 KiB of each buffer for one block, a few microseconds of work."""

DIRECT_COUNTS: Final = (2, 3, 4, 8, 16)
UNROLLED: Final = 8
"""Buffers that a kernel for any number takes in one step: enough loads in flight to hide their latency."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One kernel.

    Attributes:
        recipe: what it computes; a count of 0 stands for any, one of 1 is a copy.
        tabled: whether addresses come from a table rather than as arguments.
    """

    recipe: Recipe
    tabled: bool

    @property
    def width(self) -> int:
        """Lanes in one vector of a buffer."""
        return VECTOR_BYTES // self.recipe.storage.size

    @property
    def grain(self) -> int:
        """Lanes in one element, which stay together."""
        return self.recipe.lanes_per_element

    @property
    def chunk(self) -> int:
        """Lanes of a leaf that one block of a tabled kernel takes at a time."""
        return self.width * THREADS * VECTORS_PER_THREAD


@functools.lru_cache(maxsize=1024)
def form_for(rule: Rule, count: int, *, leaves: int = 1) -> Form:
    """Return the kernel that reduces `leaves` leaves of `count` buffers each.

    Raises:
        TypeError: no kernel knows the dtype (long double).
    """
    recipe = recipe_for(rule, max(count, 2))
    if recipe is None:
        raise TypeError(f"{rule.op.name} of {rule.dtype}: GPUs have no such numbers; cast first, e.g. to float64")
    if count not in DIRECT_COUNTS:
        return Form(dataclasses.replace(recipe, count=0), tabled=True)
    return Form(recipe, tabled=leaves > 1)


@functools.cache
def copying(size: int) -> Form:
    """Return the kernel that copies leaves whose elements have so many bytes: it folds one buffer.

    Lanes have up to four bytes, as no more can be said of the addresses of complex numbers than of their parts'.
    """
    recipe = recipe_for(rule_for(ReduceOp.SUM, np.dtype(f"i{min(size, 4)}")), 2)
    assert recipe is not None
    return Form(dataclasses.replace(recipe, count=1), tabled=True)


def blocks(work: int) -> int:
    """Return how many blocks to launch for so many threads' worth of work: a thread for each, as far as a grid reaches.

    A grid that only fills the device, and goes round, was 2 to 6 % slower on an H100 wherever memory is the limit.
    """
    return max(1, min(-(-work // THREADS), GRID))
