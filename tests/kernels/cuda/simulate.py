# SPDX-License-Identifier: Apache-2.0
"""Run kernels in the CUDA simulator, in a process of their own: it must be chosen before Numba is imported.

    NUMBA_ENABLE_CUDASIM=1 python -m tests.kernels.cuda.simulate

prints one JSON object: for each case the traceback of what went wrong, or null.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist_kernels.cuda.forms import copying, pack, vectors
from aiodist_kernels.cuda.kernels import make
from aiodist_kernels.cuda.provider import cuda, simulated
from aiodist_kernels.cuda.simulated import Simulated
from aiodist_kernels.rules import components
from tests.kernels.cuda.cases import CASES, ONE_OF_EACH_LAYOUT, Case
from tests.kernels.cuda.memory import Reduction, address, copy_of, reduction
from tests.project.apart import report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiodist_kernels.cuda.forms import Form

BLOCKS, THREADS = 2, 4


def launch(form: Form, lanes_per_element: int, leaves: Sequence[Reduction]) -> None:
    """Reduce the leaves with the kernel of one form, and check each."""
    kernel: Any = cuda.jit(make(form, Simulated(form)))[BLOCKS, THREADS]
    if form.tabled:
        table = pack(form, [leaf.leaf for leaf in leaves], lanes_per_element)
        kernel(address(table.heads), address(table.rows), len(table.heads), len(leaves[0].buffers))
    else:
        leaf = leaves[0].leaf
        lanes = leaf.elements * lanes_per_element
        kernel(leaf.out, leaf.buffers, vectors(form, leaf, lanes), lanes)
    for each in leaves:
        each.check()


def forms(case: Case) -> None:
    """Run kernels of a case once, on an odd number of elements: every form for one case of each layout, else some."""
    turn = CASES.index(case) % 4
    for seed, (form, count) in enumerate(case.forms() if case in ONE_OF_EACH_LAYOUT else case.forms()[turn::4]):
        size = 3 + BLOCKS * THREADS * form.width // form.grain * 3 // 2
        leaf = reduction(case.op, case.dtype, count, size, seed=seed, accumulate=case.accumulate)
        launch(form, components(case.dtype), [leaf])


def every_size(case: Case) -> None:
    """Sizes around whole vectors and a round of all threads."""
    for form, count in case.forms()[:2]:
        for size in (1, 2, form.width, form.width + 1, 2 * THREADS * form.width, 1001):
            launch(form, components(case.dtype), [reduction(case.op, case.dtype, count, size, seed=size)])


def misaligned(case: Case) -> None:
    """Addresses that are multiples of an element only."""
    for form, count in (*case.forms()[:4], case.forms()[-1]):
        launch(
            form, components(case.dtype), [reduction(case.op, case.dtype, count, 77, offset=case.dtype.itemsize % 16)]
        )


def in_place(case: Case) -> None:
    """The result takes the place of a buffer, first, middle or last."""
    if case.rule.result != case.dtype:
        return
    for form, count in (*case.forms()[2:4], case.forms()[-1]):
        for place in (0, 1, count - 1):
            launch(form, components(case.dtype), [reduction(case.op, case.dtype, count, 99, in_place=place)])


def many_leaves(case: Case) -> None:
    """One launch for leaves of many sizes: empty ones, single elements, several chunks, unaligned ones."""
    for form, count in ((form, count) for form, count in case.forms() if form.tabled and count in {1, 3, 9}):
        sizes = (5, 0, 1, form.chunk // form.grain + 7, 0, 64, 2 * form.chunk // form.grain)
        leaves = [reduction(case.op, case.dtype, count, size, seed=i) for i, size in enumerate(sizes)]
        leaves.append(reduction(case.op, case.dtype, count, 33, offset=case.dtype.itemsize % 16))
        launch(form, components(case.dtype), leaves)


def copies(case: Case) -> None:
    """Many copies in one launch."""
    dtype = case.dtype
    form = copying(dtype.itemsize)
    sizes = (5, 0, 1, form.chunk + 7, 64)
    leaves = [copy_of(dtype, size) for size in sizes] + [copy_of(dtype, 33, offset=min(dtype.itemsize, 4))]
    launch(form, dtype.itemsize // form.recipe.storage.size, leaves)


SPECIAL = (every_size, misaligned, in_place, many_leaves, copies)


def jobs() -> dict[str, Callable[[], None]]:
    """Return all there is to run, by name."""
    found: list[tuple[Callable[[Case], None], Case]] = [(forms, case) for case in CASES]
    found += [(job, case) for job in SPECIAL for case in ONE_OF_EACH_LAYOUT]
    return {f"{job.__name__}[{case}]": partial(job, case) for job, case in found}


if __name__ == "__main__":
    assert simulated(), "set NUMBA_ENABLE_CUDASIM=1"
    np.seterr(all="ignore")
    report(jobs())
