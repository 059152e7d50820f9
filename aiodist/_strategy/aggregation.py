"""Aggregation: how what replicas assign to a variable becomes one value, and how its components do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import aiodist_kernels as kernels
from aiodist._collectives.host import fold, frozen
from aiodist._strategy.variable_enums import VariableAggregation
from aiodist_kernels import Accumulate, ReduceOp, pool
from aiodist_kernels.arguments import empty_like

Array = np.ndarray[Any, Any]
_CHANGES = {"assign_add": np.add, "assign_sub": np.subtract}


def updated(method: str, old: Array, value: Array, *, fresh: bool = False) -> Array:
    """Return what a component becomes: a read-only array that shares no memory with the value, unless that is fresh."""
    if method == "assign":
        new = value if fresh else _copy(value)
    elif value.nbytes < pool.POOLED_FROM:
        new = np.asarray(_CHANGES[method](old, value))
    else:
        new = _CHANGES[method](old, value, out=empty_like(value, old.dtype))
    new.flags.writeable = False
    return new


def _copy(value: Array) -> Array:
    if value.nbytes < pool.POOLED_FROM:
        return np.array(value, order="K", subok=False)
    copy = empty_like(value, value.dtype)
    np.copyto(copy, value)
    return copy


def check(aggregation: VariableAggregation, dtype: np.dtype[Any]) -> None:
    """Check that values of a dtype can be aggregated so.

    Raises:
        TypeError: the reduction does not take the dtype.
        ValueError: the mean of integers, which is no integer.
    """
    op = aggregation.reduce_op
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        raise ValueError(
            f"aggregation MEAN needs a variable of floating-point numbers, got {dtype}: a mean of integers is none; "
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
    """Return the one value that the replicas' values become; it may be one of them. ``first`` is the first one's id.

    Raises:
        ValueError: the aggregation is NONE and the values differ.
    """
    op = aggregation.reduce_op
    if op is not None:
        return frozen(fold(op, values, None, accumulate))
    if aggregation is VariableAggregation.NONE:
        _check_equal(values, name, first)
    return values[0]


def _check_equal(values: Sequence[Array], name: str, first: int) -> None:
    for replica_id, value in enumerate(values, first):
        if not equal(value, values[0]):
            raise differ(name, replica_id, first)


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


def equal(a: Array, b: Array) -> bool:
    """Whether two arrays of one shape hold the same values; one NaN is like another."""
    return a is b or bool((a == b).all()) or bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  (only a NaN is not itself)


def parts(aggregation: VariableAggregation, value: Array, size: int) -> list[Array]:
    """Return the components that, aggregated on reading, give ``value`` again.

    A sum of integers is cut as evenly as whole numbers allow, the first components being the larger ones.
    """
    if aggregation is not VariableAggregation.SUM:
        return [value] * size
    if value.dtype.kind not in "iu":
        return [np.asarray(value / size, value.dtype)] * size
    whole, rest = np.divmod(value, size, dtype=np.result_type(value.dtype, np.min_scalar_type(size)))
    return [np.asarray(whole + (replica_id < rest), value.dtype) for replica_id in range(size)]
