"""What reductions, gatherings and copies outside of replicas take part with, and what they make of it on the host.

A leaf of a per-replica value becomes an `Operand`, checked and described before anything is done with it: alike for
arrays on the host, on GPUs, and on several workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.device import DeviceArray, DeviceType
from aiodist._arrays.frameworks import device_type_of
from aiodist._arrays.host import Array, HostType, host_type_of
from aiodist._arrays.leaves import LeafMark, LeafType, describe_leaf, has_device_arrays, has_foreign
from aiodist._arrays.slices import IndexedSlices
from aiodist._arrays.values import DistributedValues, Mirrored, check_awaited
from aiodist._collectives.host import fold, frozen, in_native_order
from aiodist._collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    Kind,
    check_reducible,
    normalized_axis,
)
from aiodist._strategy.aggregation import frozen_copy
from aiodist._strategy.variable import Variable, as_distributed
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.arguments import check_unmasked
from aiodist_kernels.rules import rule_for


class Operand(NamedTuple):
    """A leaf that takes part.

    Attributes:
        arrays: what of its components takes part, in replica order; one where that stands for all.
        shape: that of each, with None along the axes.
        dtype: that of each, in this machine's byte order; the type of a Python number.
        mark: what they are beside that, see `LeafType`.
        axes: the axes to reduce along, or the one to gather along; None without one.
    """

    arrays: list[Any]
    shape: tuple[int | None, ...]
    dtype: Any
    mark: LeafMark
    axes: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes the components have together."""
        return sum(
            getattr(array.values if isinstance(array, IndexedSlices) else array, "nbytes", 0) for array in self.arrays
        )

    @property
    def on_gpus(self) -> bool:
        """Whether they are on GPUs."""
        return isinstance(self.mark, DeviceType)


@dataclass(frozen=True)
class Operation:
    """What is made of each leaf of a nest.

    Attributes:
        kind: the collective that is like it.
        operand: describes a leaf; None for one that stays as it is.
        result: makes the result of an operand on the host.
        op: the reduce op.
        accumulate: the accumulator of a reduction.
    """

    kind: Kind
    operand: Callable[[Any], Operand | None]
    result: Callable[[Operand], Any]
    op: ReduceOp | None = None
    accumulate: Accumulate = "native"


def reduction(op: ReduceOp, axis: Any, replicas: Sequence[int], accumulate: Accumulate = "native") -> Operation:
    """Return the reduction over replicas and, unless ``axis`` is None, along axes.

    Raises (when a leaf is described):
        TypeError: the op does not take its dtype.
        ValueError: a SUM of a plain value on several replicas; shapes differ; an axis out of range.
    """
    return Operation(
        ALL_REDUCE,
        lambda leaf: None if leaf is None else reduced_operand(op, axis, components(op, leaf, replicas), replicas),
        lambda operand: given(operand.mark, total(op, accumulate, operand)),
        op,
        accumulate,
    )


def gathering(axis: Any, replicas: Sequence[int]) -> Operation:
    """Return the concatenation of components along an axis; plain values stay as they are.

    Raises (when a leaf is described):
        TypeError: a component is no array.
        ValueError: the axis is out of range, or the components differ in more than the size along it.
    """

    def operand(leaf: Any) -> Operand | None:
        check_awaited(leaf, "value")
        leaf = as_distributed(leaf)
        if isinstance(leaf, DistributedValues):
            return gathered_operand(axis, components(None, leaf, replicas), replicas)
        if len(replicas) == 1 and leaf is not None:
            normalized_axis(axis, len(describe_leaf(leaf)[0]))
        return None

    return Operation(ALL_GATHER, operand, gathered)


def reduced_operand(op: ReduceOp, axis: Any, parts: Sequence[Any], replicas: Sequence[int]) -> Operand:
    """Check and describe components that are reduced.

    Raises:
        TypeError: the op does not take the dtype.
        ValueError: they differ; an axis is out of range.
    """
    shapes, dtypes, marks, arrays = _described(parts, replicas)
    if LeafType.INDEXED_SLICES in marks:
        _check_rows(op, dtypes, marks, axis)
    elif axis is not None:
        kernels.result_dtype(op, dtypes[0])
        return _along(shapes, dtypes, marks, arrays, _axes(axis, len(shapes[0])), axis, replicas)
    for what, column in (("shape", shapes), ("dtype", dtypes), ("type", marks)):
        _check_same(what, column, replicas)
    if marks[0] == LeafType.PYTHON_NUMBER:
        kernels.check_number(op, dtypes[0])
    elif marks[0] != LeafType.INDEXED_SLICES:
        kernels.result_dtype(op, dtypes[0])
    return Operand(arrays, shapes[0], dtypes[0], marks[0])


