# SPDX-License-Identifier: Apache-2.0
"""Numba kernels for small values: one call that reads a list of arrays itself, for any number of them.

To have Numba look at each argument, or to ask NumPy where each array lies, takes longer than to add a small
array. So these kernels get the list and the result's array as they are, and read where the memory lies from the
objects, in whose layout CPython and NumPy have bound themselves (`layout_is_known` looks whether they have). They
hold the interpreter's lock, so nothing changes meanwhile, and look at every array before they touch its memory: what
is not a contiguous array of the result's shape and the first one's dtype makes them return False, with nothing done.
A scalar's number lies in the object itself; whether there are arrays or scalars the caller says, as it cannot be seen
from a type that is neither (a subclass of either).

One pass, as in `kernels_cpu`: groups of vectors stay in registers from the first buffer to the last.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numba import extending, njit, types
from numba.extending import intrinsic

from aiodist_kernels import lanes
from aiodist_kernels.kernels_cpu import vector_width
from aiodist_kernels.llvm import alloca, constant, count_from_one, ir
from aiodist_kernels.recipes import Recipe

_types: Any = types  # Numba annotates some of these, and not those that are used here
_numba: Any = extending

SmallKernel = Callable[[Sequence[Any], Any, int], bool]
"""(list or tuple of arrays or of NumPy's scalars, array for the result, bytes of one of them): whether it was done.

The bytes of a scalar are given as a negative number."""

MOST: Final = 1024
"""Buffers at most: where they lie is kept on the stack."""

GROUP: Final = 4
"""Vectors that are folded together, so that the next buffer's address is looked up less often."""

# Where fields lie in an object, in bytes: of any object; of lists and tuples; of NumPy's arrays.
_HEAD: Final = object.__basicsize__
_TYPE, _SIZE, _LISTED = _HEAD - 8, _HEAD, _HEAD + 8
_ITEMS: Final = tuple.__basicsize__  # behind a tuple's hash, since Python 3.14
_DATA, _RANK, _SHAPE, _DTYPE, _FLAGS = _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48

_LIST, _TUPLE, _ARRAY = id(list), id(tuple), id(np.ndarray)
_CONTIGUOUS: Final = 1


def _inner(function: Callable[..., Any]) -> Any:
    """Compile a function for kernels to call."""
    return njit(function)


def _instruction(build: Callable[..., Any]) -> Any:
    """Make an instruction for kernels."""
    return intrinsic(build)


def layout_is_known() -> bool:
    """Say whether objects lie in memory as these kernels read them."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    array, scalar = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[1:], np.float32(1.5)
    listed, tupled = [array, scalar], (array, scalar)
    return (
        [_read(listed, _TYPE), _read(tupled, _TYPE), _read(array, _TYPE)] == [_LIST, _TUPLE, _ARRAY]
        and [_read(listed, _SIZE), _read(tupled, _SIZE)] == [2, 2]
        and _read_at(_read(listed, _LISTED) + 8) == _read(tupled, _ITEMS + 8) == id(scalar)
        and _read(array, _DATA) == array.__array_interface__["data"][0]
        and [_read(array, _RANK) & 0xFFFFFFFF, _read(array, _DTYPE)] == [3, id(array.dtype)]
        and [_read_at(_read(array, _SHAPE) + 8 * axis) for axis in range(3)] == [1, 3, 4]
        and [_read(a, _FLAGS) & _CONTIGUOUS for a in (array, array[..., ::2])] == [1, 0]
        and _read(scalar, _HEAD) & 0xFFFFFFFF == int(scalar.view(np.uint32))
    )


def _read(thing: object, offset: int) -> int:
    return _read_at(id(thing) + offset)


def _read_at(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def compile_small(recipe: Recipe) -> SmallKernel:
    """Compile the kernel of a recipe that serves any number of buffers."""
    width, grain, size = vector_width(recipe), recipe.lanes_per_element, recipe.storage.size
    wide = width if recipe.storage.is_half else GROUP * width  # conversions need the registers
    fold_wide, fold_vector, fold_one = (_fold_places(recipe, w) for w in (wide, width, grain))

    def kernel(objects: Any, out: Any, nbytes: Any) -> bool:
        items, count, result = _items_of(_place_of(objects)), _peek(_place_of(objects) + _SIZE), _place_of(out)
        if not 0 < count <= MOST:
            return False
        table = _words(count)
        if not (items and _is_array(result)):
            return False
        if not (_find_arrays(items, count, table, result) if nbytes >= 0 else _find_scalars(items, count, table)):
            return False
        target, stop, index = _peek(result + _DATA), abs(nbytes) // size, 0
        while index + wide <= stop:
            fold_wide(target, table, count, index)
            index += wide
        while index + width <= stop:
            fold_vector(target, table, count, index)
            index += width
        while index < stop:
            fold_one(target, table, count, index)
            index += grain
        return True

    signature = _types.boolean(_object, _object, _types.intp)
    return _entry(njit(signature)(kernel))


_kept: Final[list[Any]] = []
"""What owns compiled code."""


def _entry(compiled: Any) -> SmallKernel:
    """Return the way into a kernel past Numba's look at the arguments."""
    _kept.append(compiled)
    (overload,) = compiled.overloads.values()
    entry: SmallKernel = overload.entry_point
    return entry


class _Object(_types.Opaque):  # type: ignore[misc]
    """Any object, by its address."""


_object: Final = _Object("aiodist object")
_numba.register_model(_Object)(_numba.models.OpaqueModel)
_numba.unbox(_Object)(lambda _type, thing, _context: _numba.NativeValue(thing))


@_instruction
def _place_of(_context: Any, thing: Any) -> Any:
    """Return an object's address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return _types.intp(thing), generate


@_instruction
def _peek(_context: Any, address: Any) -> Any:
    """Return the eight bytes at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _load(builder, arguments[0])

    return _types.intp(address), generate


@_inner
def _items_of(listed: int) -> Any:
    """Return the place of the first of a list's or tuple's items; 0 for anything else."""
    kind = _peek(listed + _TYPE)
    if kind == _LIST:
        return _peek(listed + _LISTED)
    return listed + _ITEMS if kind == _TUPLE else 0


@_inner
def _find_arrays(items: Any, count: Any, table: Any, result: Any) -> bool:
    """Write into a table where the numbers of all items lie, which must be arrays like each other."""
    first = _peek(items)
    for place in range(0, 8 * count, 8):
        one = _peek(items + place)
        if not (_is_array(one) and _peek(one + _DTYPE) == _peek(first + _DTYPE) and _same_shape(one, result)):
            return False
        _poke(table + place, _peek(one + _DATA))
    return True


@_inner
def _find_scalars(items: Any, count: Any, table: Any) -> bool:
    """Write into a table where the numbers of all items lie, which must be NumPy's scalars, all of one type."""
    kind = _peek(_peek(items) + _TYPE)
    for place in range(0, 8 * count, 8):
        one = _peek(items + place)
        if _peek(one + _TYPE) != kind or kind == _ARRAY:
            return False
        _poke(table + place, one + _HEAD)
    return True


@_inner
def _is_array(thing: Any) -> bool:
    """Say whether this is an array without gaps, in C order."""
    return bool(_peek(thing + _TYPE) == _ARRAY and _peek(thing + _FLAGS) & _CONTIGUOUS != 0)


@_inner
def _same_shape(one: Any, other: Any) -> bool:
    rank = _peek(one + _RANK) & 0xFFFFFFFF
    if rank != _peek(other + _RANK) & 0xFFFFFFFF:
        return False
    shape, wanted = _peek(one + _SHAPE), _peek(other + _SHAPE)
    same = True
    for axis in range(0, 8 * rank, 8):
        same &= _peek(shape + axis) == _peek(wanted + axis)
    return bool(same)


@_instruction
def _poke(_context: Any, address: Any, value: Any) -> Any:
    """Write eight bytes."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()))
        return context.get_dummy_value()

    return _types.void(address, value), generate


@_instruction
def _words(_context: Any, count: Any) -> Any:
    """Return the address of so many words on the stack."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        return builder.ptrtoint(builder.alloca(word, arguments[0]), word)

    return _types.intp(count), generate


def _fold_places(recipe: Recipe, width: int) -> Any:
    """Make `f(out, table, count, index)`: fold the lanes [index, index + width) of the buffers at a table's places."""

    def fold_places(_context: Any, out: Any, table: Any, count: Any, index: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            out, table, count, index = arguments

            def value_of(place: Any) -> Any:
                base = _load(builder, builder.add(table, builder.mul(place, constant(place.type, 8))))
                address = builder.add(base, builder.mul(index, constant(index.type, recipe.storage.size)))
                return lanes.load_storage(builder, recipe, address, width)

            first = value_of(constant(count.type, 0))
            total = alloca(builder, first.type)
            builder.store(first, total)
            with count_from_one(builder, count) as place:
                builder.store(lanes.fold(builder, recipe, builder.load(total), value_of(place)), total)
            many = lanes.spread_count(builder, recipe, count, width)
            result = lanes.finish(builder, recipe, builder.load(total), many)
            address = builder.add(out, builder.mul(index, constant(index.type, recipe.result.size)))
            lanes.store(builder, result, address, streaming=False)

        return _types.void(out, table, count, index), generate

    return intrinsic(fold_places)


def _load(builder: Any, address: Any) -> Any:
    word = ir.IntType(64)
    return builder.load(builder.inttoptr(address, word.as_pointer()))
