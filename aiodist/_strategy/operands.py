"""What reductions, gatherings and copies outside of replicas take part with.

A leaf of a per-replica value becomes an `Operand`, checked and described before anything is done with it: alike for
arrays on the host, on GPUs, and on several workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.device import DeviceType
from aiodist._arrays.frameworks import device_type_of
from aiodist._arrays.host import HostType, host_type_of
from aiodist._arrays.leaves import LeafMark, LeafType, Spec, describe_leaf
from aiodist._arrays.values import DistributedValues, Mirrored, check_awaited
from aiodist._collectives.host import in_native_order
from aiodist._collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    Collective,
    Detail,
    Kind,
    check_reducible,
    normalized_axis,
)
from aiodist._strategy.variable import Variable, as_distributed
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.arguments import check_unmasked


class Operand(NamedTuple):
    """A leaf that takes part."""

    arrays: Sequence[Any]  # of its components, in replica order and native byte order; one where that stands for all
    shape: tuple[int | None, ...]  # that of each, with None along the axes
    dtype: Any  # that of each; the type of a Python number
    mark: LeafMark  # see `LeafType`
    axes: tuple[int, ...] | None = None  # to reduce along, or the one to gather along; None without one

    @property
    def on_gpus(self) -> bool:
        """Whether they are on GPUs."""
        return isinstance(self.mark, DeviceType)


class Operation(NamedTuple):
    """What is made of each leaf of a nest: by a collective of a kind, of leaves that ``operand`` describes.

    ``operand`` returns None for a leaf that stays as it is.
    """

    kind: Kind
    operand: Callable[[Any], Operand | None]
    op: ReduceOp | None = None
    accumulate: Accumulate = "native"

    def collective(self, operands: Sequence[Operand]) -> Collective:
        """Return what is to be carried out for operands."""
        shapes, dtypes, marks = zip(*[operand[1:4] for operand in operands], strict=True)
        detail: Any = 0 if self.kind.detail is Detail.SOURCE else None
        if self.kind.detail is Detail.AXIS:
            detail = tuple([axis for operand in operands for axis in operand.axes or ()])
        return Collective(self.kind, self.op, detail, Spec(shapes, dtypes, marks, len(operands) == 1))


def values_of(operands: Sequence[Operand]) -> list[Any]:
    """Return by replica what operands contribute to their collective."""
    columns = [operand.arrays for operand in operands]
    return list(columns[0]) if len(columns) == 1 else [list(row) for row in zip(*columns, strict=True)]


def reduction(op: ReduceOp, axis: Any, replicas: Sequence[int], accumulate: Accumulate = "native") -> Operation:
    """Return the reduction over replicas and, unless ``axis`` is None, along axes."""

    def operand(leaf: Any) -> Operand | None:
        if leaf is None:
            return None
        components = _components(op, as_distributed(leaf), replicas)
        if axis is None and _are_arrays_alike(components):
            first = components[0]
            check_reducible(op, first.dtype, LeafType.NUMPY_ARRAY)
            return Operand(components, first.shape, first.dtype, LeafType.NUMPY_ARRAY)
        shapes, dtypes, mark, arrays = _described(components, replicas)
        if axis is None:
            _check_same("shape", shapes, replicas)
            _check_same("dtype", dtypes, replicas)
            check_reducible(op, dtypes[0], mark)
            return Operand(arrays, shapes[0], dtypes[0], mark)
        if mark == LeafType.INDEXED_SLICES:
            raise ValueError(f"IndexedSlices are reduced over the replicas alone, with axis=None, got axis={axis!r}")
        if mark == LeafType.PYTHON_NUMBER:
            dtypes = list(map(np.dtype, dtypes))
        kernels.result_dtype(op, dtypes[0])
        return _along(_axes(axis, len(shapes[0])), axis, shapes, dtypes, mark, arrays, replicas)

    return Operation(ALL_REDUCE, operand, op, accumulate)


def gathering(axis: Any, replicas: Sequence[int], *, bare: bool = False) -> Operation:
    """Return the concatenation of components along an axis; plain values stay as they are, unless ``bare``."""

    def operand(leaf: Any) -> Operand | None:
        if leaf is None:
            return None
        leaf = as_distributed(leaf)
        if not isinstance(leaf, DistributedValues) and not bare:
            check_awaited(leaf, "value")
            if len(replicas) == 1:
                normalized_axis(axis, len(describe_leaf(leaf)[0]))
            return None
        shapes, dtypes, mark, arrays = _described(_components(None, leaf, replicas), replicas)
        if mark == LeafType.INDEXED_SLICES:
            raise TypeError("gather does not take IndexedSlices, reduce does; gather their .values and .indices")
        along = normalized_axis(axis, len(shapes[0]))
        if not _alike(dtypes) and {dtype.kind for dtype in dtypes} in ({"U"}, {"S"}):
            dtypes = [np.result_type(*dtypes)] * len(dtypes)  # strings may differ in width
        return _along((along,), along, shapes, dtypes, mark, arrays, replicas)

    return Operation(ALL_GATHER, operand)


def _copied_operand(leaf: Any) -> Operand | None:
    if isinstance(leaf, DistributedValues):
        raise TypeError(
            f"broadcast_to expects one value for all, got a {type(leaf).__name__}; reduce it first: "
            "reduce_to(op, value, destinations)"
        )
    check_unmasked(leaf, "to be copied")
    if not (isinstance(leaf, (np.ndarray, Variable)) or is_foreign_array(leaf)):
        return None
    shape, dtype, mark, array = describe_leaf(np.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf)
    return Operand([array], shape, dtype, mark)


COPY = Operation(BROADCAST, _copied_operand)
"""A copy of a value that is the same for all; a per-replica value or a masked array is a TypeError."""


# Describing.


def is_foreign_array(leaf: Any) -> bool:
    """Return whether a leaf is another framework's array, on the host or on a GPU."""
    return device_type_of(leaf) is not None or host_type_of(leaf) is not None