def gathered_operand(axis: Any, parts: Sequence[Any], replicas: Sequence[int]) -> Operand:
    """Check and describe components that are gathered.

    Raises:
        TypeError: a component is no array.
        ValueError: the axis is out of range, or the components differ in more than the size along it.
    """
    shapes, dtypes, marks, arrays = _described(parts, replicas)
    if LeafType.INDEXED_SLICES in marks:
        raise TypeError("gather does not take IndexedSlices, reduce does; gather their .values and .indices")
    along = normalized_axis(axis, len(shapes[0]))
    if {getattr(dtype, "kind", None) for dtype in dtypes} in ({"U"}, {"S"}):
        dtypes = [np.result_type(*dtypes)] * len(dtypes)  # strings may differ in width
    return _along(shapes, dtypes, marks, arrays, (along,), along, replicas)


def copied_operand(leaf: Any) -> Operand | None:
    """Describe a leaf that is copied onto devices.

    Raises:
        TypeError: it is a per-replica value or a masked array.
    """
    if isinstance(leaf, DistributedValues):
        raise TypeError(
            f"broadcast_to expects one value for all, got a {type(leaf).__name__}; reduce it first: "
            "reduce_to(op, value, destinations)"
        )
    if is_on_gpus(leaf):
        shape, dtype, mark, array = describe_leaf(leaf)
        return Operand([array], shape, dtype, mark)
    check_unmasked(leaf, "to be copied")
    return Operand([leaf], (), None, None)


def _copy(operand: Operand) -> Any:
    (leaf,) = operand.arrays
    if isinstance(leaf, IndexedSlices):
        return IndexedSlices(frozen_copy(leaf.values), frozen_copy(leaf.indices), leaf.dense_shape)
    if isinstance(leaf, Variable):
        leaf = leaf.read_value()
    foreign = host_type_of(leaf)
    if foreign is not None:
        return foreign.give(foreign.view(leaf).copy(order="K"))
    return frozen_copy(leaf) if isinstance(leaf, np.ndarray) else leaf


COPY = Operation(BROADCAST, copied_operand, _copy)
"""A copy of a value that is the same for all."""


# Describing.


def is_on_gpus(leaf: Any) -> bool:
    """Return whether a leaf, or the first of its components, is on a GPU."""
    leaf = as_distributed(leaf)
    first = leaf.values[0] if isinstance(leaf, DistributedValues) else leaf
    return type(first) is not np.ndarray and device_type_of(first) is not None


def components(op: ReduceOp | None, leaf: Any, replicas: Sequence[int]) -> Sequence[Any]:
    """Return what there is to combine: a component a replica, or one value that stands for all of them.

    Args:
        op: the reduce op; None where nothing is reduced.
        leaf: the leaf.
        replicas: the ids of the replicas.

    Raises:
        ValueError: a SUM of a plain value on several replicas; another number of components.
    """
    check_awaited(leaf, "value")
    leaf = as_distributed(leaf)
    if isinstance(leaf, DistributedValues):
        if len(leaf.values) != len(replicas):
            raise ValueError(f"expected {len(replicas)} components, one for each replica, got {len(leaf.values)}")
        same = isinstance(leaf, Mirrored) and op in (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)
        return leaf.values[:1] if same else leaf.values
    if len(replicas) > 1 and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        raise ValueError(
            f"{op.name} expects a per-replica value; a plain value is the same on all replicas, and whether it counts "
            "once or for each cannot be known: reduce with MEAN, or return it from strategy.run"
        )
    return [leaf]


def device_arrays(parts: Sequence[Any], replicas: Sequence[int]) -> tuple[DeviceType, list[DeviceArray]]:
    """Return whose arrays components on GPUs are, and what of them takes part.

    Raises:
        TypeError: one cannot take part.
        ValueError: they are not all on GPUs and of one framework.
    """
    _, _, marks, arrays = _described(parts, replicas)
    return marks[0], arrays


