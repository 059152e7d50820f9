# SPDX-License-Identifier: Apache-2.0
"""Numba kernels for the CPU: one pass over n buffers, in vectors of 64 bytes of result.

The fold stays in registers. Kernels release the GIL, start no threads, and take addresses, never arrays: the caller
keeps the memory alive. They are not cached on disk: loading from Numba's cache takes over half as long as compiling, in
the same thread. NumPy does products of complex numbers.
"""

import os
import platform
from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.core import codegen
from numba.extending import intrinsic

from aiodist_kernels import lanes
from aiodist_kernels.rules import Rule, is_bfloat16, is_half, lane

_host_features: Any = codegen.get_host_cpu_features
_types: Any = types  # Numba annotates only some of them

VECTOR_BYTES: Final = 64

TURN_BYTES: Final = 2 << 20
"""Bytes to read, in some tenths of a millisecond, before yielding the core to other threads. The system itself switches
only every few milliseconds, which is long for an event loop."""

Kernel = Callable[[int, Any, int, int, bool], None]
"""(address of the result, tuple of the buffers' addresses, first lane, end of the lanes, streaming)"""


def can_compile(rule: Rule) -> bool:
    """Return whether the processor converts float16, if the rule needs it; there is no library function to link."""
    if not is_half(rule.dtype) or is_bfloat16(rule.dtype) or platform.machine().lower() in {"aarch64", "arm64"}:
        return True
    return {"+avx2", "+f16c"} <= set(_host_features().split(","))


def compile_kernel(rule: Rule, count: int) -> Kernel:  # noqa: C901  (each function would be compiled separately)
    """Compile the kernel for a number of buffers; it takes a few tenths of a second."""
    size = lane(rule.result).itemsize
    width = VECTOR_BYTES // size
    whole = _fold_all(rule, count, width, streaming=False)
    streamed = _fold_all(rule, count, width, streaming=True)
    single = _fold_all(rule, count, 1, streaming=False)
    fence: Any = _fence
    give_way: Any = _give_way
    turn = max(width, TURN_BYTES // (lane(rule.dtype).itemsize * count) // width * width)

    def kernel(out: Any, buffers: Any, start: Any, stop: Any, streaming: Any) -> None:
        index = start
        if streaming:
            while index < stop and (out + index * size) % VECTOR_BYTES:
                single(out, buffers, index)
                index += 1
        while index + width <= stop:
            pause = min(index + turn, stop)
            if streaming:
                while index + width <= pause:
                    streamed(out, buffers, index)
                    index += width
            else:
                while index + width <= pause:
                    whole(out, buffers, index)
                    index += width
            if pause < stop:
                give_way()
        if streaming:
            fence()
        while index < stop:
            single(out, buffers, index)
            index += 1

    buffers = _types.UniTuple(_types.intp, count)
    signature = _types.void(_types.intp, buffers, _types.intp, _types.intp, _types.boolean)
    compiled: Kernel = njit(signature, nogil=True)(kernel)
    return compiled


def _fold_all(rule: Rule, count: int, width: int, *, streaming: bool) -> Any:
    """Make `f(out, buffers, index)`: fold the lanes [index, index + width) of all buffers."""

    def fold_all(_context: Any, out: Any, buffers: Any, index: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            out, buffers, index = arguments
            total = None
            for place in range(count):
                base = builder.extract_value(buffers, place)
                value = lanes.load(builder, rule, lanes.address(builder, base, index, rule.dtype), width)
                total = value if total is None else lanes.fold(builder, rule, total, value)
            result = lanes.finish(builder, rule, total, ir.Constant(ir.IntType(64), count))
            lanes.store(builder, result, lanes.address(builder, out, index, rule.result), streaming=streaming)

        return _types.void(out, buffers, index), generate

    return intrinsic(fold_all)


@intrinsic
def _fence(_context: Any) -> Any:
    """Order streaming stores before any store that announces them to another thread."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return _types.void(), generate


_yield: Any = _types.ExternalFunction("sched_yield", _types.int32()) if hasattr(os, "sched_yield") else njit(lambda: 0)


@njit
def _give_way() -> None:
    """Yield the core to another thread, if one waits for it."""
    _yield()