def _components(op: ReduceOp | None, leaf: Any, replicas: Sequence[int]) -> Sequence[Any]:
    """Return what there is to combine: a component a replica, or one value that stands for all of them."""
    if isinstance(leaf, DistributedValues):
        if len(leaf.values) != len(replicas):
            raise ValueError(f"expected {len(replicas)} components, one for each replica, got {len(leaf.values)}")
        same = isinstance(leaf, Mirrored) and op in (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)
        return leaf.values[:1] if same else leaf.values
    check_awaited(leaf, "value")
    if len(replicas) > 1 and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        raise ValueError(
            f"{op.name} expects a per-replica value; a plain value is the same on all replicas, and whether it counts "
            "once or for each cannot be known: reduce with MEAN, or return it from strategy.run"
        )
    return [leaf]


def _are_arrays_alike(parts: Sequence[Any]) -> bool:
    """Return whether leaves are NumPy arrays of one shape and dtype, the commonest: nothing is left to describe."""
    first = parts[0]
    if type(first) is not np.ndarray:
        return False
    shape, dtype = first.shape, first.dtype
    for part in parts:
        if type(part) is not np.ndarray or part.dtype is not dtype or part.shape != shape:
            return False
    return bool(dtype.isnative)


def _described(
    parts: Sequence[Any], replicas: Sequence[int]
) -> tuple[Sequence[Any], Sequence[Any], LeafMark, Sequence[Any]]:
    """Return shapes, dtypes, the mark, and what takes part of each; all in this machine's byte order."""
    columns: list[Sequence[Any]] = list(zip(*map(describe_leaf, parts), strict=True))
    shapes, dtypes, marks, arrays = columns
    _check_same("type", marks, replicas)
    if not _alike(dtypes) or not getattr(dtypes[0], "isnative", True):
        dtypes = [dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype for dtype in dtypes]
        arrays = list(map(in_native_order, arrays))
    return shapes, dtypes, marks[0], arrays


def _alike(column: Sequence[Any]) -> bool:
    return column.count(column[0]) == len(column)


def _check_same(what: str, column: Sequence[Any], replicas: Sequence[int]) -> None:
    if _alike(column):
        return
    replica_id, found = next(pair for pair in zip(replicas, column, strict=True) if pair[1] != column[0])
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


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    axes = tuple(normalized_axis(a, rank) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis must name each axis once, got {axis!r}")
    return axes


def _along(
    axes: tuple[int, ...],
    axis: Any,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    mark: LeafMark,
    arrays: Sequence[Any],
    replicas: Sequence[int],
) -> Operand:
    """Describe components that may differ in their sizes along axes, which ``axis`` names as the user does."""

    def rest(shape: tuple[int, ...]) -> tuple[int | None, ...]:
        return tuple([None if place in axes else size for place, size in enumerate(shape)])

    common = rest(shapes[0])
    if not (_alike(shapes) and _alike(dtypes)):
        for shape, dtype, replica_id in zip(shapes, dtypes, replicas, strict=True):
            if rest(shape) != common or dtype != dtypes[0]:
                raise ValueError(
                    f"the components may differ along axis {axis} only; replica {replicas[0]}'s is {dtypes[0]}"
                    f"{list(shapes[0])}, replica {replica_id}'s is {dtype}{list(shape)}"
                )
    if not isinstance(mark, DeviceType):
        arrays = [np.asarray(array) for array in arrays]
    return Operand(arrays, common, dtypes[0], mark, axes)
