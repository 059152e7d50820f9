# SPDX-License-Identifier: Apache-2.0
"""Numba kernels for the CPU: one pass over n buffers, in vectors of 64 bytes of result.

Two forms of one recipe: up to 16 buffers, whose addresses are arguments and whose fold stays in registers; and any
number, block by block through an accumulator in the nearest cache. They hold no lock (`nogil=True`), start no threads,
and see addresses, never arrays: the caller keeps the memory alive. They are not cached on disk: loading from Numba's
cache takes over half as long as compiling, and happens on the same thread.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from aiodist_kernels import lanes
from aiodist_kernels.lanes import constant
from aiodist_kernels.rules import Recipe

_types: Any = types  # Numba annotates some of them, and not those that are used here

VECTOR_BYTES: Final = 64
BLOCK_LANES: Final = 2048

TURN_BYTES: Final = 2 << 20
"""Bytes that are read before other threads are let onto the core, some tenths of a millisecond. Systems look only
every few milliseconds whether somebody else should run, which is long for an event loop."""

Kernel = Callable[[int, Any, int, int, bool], None]
"""(address of the result, addresses of the buffers, first lane, lane behind the last, streaming)"""


def compile_kernel(recipe: Recipe) -> Kernel:
    """Compile the kernel of a recipe; it takes a few tenths of a second.

    Addresses come as a tuple where the recipe has a count, else as an array of `np.intp`.
    """
    return _compile_unrolled(recipe) if recipe.count else _compile_counted(recipe)


def vector_width(recipe: Recipe) -> int:
    """Return how many lanes of the result one step of a kernel makes."""
    return VECTOR_BYTES // recipe.result.size


def _compile_unrolled(recipe: Recipe) -> Kernel:  # noqa: C901  (a function for each loop would be compiled apart)
    width, grain, size = vector_width(recipe), recipe.lanes_per_element, recipe.result.size
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

    return _compiled(kernel, _types.UniTuple(_types.intp, recipe.count))


def _compile_counted(recipe: Recipe) -> Kernel:  # noqa: C901  (as above)
    width, grain, size = vector_width(recipe), recipe.lanes_per_element, recipe.accumulator.size
    begin, begin_one = _begin(recipe, width), _begin(recipe, grain)
    add, add_one = _add(recipe, width), _add(recipe, grain)
    end, end_one = _end(recipe, width), _end(recipe, grain)
    recipe_bytes, give_way = recipe.storage.size, _give_way()

    def kernel(out: Any, buffers: Any, start: Any, stop: Any, _streaming: Any) -> None:
        block = np.empty(BLOCK_LANES * size, np.uint8)
        low, moved = start, 0
        while low < stop:
            high = min(low + BLOCK_LANES, stop)
            middle = high - (high - low) % width
            total = block.ctypes.data - low * size
            for index in range(low, middle, width):
                begin(total, buffers[0], index)
            for index in range(middle, high, grain):
                begin_one(total, buffers[0], index)
            for place in range(1, len(buffers)):
                for index in range(low, middle, width):
                    add(total, buffers[place], index)
                for index in range(middle, high, grain):
                    add_one(total, buffers[place], index)
            for index in range(low, middle, width):
                end(out, total, index, len(buffers))
            for index in range(middle, high, grain):
                end_one(out, total, index, len(buffers))
            low = high
            moved += BLOCK_LANES * recipe_bytes * len(buffers)
            if moved >= TURN_BYTES:
                moved = 0
                give_way()

    return _compiled(kernel, _types.Array(_types.intp, 1, "C"))


def _compiled(kernel: Callable[..., None], buffers: Any) -> Kernel:
    signature = _types.void(_types.intp, buffers, _types.intp, _types.intp, _types.boolean)
    compiled: Kernel = njit(signature, nogil=True)(kernel)
    return compiled


def _fold_all(recipe: Recipe, width: int, *, streaming: bool) -> Any:
    """Make `f(out, buffers, index)`: fold the lanes [index, index + width) of all buffers."""

    def fold_all(_context: Any, out: Any, buffers: Any, index: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            out, buffers, index = arguments
            count = constant(_vector(recipe, width), recipe.count)
            total = None
            for place in range(recipe.count):
                base = builder.extract_value(buffers, place)
                address = _address(builder, base, index, recipe.storage.size)
                value = lanes.load_storage(builder, recipe, address, width)
                total = value if total is None else lanes.fold(builder, recipe, total, value)
            result = lanes.finish(builder, recipe, total, count)
            address = _address(builder, out, index, recipe.result.size)
            lanes.store(builder, result, address, streaming=streaming)

        return _types.void(out, buffers, index), generate

    return intrinsic(fold_all)


def _begin(recipe: Recipe, width: int) -> Any:
    """Make `f(total, buffer, index)`: load lanes of the first buffer into the accumulator."""

    def begin(_context: Any, total: Any, buffer: Any, index: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            total, buffer, index = arguments
            address = _address(builder, buffer, index, recipe.storage.size)
            value = lanes.load_storage(builder, recipe, address, width)
            address = _address(builder, total, index, recipe.accumulator.size)
            lanes.store(builder, value, address, streaming=False)

        return _types.void(total, buffer, index), generate

    return intrinsic(begin)


def _add(recipe: Recipe, width: int) -> Any:
    """Make `f(total, buffer, index)`: fold lanes of a further buffer into the accumulator."""

    def add(_context: Any, total: Any, buffer: Any, index: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            total, buffer, index = arguments
            address = _address(builder, buffer, index, recipe.storage.size)
            value = lanes.load_storage(builder, recipe, address, width)
            address = _address(builder, total, index, recipe.accumulator.size)
            before = lanes.load(builder, recipe.accumulator, address, width)
            after = lanes.fold(builder, recipe, before, value)
            lanes.store(builder, after, address, streaming=False)

        return _types.void(total, buffer, index), generate

    return intrinsic(add)


def _end(recipe: Recipe, width: int) -> Any:
    """Make `f(out, total, index, count)`: finish lanes of the accumulator and store the result."""

    def end(_context: Any, out: Any, total: Any, index: Any, count: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            out, total, index, count = arguments
            address = _address(builder, total, index, recipe.accumulator.size)
            value = lanes.load(builder, recipe.accumulator, address, width)
            many = lanes.spread_count(builder, recipe, count, width)
            result = lanes.finish(builder, recipe, value, many)
            address = _address(builder, out, index, recipe.result.size)
            lanes.store(builder, result, address, streaming=False)

        return _types.void(out, total, index, count), generate

    return intrinsic(end)


def _fence() -> Any:
    """Make `f()`: order streaming stores before whatever tells another thread of them."""

    def fence(_context: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return _types.void(), generate

    return intrinsic(fence)


def _give_way() -> Any:
    """Make `f()`: let the core run another thread, if one waits for it."""
    if not hasattr(os, "sched_yield"):
        return njit(lambda: None)
    yields = _types.ExternalFunction("sched_yield", _types.int32())

    def give_way() -> None:
        yields()

    return njit(give_way)


def _vector(recipe: Recipe, width: int) -> Any:
    return ir.VectorType(lanes.lane_type(recipe.accumulator), width)


def _address(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.add(base, builder.mul(index, ir.Constant(index.type, size)))
