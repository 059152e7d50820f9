"""What a variable takes for a value: arrays of its shape, and numbers of its dtype or of a kind that widens to it."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import host_type_of
from aiodist_kernels import ReduceOp
from aiodist_kernels.arguments import check_unmasked

Array = np.ndarray[Any, Any]

_LADDER = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}  # V: bfloat16, as the libraries that have it register it


def initial_array(value: Any, dtype: Any) -> Array:
    """Return a read-only array of a variable's initial value, which shares no memory with it.

    Raises:
        TypeError: the value is no array or number, or not of the dtype's kind.
    """
    given = _as_array(value)
    _check_numbers("a variable", value, given)
    wanted = (given.dtype if dtype is None else np.dtype(dtype)).newbyteorder("=")
    if wanted.kind != "b":
        kernels.result_dtype(ReduceOp.SUM, wanted)  # whatever can be summed can be held
    _check_kind("a variable", value, given, wanted)
    return frozen_copy(_as_array(value, wanted))


def converted(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Array:
    """Return a value that is assigned, as an array of the variable's shape and dtype; it may be the value itself.

    Raises:
        OverflowError: a Python int that the dtype cannot hold.
        TypeError: the value is no array or number, or of a kind that would lose more than precision.
        ValueError: it has another shape; nothing is broadcast.
    """
    given = _as_array(value)
    _check_numbers(f"the variable {name!r}", value, given)
    if given.shape != shape:
        raise ValueError(
            f"the variable {name!r} has the shape {shape}, and nothing is broadcast; got a value of shape {given.shape}"
        )
    _check_kind(f"the variable {name!r}", value, given, dtype)
    return given if given.dtype == dtype and given.dtype.isnative else _as_array(value, dtype)


def _as_array(value: Any, dtype: np.dtype[Any] | None = None) -> Array:
    check_unmasked(value, "for a variable")
    foreign = host_type_of(value)
    return np.asarray(value if foreign is None else foreign.view(value), dtype)


def _check_numbers(what: str, value: Any, given: Array) -> None:
    if given.dtype.kind not in _LADDER:
        raise TypeError(f"{what} expects an array of numbers, or a number, got {given.dtype}: {reprlib.repr(value)}")


def _check_kind(what: str, value: Any, given: Array, dtype: np.dtype[Any]) -> None:
    """Allow what NumPy allows in place, a Python int for an unsigned variable, and bfloat16 among floats."""
    rank, wanted = _LADDER[given.dtype.kind], _LADDER.get(dtype.kind, -1)
    to_unsigned = (given.dtype.kind, dtype.kind) == ("i", "u") and isinstance(value, (np.ndarray, np.generic))
    if rank > wanted or to_unsigned:
        raise TypeError(f"{what} expects values that fit {dtype}, got {given.dtype}; cast them: value.astype(...)")


def frozen_copy(array: Array) -> Array:
    """Return a read-only copy."""
    copy = np.array(array, order="K", subok=False)
    copy.flags.writeable = False
    return copy
