"""What a variable takes for a value, and how the values of several replicas become one."""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import Array, host_type_of
from aiodist._collectives.host import copied, fold, frozen
from aiodist_kernels import Accumulate, ReduceOp, pool
from aiodist_kernels.arguments import check_unmasked, empty_like


class _NamedChoice(enum.StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> Any:
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls.__members__[value.upper()]
        known = ", ".join(repr(str(member)) for member in cls)
        raise ValueError(f"{cls.__name__} must be one of {known}, got {value!r}")


class VariableSynchronization(_NamedChoice):
    """When the components of a variable are combined. Strings of any case are accepted for members.

    Attributes:
        AUTO: as ON_WRITE.
        NONE: never; not allowed for a strategy's variables, as in TensorFlow.
        ON_WRITE: at every assignment, so that all components are equal: a mirrored variable.
        ON_READ: when it is read outside of replicas; each replica assigns to its own component.
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(_NamedChoice):
    """How replicas' values or components are combined. Strings of any case are accepted for members.

    Attributes:
        NONE: not at all; values assigned to a mirrored variable must be equal.
        SUM: the sum.
        MEAN: the mean.
        ONLY_FIRST_REPLICA: replica 0's value.
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"

    @property
    def reduce_op(self) -> ReduceOp | None:
        """The corresponding reduction; None for NONE and ONLY_FIRST_REPLICA."""
        return _REDUCE_OPS.get(self)


_REDUCE_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}

for _class in (VariableSynchronization, VariableAggregation):
    _class.__module__ = "aiodist"
del _class


# Values of one replica.

_LADDER = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}  # V: bfloat16, as the libraries that have it register it


def initial_array(value: Any, dtype: Any) -> Array:
    """Return a read-only array of a variable's initial value, which shares no memory with it."""
    given = _as_array(value, "a variable")
    wanted = (given.dtype if dtype is None else np.dtype(dtype)).newbyteorder("=")
    if wanted.kind != "b":
        kernels.result_dtype(ReduceOp.SUM, wanted)  # whatever can be summed can be held
    _check_kind("a variable", value, given, wanted)
    return frozen(copied(_as_array(value, "a variable", wanted)))


def converted(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Array:
    """Return a value that is assigned, as an array of the variable's shape and dtype; it may be the value itself."""
    if type(value) is np.ndarray and value.shape == shape and value.dtype is dtype:
        return value
    what = f"the variable {name!r}"
    given = _as_array(value, what)
    if given.shape != shape:
        raise ValueError(f"{what} has the shape {shape}, and nothing is broadcast; got a value of shape {given.shape}")
    _check_kind(what, value, given, dtype)
    return given if given.dtype == dtype and given.dtype.isnative else _as_array(value, what, dtype)


def _as_array(value: Any, what: str, dtype: np.dtype[Any] | None = None) -> Array:
    check_unmasked(value, "for a variable")
    foreign = host_type_of(value)
    array = np.asarray(value if foreign is None else foreign.view(value), dtype)
    if array.dtype.kind not in _LADDER:
        raise TypeError(f"{what} expects an array of numbers, or a number, got {array.dtype}: {reprlib.repr(value)}")
    return array


def _check_kind(what: str, value: Any, given: Array, dtype: np.dtype[Any]) -> None:
    """Allow what NumPy allows in place, a Python int for an unsigned variable, and bfloat16 among floats."""
    rank, wanted = _LADDER[given.dtype.kind], _LADDER.get(dtype.kind, -1)
    to_unsigned = (given.dtype.kind, dtype.kind) == ("i", "u") and isinstance(value, (np.ndarray, np.generic))
    if rank > wanted or to_unsigned:
        raise TypeError(f"{what} expects values that fit {dtype}, got {given.dtype}; cast them: value.astype(...)")


# Values of several.

_CHANGES = {"assign_add": np.add, "assign_sub": np.subtract}


def updated(method: str, old: Array, value: Array, *, fresh: bool = False) -> Array:
    """Return what a component becomes: a read-only array that shares no memory with the value, unless that is fresh."""
    if method == "assign":
        new = value if fresh else copied(value)
    elif value.nbytes < pool.POOLED_FROM:
        new = np.asarray(_CHANGES[method](old, value))
    else:
        new = _CHANGES[method](old, value, out=empty_like(value, old.dtype))
    return frozen(new)


def check(aggregation: VariableAggregation, dtype: np.dtype[Any]) -> None:
    """Check that values of a dtype can be aggregated so."""
    op = aggregation.reduce_op
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        raise ValueError(
            f"aggregation MEAN needs a variable of floating-point numbers, got {dtype}: integers have no exact mean; "
            "pass dtype=np.float64, or aggregate by SUM and divide where it is read"
        )
    if op is not None:
        kernels.result_dtype(op, dtype)


def aggregate(
    aggregation: VariableAggregation,
    values: Sequence[Array],
    name: str,
    accumulate: Accumulate = "native",
    *,
    first: int = 0,
) -> Array:
    """Return the one value that the replicas' values become; it may be one of them. ``first`` is the first one's id."""
    op = aggregation.reduce_op
    if op is not None:
        return frozen(fold(op, values, None, accumulate))
    if aggregation is VariableAggregation.NONE:
        check_equal(values, lambda position: differ(name, first + position, first))
    return values[0]


def check_equal(values: Sequence[Array], error: Callable[[int], Exception]) -> None:
    """Check that arrays of one shape hold the same values; one NaN is like another."""
    for position, value in enumerate(values):
        if not _equal(value, values[0]):
            raise error(position)


def differ(name: str, replica_id: int, first: int = 0) -> ValueError:
    """Return the error for replicas that assign different values to a mirrored variable without an aggregation."""
    return ValueError(
        f"replicas assigned different values to the mirrored variable {name!r}, whose aggregation is NONE: "
        f"replica {replica_id}'s is not replica {first}'s. Give the variable an aggregation ('sum', 'mean' or "
        "'only_first_replica'), assign what a collective returned, or make it synchronization='on_read'"
    )


def update_differs(name: str, replica_id: int) -> ValueError:
    """Return the error for an update that would give a mirrored variable different components."""
    return ValueError(
        f"the update gives the components of the mirrored variable {name!r} different values: component "
        f"{replica_id} is not component 0; reduce its arguments first, e.g. with `await "
        "extended.reduce_to(op, value, variable)`, or make the variable synchronization='on_read'"
    )


def _equal(a: Array, b: Array) -> bool:
    return a is b or bool((a == b).all()) or bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  (only a NaN is not itself)


def parts(aggregation: VariableAggregation, value: Array, size: int) -> list[Array]:
    """Return the components that, aggregated on reading, give ``value``; of integers the first are the larger."""
    if aggregation is not VariableAggregation.SUM:
        return [value] * size
    if value.dtype.kind not in "iu":
        return [np.asarray(value / size, value.dtype)] * size
    whole, rest = np.divmod(value, size, dtype=np.result_type(value.dtype, np.min_scalar_type(size)))
    return [np.asarray(whole + (replica_id < rest), value.dtype) for replica_id in range(size)]
