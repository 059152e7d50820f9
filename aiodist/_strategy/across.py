"""Reducing and gathering per-replica values in cross-replica context, along an axis too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays import nests
from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, LeafType, describe_leaf, has_device_arrays, has_foreign
from aiodist._arrays.values import DistributedValues, Mirrored
from aiodist._collectives.host import fold, frozen, in_native_order
from aiodist._collectives.kinds import check_reducible, normalized_axis
from aiodist._strategy.variable import as_distributed
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import rule_for

Array = np.ndarray[Any, Any]


def reduce_nest(op: ReduceOp, value: Any, axis: Any, replicas: Sequence[int], accumulate: Accumulate = "native") -> Any:
    """Return a nest with every per-replica leaf reduced over the replicas, and along ``axis`` unless it is None.

    ``replicas`` are their ids, here and below.

    Raises:
        TypeError: the op does not take a leaf's dtype.
        ValueError: a SUM of a plain value on several replicas; shapes differ; an axis out of range.
    """
    return nests.map_leaves(lambda leaf: _reduce(op, as_distributed(leaf), axis, replicas, accumulate), value)


def _reduce(op: ReduceOp, leaf: Any, axis: Any, replicas: Sequence[int], accumulate: Accumulate) -> Any:
    if leaf is None:  # an empty nest, as in a collective
        return None
    shapes, dtypes, types, arrays = _described(components(op, leaf, replicas), replicas)
    if LeafType.INDEXED_SLICES in types:
        _check_rows(op, dtypes, types, axis)
    elif axis is not None:
        return _given(types[0], _reduce_along(op, [np.asarray(array) for array in arrays], axis, accumulate, replicas))
    for what, column in (("shape", shapes), ("dtype", list(map(_native, dtypes))), ("type", types)):
        check_same(what, column, replicas)
    if dtypes.count(dtypes[0]) != len(dtypes):  # in another byte order, which kernels do not look for
        arrays = list(map(in_native_order, arrays))
    if types[0] is LeafType.PYTHON_NUMBER:
        kernels.check_number(op, dtypes[0])
    return _given(types[0], fold(op, arrays, types[0], accumulate))


def _described(
    components: Sequence[Any], replicas: Sequence[int]
) -> tuple[list[Any], list[Any], list[LeafMark], list[Any]]:
    """Return shapes, dtypes, leaf types, and what is to be combined."""
    shapes, dtypes, types, arrays = ([*column] for column in zip(*map(describe_leaf, components), strict=True))
    if has_device_arrays(tuple(types)):
        raise TypeError(
            "expected components on the host, as others are, got arrays on GPUs; let all of them be of one kind"
        )
    if has_foreign(tuple(types)):
        check_same("type", types, replicas)
    return shapes, dtypes, types, arrays


def check_same(what: str, column: Sequence[Any], replicas: Sequence[int]) -> None:
    """Check that components agree in something.

    Raises:
        ValueError: they do not.
    """
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


def _given(leaf_type: LeafMark, result: Any) -> Any:
    """Return a result of our own, in memory that nobody else has, as users get it."""
    if isinstance(leaf_type, HostType):
        return leaf_type.give(result)
    return frozen(result) if isinstance(result, np.ndarray) else result


def components(op: ReduceOp, leaf: Any, replicas: Sequence[int]) -> Sequence[Any]:
    """Return what there is to reduce: a component a replica, or one value that stands for all of them.

    Raises:
        ValueError: a SUM of a plain value on several replicas; another number of components.
    """
    if isinstance(leaf, DistributedValues):
        check_count(leaf, replicas)
        same = isinstance(leaf, Mirrored) and op is not ReduceOp.SUM and op is not ReduceOp.PRODUCT
        return leaf.values[:1] if same else leaf.values
    if len(replicas) > 1 and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        raise ValueError(
            f"{op.name} expects a per-replica value; a plain value is the same on all replicas, and whether it counts "
            "once or for each cannot be known: reduce with MEAN, or return it from strategy.run"
        )
    return [leaf]


def check_count(leaf: DistributedValues[Any], replicas: Sequence[int]) -> None:
    """Check that a value has as many components as there are replicas.

    Raises:
        ValueError: it has not.
    """
    if len(leaf.values) != len(replicas):
        raise ValueError(f"expected {len(replicas)} components, one for each replica, got {len(leaf.values)}")


def _check_rows(op: ReduceOp, dtypes: Sequence[Any], types: Sequence[LeafMark], axis: Any) -> None:
    """Check a reduction of IndexedSlices."""
    if axis is not None:
        raise ValueError(f"IndexedSlices are reduced over the replicas alone, with axis=None, got axis={axis!r}")
    for dtype, leaf_type in zip(dtypes, types, strict=True):
        if leaf_type is LeafType.INDEXED_SLICES:
            check_reducible(op, dtype, leaf_type)


def _native(dtype: Any) -> Any:
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def _same_but_along(axes: Sequence[int], a: Array, b: Array) -> bool:
    """Whether two arrays differ at most in their values, their byte order and their sizes along these axes."""
    return a.ndim == b.ndim and bool(_native(a.dtype) == _native(b.dtype)) and _rest(a, axes) == _rest(b, axes)


def _reduce_along(
    op: ReduceOp, arrays: Sequence[Array], axis: Any, accumulate: Accumulate, replicas: Sequence[int]
) -> Any:
    """Reduce each array along the axes, then over the replicas; a MEAN divides once, by the true count."""
    kernels.result_dtype(op, arrays[0].dtype)
    axes = _axes(axis, arrays[0].ndim)
    _check_along(axes, arrays, axis, replicas)
    return _whole(op, arrays[0].dtype, [_part(op, array, axes, accumulate) for array in arrays], axes)


def _check_along(axes: Sequence[int], arrays: Sequence[Array], axis: Any, replicas: Sequence[int]) -> None:
    for replica_id, array in zip(replicas, arrays, strict=False):
        if not _same_but_along(axes, array, arrays[0]):
            raise ValueError(
                f"the components may differ along axis {axis} only; replica {replicas[0]}'s is {arrays[0].dtype}"
                f"{list(arrays[0].shape)}, replica {replica_id}'s is {array.dtype}{list(array.shape)}"
            )


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    axes = tuple(normalized_axis(a, rank) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis names an axis twice: {axis!r}")
    return axes


def _rest(array: Array, axes: Sequence[int]) -> list[int]:
    return [size for dimension, size in enumerate(array.shape) if dimension not in axes]


def _count(array: Array, axes: Sequence[int]) -> int:
    return math.prod(array.shape[axis] for axis in axes)


_LOCAL: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add.reduce,
    ReduceOp.PRODUCT: np.multiply.reduce,
    ReduceOp.MIN: np.minimum.reduce,
    ReduceOp.MAX: np.maximum.reduce,
}


Part = tuple[Array | None, int]
"""An array, reduced along the axes, and how many elements each of its numbers is made of; None for what has none."""


def _part(op: ReduceOp, array: Array, axes: tuple[int, ...], accumulate: Accumulate) -> Part:
    count = _count(array, axes)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (np.asarray(_LOCAL[op](array, axis=axes)) if count else None), count
    dtype = kernels.result_dtype(op, array.dtype)
    mean = op is ReduceOp.MEAN
    wide = np.promote_types(dtype, np.float64) if mean else rule_for(op, dtype, accumulate).accumulator
    fold = ReduceOp.SUM if mean else op
    with np.errstate(all="ignore"):  # infinities and NaN are values like others
        return np.asarray(_LOCAL[fold](array, axis=axes, dtype=wide), wide), count


def _whole(op: ReduceOp, dtype: np.dtype[Any], parts: Sequence[Part], axes: tuple[int, ...]) -> Array:
    """Return the parts of all replicas, folded in their order; a MEAN divides once, by the true count."""
    result = kernels.result_dtype(op, dtype)
    arrays = [array for array, _ in parts if array is not None]
    if not arrays:
        raise ValueError(
            f"{op.name} along axis {axes} needs at least one element, got empty components on every replica"
        )
    with np.errstate(all="ignore"):
        if op is not ReduceOp.MEAN:
            native = [array.astype(_native(array.dtype), copy=False) for array in arrays]
            return np.asarray(kernels.reduce(op, native).astype(result))
        # the mean of nothing is NaN, as in TensorFlow
        total = kernels.reduce(ReduceOp.SUM, arrays) / np.float64(sum(count for _, count in parts))
        return np.asarray(total.astype(result))


def one_for_all(value: DistributedValues[Any]) -> str:
    """Return what is said of a per-replica value where one for all is wanted."""
    return (
        f"broadcast_to expects one value for all, got a {type(value).__name__}; reduce it first: "
        "reduce_to(op, value, destinations)"
    )


def gather_nest(value: Any, axis: Any, replicas: Sequence[int]) -> Any:
    """Return a nest with every per-replica leaf put together along an axis, in replica order; other leaves as they are.

    Raises:
        TypeError: a component is no array.
        ValueError: the axis is out of range, or the components differ in more than the size along it.
    """
    return nests.map_leaves(lambda leaf: _gather(as_distributed(leaf), axis, replicas), value)


def _gather(leaf: Any, axis: Any, replicas: Sequence[int]) -> Any:
    if not isinstance(leaf, DistributedValues):
        if len(replicas) == 1 and leaf is not None:
            normalized_axis(axis, len(describe_leaf(leaf)[0]))
        return leaf
    check_count(leaf, replicas)
    _, _, types, arrays = _described(leaf.values, replicas)
    if LeafType.INDEXED_SLICES in types:
        raise TypeError("gather does not take IndexedSlices, reduce does; gather their .values and .indices")
    arrays = [np.asarray(array) for array in arrays]
    along = normalized_axis(axis, arrays[0].ndim)
    _check_along([along], arrays, along, replicas)
    whole = np.concatenate(arrays, axis=along)
    return _given(types[0], whole.astype(_native(whole.dtype), copy=False))
