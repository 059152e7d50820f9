# SPDX-License-Identifier: Apache-2.0
"""The kernels' results by NumPy on host memory, for fake drivers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiodist_kernels import ReduceOp
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.numpy_tier import fold_for, quietly
from aiodist_kernels.rules import Rule, components, later_zero_wins

Check = Callable[[int, int], object]


def launch(form: Form, arguments: Sequence[int], reads_table: Check, touches: Check) -> None:
    """Do the work of a launch.

    Args:
        form: the kernel.
        arguments: see `aiodist_kernels.cuda.compiled`.
        reads_table: called with the address and size of each piece of a table before it is read.
        touches: called with the address and size of the part of each buffer and result that is accessed.
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
    """Reduce the lanes [low, high) by NumPy; other tests compare compiled kernels' bits with it."""
    begin, end = low // components(rule.dtype), high // components(rule.dtype)

    def memory(address: int, dtype: np.dtype) -> np.ndarray:
        place, size = address + begin * dtype.itemsize, (end - begin) * dtype.itemsize
        touches(place, size)
        raw: Any = (ctypes.c_ubyte * size).from_address(place)
        return np.frombuffer(raw, np.uint8).view(dtype)

    arrays, result = [memory(address, rule.dtype) for address in buffers], memory(out, rule.result)
    if rule.op not in (ReduceOp.MIN, ReduceOp.MAX) or rule.dtype.kind in "biu":
        result[...] = fold_for(rule, arrays[0].nbytes, len(arrays))(rule, arrays, None)
        return
    total = arrays[0]
    for array in arrays[1:]:  # NumPy's choice between zeros may depend on their position
        first, second = (total, array) if later_zero_wins(rule.dtype) else (array, total)
        is_first = first < second if rule.op is ReduceOp.MIN else first > second
        total = np.where(is_first | np.isnan(first), first, second)
    result[...] = total
