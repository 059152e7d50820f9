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

from aiodist_kernels.recipes import Recipe, recipe_for
from aiodist_kernels.rules import Rule

VECTOR_BYTES: Final = 16
THREADS: Final = 256
VECTORS_PER_THREAD: Final = 4
"""Of one chunk of a leaf: 16 KiB of each buffer for one block, a few microseconds of work."""

DIRECT_COUNTS: Final = (2, 3, 4, 8, 16)
UNROLLED: Final = 8
"""Buffers that a kernel for any number takes in one step: enough loads in flight to hide their latency."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One kernel.

    Attributes:
        recipe: what it computes; a count of 0 stands for any.
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


def tabled_arguments(form: Form, table: int, chunks: int, count: int, replicas: int | None = None) -> tuple[int, ...]:
    """Return the arguments of a tabled kernel.

    Args:
        form: the kernel.
        table: the table's address.
        chunks: how many chunks it has.
        count: buffers of each leaf.
        replicas: by how many a mean divides; None: by the number of buffers, the only one that other kernels know.
    """
    if form.recipe.count:
        return table, chunks, count
    return table, chunks, count, count if replicas is None else replicas


def blocks(work: int, multiprocessors: int) -> int:
    """Return how many blocks to launch for so many threads' worth of work, which they take in turns.

    Eight blocks of 256 threads fill a multiprocessor; more would only wait in line.
    """
    return max(1, min(-(-work // THREADS), 8 * multiprocessors))
