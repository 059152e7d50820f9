# SPDX-License-Identifier: Apache-2.0
"""Numba kernels for the CPU: one pass over n buffers, in vectors of 64 bytes of result.

Addresses are arguments, and the fold stays in registers. Kernels hold no lock (`nogil=True`), start no threads, and see
addresses, never arrays: the caller keeps the memory alive. They are not cached on disk: loading from Numba's cache
takes over half as long as compiling, and happens on the same thread.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from aiodist_kernels import lanes
from aiodist_kernels.lanes import constant
from aiodist_kernels.rules import Recipe

_types: Any = types  # Numba annotates some of them, and not those that are used here

VECTOR_BYTES: Final = 64

TURN_BYTES: Final = 2 << 20
"""Bytes that are read before other threads are let onto the core, some tenths of a millisecond. Systems look only
every few milliseconds whether somebody else should run, which is long for an event loop."""

Kernel = Callable[[int, Any, int, int, bool], None]
"""(address of the result, addresses of the buffers as a tuple, first lane, lane behind the last, streaming)"""


def compile_kernel(recipe: Recipe) -> Kernel:  # noqa: C901  (a function for each loop would be compiled apart)
    """Compile the kernel of a recipe; it takes a few tenths of a second."""
    width, grain, size = VECTOR_BYTES // recipe.result.size, recipe.lanes_per_element, recipe.result.size
    whole = _fold_all(recipe, width, streaming=False)
    streamed = _fold_all(recipe, width, streaming=True)
    single = _fold_all(recipe, grain, streaming=False)
    fence, give_way = _fence(), _give_way()
    turn = max(width, TURN_BYTES // (recipe.storage.size * recipe.count) // width * width)

    def kernel(out: Any, buffers: Any, start: Any, stop: Any, streaming: Any) -> None:
        index = start
        if streaming:
            while index < stop and (out + index * size) % VECTOR_BYTES:
                single(out, buffers, index)
                index += grain
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
            index += grain

    buffers = _types.UniTuple(_types.intp, recipe.count)
    signature = _types.void(_types.intp, buffers, _types.intp, _types.intp, _types.boolean)
    compiled: Kernel = njit(signature, nogil=True)(kernel)
    return compiled


def _fold_all(recipe: Recipe, width: int, *, streaming: bool) -> Any:
    """Make `f(out, buffers, index)`: fold the lanes [index, index + width) of all buffers."""

    def fold_all(_context: Any, out: Any, buffers: Any, index: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            out, buffers, index = arguments
            count = constant(ir.VectorType(lanes.lane_type(recipe.accumulator), width), recipe.count)
            total = None
            for place in range(recipe.count):
                base = builder.extract_value(buffers, place)
                address = _address(builder, base, index, recipe.storage.size)
                value = lanes.load(builder, recipe, address, width)
                total = value if total is None else lanes.fold(builder, recipe, total, value)
            result = lanes.finish(builder, recipe, total, count)
            address = _address(builder, out, index, recipe.result.size)
            lanes.store(builder, result, address, streaming=streaming)

        return _types.void(out, buffers, index), generate

    return intrinsic(fold_all)


@cache
def _fence() -> Any:
    """Make `f()`: order streaming stores before whatever tells another thread of them."""

    def fence(_context: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return _types.void(), generate

    return intrinsic(fence)


@cache
def _give_way() -> Any:
    """Make `f()`: let the core run another thread, if one waits for it."""
    if not hasattr(os, "sched_yield"):
        return njit(lambda: None)
    yields = _types.ExternalFunction("sched_yield", _types.int32())

    def give_way() -> None:
        yields()

    return njit(give_way)


def _address(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.add(base, builder.mul(index, ir.Constant(index.type, size)))
