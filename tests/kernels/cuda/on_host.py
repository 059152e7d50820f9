# SPDX-License-Identifier: Apache-2.0
"""What kernels compute, by NumPy on host memory: the devices of fake drivers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist_kernels.numpy_tier import quietly
from aiodist_kernels.rules import Finish, Lane, Recipe, Step, to_odd_float32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiodist_kernels.cuda.forms import Form

    Check = Callable[[int, int], object]

UFUNCS: dict[Step, Any] = {
    Step.ADD: np.add,
    Step.MULTIPLY: np.multiply,
    Step.MINIMUM: np.minimum,
    Step.MAXIMUM: np.maximum,
}


def launch(form: Form, arguments: Sequence[int], reads_table: Check, touches: Check) -> None:
    """Do what a kernel does with its arguments.

    Args:
        form: the kernel.
        arguments: see `aiodist_kernels.cuda.kernels`.
        reads_table: called with address and bytes of each piece of a table before it is read.
        touches: called with address and bytes of the part of each buffer and result.
    """
    if not form.tabled:
        out, *buffers, vectors, lanes = arguments
        assert vectors * form.width <= lanes
        quietly(_reduce, form.recipe, out, buffers, 0, lanes, touches)
        return
    heads, rows, chunks, count = arguments
    reads_table(heads, 32 * chunks)
    entries = np.ctypeslib.as_array((ctypes.c_int64 * (4 * chunks)).from_address(heads)).reshape(-1, 4)
    for row, low, _, high in entries.tolist():
        reads_table(rows + 8 * row, 8 * (2 + count))
        _, out, *buffers = (ctypes.c_int64 * (2 + count)).from_address(rows + 8 * row)
        quietly(_reduce, form.recipe, out, buffers, low, high, touches)


def _reduce(recipe: Recipe, out: int, buffers: Sequence[int], low: int, high: int, touches: Check) -> None:
    """Reduce the lanes [low, high)."""

    def memory(address: int, lane: Lane) -> np.ndarray:
        place, size = address + low * lane.size, (high - low) * lane.size
        touches(place, size)
        raw: Any = (ctypes.c_ubyte * size).from_address(place)
        return np.frombuffer(raw, np.dtype(f"u{lane.size}"))

    total, *values = [_widened(recipe, memory(address, recipe.storage)) for address in buffers]
    for value in values:
        total = _folded(recipe, total, value)
    result = memory(out, recipe.result)
    result[...] = _finished(recipe, total, len(buffers)).view(result.dtype)


def _dtype(lane: Lane) -> np.dtype:
    return np.dtype(np.uint8 if lane is Lane.BOOL else lane.value)


def _widened(recipe: Recipe, bits: np.ndarray) -> np.ndarray:
    lane = recipe.storage
    numbers: Any
    if lane is Lane.BOOL:
        numbers = bits != 0
    elif lane is Lane.BFLOAT16:
        numbers = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        numbers = bits.view(lane.value)
    widened: np.ndarray = numbers.astype(_dtype(recipe.accumulator))
    return widened


def _folded(recipe: Recipe, total: np.ndarray, value: np.ndarray) -> np.ndarray:
    if recipe.step is Step.COMPLEX_MULTIPLY:
        kind = f"c{2 * total.itemsize}"
        product: np.ndarray = np.multiply(total.view(kind), value.view(kind)).view(total.dtype)
        return product
    if total.dtype.kind == "f" and recipe.step in (Step.MINIMUM, Step.MAXIMUM):
        first, second = (total, value) if recipe.later_zero_wins else (value, total)
        is_first = first < second if recipe.step is Step.MINIMUM else first > second
        return np.where(is_first | np.isnan(first), first, second)
    result: np.ndarray = UFUNCS[recipe.step](total, value)
    return result


def _finished(recipe: Recipe, total: np.ndarray, count: int) -> np.ndarray:
    if recipe.finish is Finish.SCALE:
        total = total * (total.dtype.type(1) / total.dtype.type(count))
    elif recipe.finish is Finish.DIVIDE:
        total = total / total.dtype.type(count)
    if recipe.result is not Lane.BFLOAT16:
        return total.astype(_dtype(recipe.result))
    if total.dtype == np.float64:
        total = to_odd_float32(total)
    bits = total.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    near = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(total), bits >> np.uint32(16) | np.uint32(0x40), near).astype(np.uint16)
