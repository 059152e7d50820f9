# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, run on the CPU: the LLVM code for CUDA's compiler is compiled for the processor instead.

So loops, tables, tails and all of our instructions are compared with NumPy bit by bit, without a GPU. The output of
CUDA's compiler is checked as text, see `test_ptx`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from unittest import mock

import llvmlite.binding as llvm
import numpy as np
from numba.cuda.cudadrv import nvvm

from aiodist_kernels.cuda.compiled import compile_form
from aiodist_kernels.cuda.forms import Form

_PLACE = (ctypes.c_int32 * 4)()
"""The indices of the running thread, in the order of `_SPECIAL`."""

_SPECIAL = ("tid", "ctaid", "ntid", "nctaid")
_ROUNDED = {
    "add": "fadd {0} %x, %y",
    "mul": "fmul {0} %x, %y",
    "fma": "call {0} @llvm.fma.f{1}({0} %x, {0} %y, {0} %z)",
}


class Kernel(NamedTuple):
    """A kernel's PTX, and its LLVM code."""

    name: str
    ptx: str
    code: str


@lru_cache(maxsize=1024)
def compiled(form: Form, capability: tuple[int, int]) -> Kernel:
    """Compile a kernel, and record the input of CUDA's compiler."""
    given: list[str] = []
    real: Any = nvvm.compile_ir

    def noted(code: Sequence[str], **options: Any) -> Any:
        given.extend(code)
        return real(code, **options)

    compile_form.cache_clear()
    with mock.patch.object(nvvm, "compile_ir", noted):
        program = compile_form(form, capability)
    return Kernel(program.name, program.ptx, "".join(given))


def run(kernel: Kernel, arguments: Sequence[int], blocks: int, threads: int) -> None:
    """Run every thread of a launch, one after the other; the arguments are flattened."""
    engine = _machine_code(_for_the_processor(kernel.code))
    entry = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(engine.get_function_address(kernel.name))
    for block in range(blocks):
        for thread in range(threads):
            _PLACE[:] = [thread, block, threads, blocks]
            entry(*arguments)


def _for_the_processor(code: str) -> str:
    """Return LLVM code with functions in place of GPU intrinsics."""
    code = re.sub(r"^(target|declare) .*$", "", code, flags=re.MULTILINE)
    own = [
        f"declare {kind} @llvm.fma.f{bits}({kind}, {kind}, {kind})" for kind, bits in (("float", 32), ("double", 64))
    ]
    for name in sorted(set(re.findall(r'@"llvm\.nvvm\.([\w.]+)"', code))):
        *_, what, last = name.split(".")
        if last in "xyz":
            place = ctypes.addressof(_PLACE) + 4 * _SPECIAL.index(what)
            value = f"load i32, i32* inttoptr (i64 {place} to i32*)" if last == "x" else "add i32 0, 0"
            own.append(f'define i32 @"nvvm.{name}"() {{ %r = {value}\n ret i32 %r }}')
        else:
            kind, bits = {"f": ("float", 32), "d": ("double", 64)}[last]
            step = _ROUNDED[name.partition(".")[0]].format(kind, bits)
            parameters = ", ".join(f"{kind} %{letter}" for letter in ("xyz" if "fma" in step else "xy"))
            own.append(f'define {kind} @"nvvm.{name}"({parameters}) {{ %r = {step}\n ret {kind} %r }}')
    return code.replace('@"llvm.nvvm.', '@"nvvm.') + "\n".join(own)


def _to_half(number: float) -> float:
    """Round to float16, with its bits in the lower half of a register: the library function that LLVM calls."""
    with np.errstate(over="ignore"):
        return float(np.array([np.float64(number).astype(np.float16), 0], np.float16).view(np.float32)[0])


_TO_HALF = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_double)(_to_half)


@lru_cache(maxsize=1024)
def _machine_code(code: str) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol("__truncdfhf2", ctypes.cast(_TO_HALF, ctypes.c_void_p).value)
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(llvm.get_host_cpu_name(), features, opt=1)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), target)
    engine.finalize_object()
    return engine
