# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for both capabilities, read its text, and assemble it: some minutes, so a step of its own.

python -m tests.kernels.cuda.every_ptx
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from typing import TYPE_CHECKING

from aiodist_kernels.cuda.compiled import compile_form
from tests.kernels.cuda.ptx_text import assemble, check_text
from tests.kernels.cuda.test_ptx import CAPABILITIES, every_kernel

if TYPE_CHECKING:
    from aiodist_kernels.cuda.forms import Form


def every_form() -> list[Form]:
    """List the forms of all kernels."""
    return [form for _, form, _ in every_kernel()]


def check(place: int) -> int:
    """Check one kernel; return for how many capabilities."""
    form = every_form()[place]
    for capability in CAPABILITIES:
        ptx = compile_form(form, capability).ptx
        check_text(form, ptx, capability)
        assemble(ptx, capability)
    return len(CAPABILITIES)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
        done = sum(pool.map(check, range(len(every_form())), chunksize=16))
    print(f"{done} programs: 128-bit accesses alone in their vector paths, no spills")
