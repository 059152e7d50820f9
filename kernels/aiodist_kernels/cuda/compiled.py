# SPDX-License-Identifier: Apache-2.0
"""PTX: the text of a compiled kernel, and its name in it."""

import dataclasses
import functools
import re

from aiodist_kernels.cuda import provider
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.cuda.kernels import make


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One compiled kernel.

    Attributes:
        name: of the kernel in `ptx`.
        ptx: for a device of the compute capability that it was compiled for, or a later one.
    """

    name: str
    ptx: str


@functools.lru_cache(maxsize=1024)
def compile_form(form: Form, capability: tuple[int, int]) -> Program:
    """Compile a kernel; it takes a few tenths of a second, and as much again for the first.

    Raises:
        ImportError: no compiler for CUDA is installed.
    """
    from aiodist_kernels.cuda.intrinsics import Compiled, argument_types

    ptx = provider.compile_ptx(make(form, Compiled(form)), argument_types(form), capability)
    found = re.search(r"\.visible\s+\.entry\s+(\w+)", ptx)
    assert found is not None, "a kernel has an entry"
    return Program(found[1], ptx)
