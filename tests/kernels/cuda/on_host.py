# SPDX-License-Identifier: Apache-2.0
"""What kernels compute, by NumPy on host memory: the devices of fake drivers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist_kernels import ReduceOp
from aiodist_kernels.numpy_tier import quietly
from aiodist_kernels.rules import Finish, Rule, is_bfloat16, lane, later_zero_wins, to_odd_float32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiodist_kernels.cuda.forms import Form

    Check = Callable[[int, int], object]


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
        quietly(_reduce, form.rule, out, buffers, 0, lanes, touches)
        return
    heads, rows, chunks, count = arguments
    reads_table(heads, 32 * chunks)
    entries = np.ctypeslib.as_array((ctypes.c_int64 * (4 * chunks)).from_address(heads)).reshape(-1, 4)
    for row, low, _, high in entries.tolist():
        reads_table(rows + 8 * row, 8 * (2 + count))
        _, out, *buffers = (ctypes.c_int64 * (2 + count)).from_address(rows + 8 * row)
        quietly(_reduce, form.rule, out, buffers, low, high, touches)


def _reduce(rule: Rule, out: int, buffers: Sequence[int], low: int, high: int, touches: Check) -> None:
    """Reduce the lanes [low, high)."""

    def memory(address: int, dtype: np.dtype) -> np.ndarray:
        each = lane(dtype).itemsize
        place, size = address + low * each, (high - low) * each
        touches(place, size)
        raw: Any = (ctypes.c_ubyte * size).from_address(place)
        return np.frombuffer(raw, np.dtype(f"u{each}"))

    total, *values = [_widened(rule, memory(address, rule.dtype)) for address in buffers]
    for value in values:
        total = _folded(rule, total, value)
    result = memory(out, rule.result)
    result[...] = _finished(rule, total, len(buffers)).view(result.dtype)


def _widened(rule: Rule, bits: np.ndarray) -> np.ndarray:
    numbers: Any
    if is_bfloat16(rule.dtype):
        numbers = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        numbers = bits != 0 if rule.dtype.kind == "b" else bits.view(lane(rule.dtype))
    widened: np.ndarray = numbers.astype(rule.registers)
    return widened


def _folded(rule: Rule, total: np.ndarray, value: np.ndarray) -> np.ndarray:
    if rule.grain > 1:
        kind = f"c{2 * total.itemsize}"
        product: np.ndarray = np.multiply(total.view(kind), value.view(kind)).view(total.dtype)
        return product
    if total.dtype.kind == "f" and rule.op in (ReduceOp.MIN, ReduceOp.MAX):
        first, second = (total, value) if later_zero_wins(rule.dtype) else (value, total)
        is_first = first < second if rule.op is ReduceOp.MIN else first > second
        return np.where(is_first | np.isnan(first), first, second)
    result: np.ndarray = rule.ufunc(total, value)
    return result


def _finished(rule: Rule, total: np.ndarray, count: int) -> np.ndarray:
    if rule.finish is Finish.SCALE:
        total = total * (total.dtype.type(1) / total.dtype.type(count))
    elif rule.finish is Finish.DIVIDE:
        total = total / total.dtype.type(count)
    if not is_bfloat16(rule.result):
        return total.astype(lane(rule.result))
    if total.dtype == np.float64:
        total = to_odd_float32(total)
    bits = total.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    near = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(total), bits >> np.uint32(16) | np.uint32(0x40), near).astype(np.uint16)
