# SPDX-License-Identifier: Apache-2.0
"""The functions that a kernel calls, for the simulator: host memory by address, arithmetic by NumPy."""

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from aiodist_kernels.arguments import Array
from aiodist_kernels.cuda.folds import fold_all, reduce_all
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.numpy_tier import quietly
from aiodist_kernels.rules import Finish, Lane, Recipe, Step, to_odd_float32

_UFUNCS: Final[dict[Step, np.ufunc]] = {
    Step.ADD: np.add,
    Step.MULTIPLY: np.multiply,
    Step.MINIMUM: np.minimum,
    Step.MAXIMUM: np.maximum,
}


class Memory:
    """The machine of the simulator: `width` lanes at a time, in NumPy arrays."""

    def __init__(self, recipe: Recipe, width: int, *, vector: bool) -> None:
        self.recipe = recipe
        self.width = width
        self.vector = vector

    def load(self, address: int, index: int) -> Array:
        """See `folds.Machine`."""
        lane = self.recipe.storage
        bits = self._memory(address, index, lane).copy()
        numbers: Array
        if lane is Lane.BOOL:
            numbers = bits != 0
        elif lane is Lane.BFLOAT16:
            numbers = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            numbers = bits.view(lane.value)
        return numbers.astype(_dtype(self.recipe.accumulator))

    def fold(self, total: Array, value: Array) -> Array:
        """See `folds.Machine`."""
        if self.recipe.step is Step.COMPLEX_MULTIPLY:
            kind = f"c{2 * total.itemsize}"
            product: Array = np.multiply(total.view(kind), value.view(kind)).view(total.dtype)
            return product
        if total.dtype.kind == "f" and self.recipe.step in (Step.MINIMUM, Step.MAXIMUM):
            return self._choose(total, value)
        result: Array = _UFUNCS[self.recipe.step](total, value)
        return result

    def _choose(self, total: Array, value: Array) -> Array:
        """Choose the smaller or greater; a NaN wins, and of two zeros the one that the recipe says."""
        first, second = (total, value) if self.recipe.later_zero_wins else (value, total)
        is_first = first < second if self.recipe.step is Step.MINIMUM else first > second
        return np.where(is_first | np.isnan(first), first, second)

    def finish(self, total: Array, count: int) -> Array:
        """See `folds.Machine`."""
        if self.recipe.finish is Finish.SCALE:
            total = total * (total.dtype.type(1) / total.dtype.type(count))
        elif self.recipe.finish is Finish.DIVIDE:
            total = total / total.dtype.type(count)
        if self.recipe.result is not Lane.BFLOAT16:
            return total.astype(_dtype(self.recipe.result))
        if total.dtype == np.float64:
            total = to_odd_float32(total)
        return _bfloat16_bits(total)

    def store(self, address: int, index: int, value: Array) -> None:
        """See `folds.Machine`."""
        place = self._memory(address, index, self.recipe.result)
        place[...] = value.view(place.dtype)

    def _memory(self, address: int, index: int, lane: Lane) -> Array:
        place = address + index * lane.size
        size = self.width * lane.size
        needed = min(16, size) if self.vector else lane.size  # a result may be narrower than the buffers
        if place % needed:
            raise ValueError(f"an access of {needed} bytes at address {place:#x}, which is no multiple of that")
        memory: Any = (ctypes.c_ubyte * size).from_address(place)
        return np.frombuffer(memory, f"u{lane.size}")


def _dtype(lane: Lane) -> np.dtype[Any]:
    return np.dtype(np.uint8 if lane is Lane.BOOL else lane.value)


def _bfloat16_bits(numbers: Array) -> Array:
    """Round float32 to nearest even."""
    bits = numbers.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    near = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return np.where(np.isnan(numbers), bits >> np.uint32(16) | np.uint32(0x40), near).astype(np.uint16)


class Simulated:
    """Makes the functions that the kernel of one form calls; see `compiled.Compiled` for each."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def reduce_direct(self, *, vector: bool) -> Callable[..., None]:
        """Make `f(out, addresses, index)`."""
        machine = self._machine(vector=vector)
        return lambda out, addresses, index: quietly(reduce_all, machine, out, addresses, index, len(addresses))

    def reduce_row(self, *, vector: bool) -> Callable[..., None]:
        """Make `f(out, table, index)`."""
        machine, count = self._machine(vector=vector), self.form.recipe.count
        return lambda out, table, index: quietly(reduce_all, machine, out, _read(table, count), index, count)

    def begin(self, *, vector: bool) -> Callable[..., Array]:
        """Make `f(table, index)`."""
        machine = self._machine(vector=vector)
        return lambda table, index: fold_all(machine, _read(table, 1), index)

    def fold(self, many: int, *, vector: bool) -> Callable[..., Array]:
        """Make `f(total, table, index)`."""
        machine = self._machine(vector=vector)
        return lambda total, table, index: quietly(fold_all, machine, _read(table, many), index, total)

    def end(self, *, vector: bool) -> Callable[..., None]:
        """Make `f(out, total, index, count)`."""
        machine = self._machine(vector=vector)
        return lambda out, total, index, count: machine.store(out, index, quietly(machine.finish, total, count))

    def word(self) -> Callable[[int, int], int]:
        """Make `f(table, place)`."""
        return lambda table, place: _read(table + 8 * place, 1)[0]

    def _machine(self, *, vector: bool) -> Memory:
        return Memory(self.form.recipe, self.form.width if vector else self.form.grain, vector=vector)


def _read(table: int, many: int) -> list[int]:
    return list((ctypes.c_int64 * many).from_address(table))
