# SPDX-License-Identifier: Apache-2.0
"""PTX: the text of a compiled kernel, and its name in it."""

import dataclasses
import functools
import re
from typing import Final

from aiodist_kernels.beside import considerately
from aiodist_kernels.cuda import provider
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.cuda.kernels import make

PTX_VERSION: Final = "7.8"
"""The oldest that knows compute capability 9.0. Compilers write their own, which older linkers and drivers refuse."""


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

    with considerately():
        ptx = provider.compile_ptx(make(form, Compiled(form)), argument_types(form), capability)
    found = re.search(r"\.visible\s+\.entry\s+(\w+)", ptx)
    assert found is not None, "a kernel has an entry"
    return Program(
        found[1], re.sub(r"^\.version\s+[\d.]+", f".version {PTX_VERSION}", ptx, count=1, flags=re.MULTILINE)
    )