def _described(parts: Sequence[Any], replicas: Sequence[int]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Return shapes, dtypes in this machine's byte order, marks, and what takes part."""
    shapes, dtypes, marks, arrays = ([*column] for column in zip(*map(describe_leaf, parts), strict=True))
    if any(marks):  # they are not all NumPy arrays
        on_gpus = isinstance(marks[0], DeviceType)
        if has_device_arrays(tuple(marks)) and not on_gpus:
            raise TypeError(
                "expected components on the host, as others are, got arrays on GPUs; let all of them be of one kind"
            )
        if on_gpus or has_foreign(tuple(marks)):
            _check_same("type", marks, replicas)
    return shapes, list(map(_native, dtypes)), marks, arrays


def _native(dtype: Any) -> Any:
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def _check_same(what: str, column: Sequence[Any], replicas: Sequence[int]) -> None:
    for replica_id, found in zip(replicas, column, strict=False):  # one may stand for all
        if found != column[0]:
            hint = "; to reduce ragged batches, give the axis that they differ along" if what == "shape" else ""
            raise ValueError(
                f"the components must have the same {what}; replica {replicas[0]}'s is {_text(column[0])}, replica "
                f"{replica_id}'s is {_text(found)}{hint}"
            )


def _text(found: Any) -> str:
    if isinstance(found, DeviceType):
        return f"{found.name} array on a GPU"
    if isinstance(found, HostType):
        return f"{found.name} array"
    return "NumPy array" if found is LeafType.NUMPY_ARRAY else str(found)


def _check_rows(op: ReduceOp, dtypes: Sequence[Any], marks: Sequence[LeafMark], axis: Any) -> None:
    """Check a reduction of IndexedSlices."""
    if axis is not None:
        raise ValueError(f"IndexedSlices are reduced over the replicas alone, with axis=None, got axis={axis!r}")
    for dtype, mark in zip(dtypes, marks, strict=True):
        if mark is LeafType.INDEXED_SLICES:
            check_reducible(op, dtype, mark)


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    axes = tuple(normalized_axis(a, rank) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis names an axis twice: {axis!r}")
    return axes


def _along(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    marks: Sequence[LeafMark],
    arrays: Sequence[Any],
    axes: tuple[int, ...],
    axis: Any,
    replicas: Sequence[int],
) -> Operand:
    """Describe components that may differ in their sizes along axes, which ``axis`` names as the user does."""
    rests = [tuple(None if place in axes else size for place, size in enumerate(shape)) for shape in shapes]
    for place, replica_id in zip(range(len(arrays)), replicas, strict=False):
        if (rests[place], dtypes[place]) != (rests[0], dtypes[0]):
            raise ValueError(
                f"the components may differ along axis {axis} only; replica {replicas[0]}'s is {dtypes[0]}"
                f"{list(shapes[0])}, replica {replica_id}'s is {dtypes[place]}{list(shapes[place])}"
            )
    if not isinstance(marks[0], DeviceType):
        arrays = [np.asarray(array) for array in arrays]
    return Operand(list(arrays), rests[0], dtypes[0], marks[0], axes)


# Results.


def given(mark: LeafMark, result: Any) -> Any:
    """Return a result of our own, in memory that nobody else has, as users get it."""
    if isinstance(mark, HostType):
        return mark.give(result)
    return frozen(result) if isinstance(result, np.ndarray) else result


def total(op: ReduceOp, accumulate: Accumulate, operand: Operand) -> Any:
    """Return the reduction of an operand on the host; foreign arrays as NumPy's."""
    if operand.axes is not None:
        return combine_parts(op, operand, parts_along(op, operand, accumulate))
    return fold(op, [in_native_order(array) for array in operand.arrays], operand.mark, accumulate)


def gathered(operand: Operand) -> Any:
    """Return the components of an operand on the host, put together along its axis."""
    assert operand.axes is not None
    return given(operand.mark, in_native_order(np.concatenate(operand.arrays, axis=operand.axes[0])))


Part = tuple[Array | None, int]
"""An array, reduced along the axes, and how many elements each of its numbers is made of; None for what has none."""

_ALONG: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add.reduce,
    ReduceOp.MEAN: np.add.reduce,
    ReduceOp.PRODUCT: np.multiply.reduce,
    ReduceOp.MIN: np.minimum.reduce,
    ReduceOp.MAX: np.maximum.reduce,
}


def parts_along(op: ReduceOp, operand: Operand, accumulate: Accumulate) -> list[Part]:
    """Reduce each component along the axes; a MEAN is a sum until it is divided."""
    assert operand.axes is not None
    return [_part(op, array, operand.axes, accumulate) for array in operand.arrays]


def _part(op: ReduceOp, array: Array, axes: tuple[int, ...], accumulate: Accumulate) -> Part:
    count = math.prod(array.shape[axis] for axis in axes)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (np.asarray(_ALONG[op](array, axis=axes)) if count else None), count
    dtype = kernels.result_dtype(op, array.dtype)
    mean = op is ReduceOp.MEAN
    wide = np.promote_types(dtype, np.float64) if mean else rule_for(op, dtype, accumulate).accumulator
    with np.errstate(all="ignore"):  # infinities and NaN are values like others
        return np.asarray(_ALONG[op](array, axis=axes, dtype=wide), wide), count


def combine_parts(op: ReduceOp, operand: Operand, parts: Sequence[Part]) -> Array:
    """Return the parts of all replicas, folded in their order; a MEAN divides once, by the true count.

    Raises:
        ValueError: MIN or MAX of no elements.
    """
    result = kernels.result_dtype(op, operand.dtype)
    arrays = [in_native_order(array) for array, _ in parts if array is not None]
    if not arrays:
        raise ValueError(
            f"{op.name} along axis {operand.axes} needs at least one element, got empty components on every replica"
        )
    with np.errstate(all="ignore"):
        if op is not ReduceOp.MEAN:
            return np.asarray(kernels.reduce(op, arrays).astype(result))
        # the mean of nothing is NaN, as in TensorFlow
        total = kernels.reduce(ReduceOp.SUM, arrays) / np.float64(sum(count for _, count in parts))
        return np.asarray(total.astype(result))
