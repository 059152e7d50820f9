"""The collectives that move values rather than reduce them, and reduce_scatter, which does both.

Results are read-only arrays. A result never shares memory with a replica's own array, so what a replica does to its
array after the collective cannot change what another has received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiodist._arrays.leaves import LeafType
from aiodist._arrays.options import CommunicationOptions
from aiodist.collective import reduction
from aiodist.collective.all_reduce import Reduction
from aiodist.collective.signature import DETAIL, KIND, OP, STRUCTURE, Signature, leaf_fields
from aiodist.collective.work import Work
from aiodist_kernels import policy, pool
from aiodist_kernels.layout import empty_like

Array = np.ndarray[Any, Any]


def normalized_axis(axis: Any, rank: int, what: str = "axis") -> int:
    """Return an axis counted from the front.

    Raises:
        TypeError: ``axis`` is no integer.
        ValueError: it is out of range, or the value has no axes.
    """
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"{what} must be an int, got {axis!r}")
    index: int = axis.__index__()
    if rank == 0:
        raise ValueError(f"{what}={index} needs arrays with at least one axis, got a scalar; pass np.array([value])")
    if not -rank <= index < rank:
        raise ValueError(f"{what} must be from {-rank} to {rank - 1} for an array with {rank} axes, got {index}")
    return index % rank


def check(signature: Signature, size: int) -> None:
    """Check that every leaf is made of values that can be shared.

    Raises:
        TypeError: an array holds Python objects, or a leaf is IndexedSlices.
    """
    _check_dense(signature)
    for _, dtype, _ in leaf_fields(signature):
        if isinstance(dtype, np.dtype) and dtype.hasobject:
            raise TypeError(
                f"expected arrays of numbers, got dtype {dtype}: Python objects would be shared by the replicas; "
                "return them from the replica function, or pass them to merge_call"
            )


def _check_dense(signature: Signature) -> None:
    if any(leaf_type is LeafType.INDEXED_SLICES for *_, leaf_type in leaf_fields(signature)):
        raise TypeError(
            f"{signature[KIND].name} does not take IndexedSlices, all_reduce does; pass their .values and .indices"
        )


def check_source(signature: Signature, size: int) -> None:
    """Check a broadcast.

    Raises:
        TypeError: an array holds Python objects.
        ValueError: the source is no replica's id.
    """
    check(signature, size)
    source = signature[DETAIL]
    if not 0 <= source < size:
        raise ValueError(f"source must be a replica id from 0 to {size - 1}, got {source}")


def check_reduce_scatter(signature: Signature, size: int) -> None:
    """Check a reduce_scatter.

    Raises:
        TypeError: the op does not take a leaf's dtype.
        ValueError: a leaf's size along the axis cannot be cut into equal parts.
    """
    _check_dense(signature)
    reduction.check(signature, size)
    for (shape, *_), axis in zip(leaf_fields(signature), _per_leaf(signature), strict=True):
        _check_divisible(shape, axis, size, "axis")


def check_all_to_all(signature: Signature, size: int) -> None:
    """Check an all_to_all.

    Raises:
        TypeError: an array holds Python objects.
        ValueError: a leaf's size along the split axis cannot be cut into equal parts.
    """
    check(signature, size)
    for (shape, *_), (split_axis, _) in zip(leaf_fields(signature), _per_leaf(signature), strict=True):
        _check_divisible(shape, split_axis, size, "split_axis")


def _check_divisible(shape: Sequence[int], axis: int, size: int, what: str) -> None:
    if shape[axis] % size:
        raise ValueError(
            f"the size along {what}={axis} must be divisible by the {size} replicas, got {shape[axis]} in shape "
            f"{tuple(shape)}; pad it, or cut it before the call"
        )


def _per_leaf(signature: Signature) -> Sequence[Any]:
    """Return the axis of each leaf."""
    detail = signature[DETAIL]
    return [detail] if signature[STRUCTURE] is None else list(detail)


def barrier(signature: Signature, values: Sequence[None], options: CommunicationOptions) -> None:
    """Return nothing: that all have arrived is all that it says."""


def broadcast(signature: Signature, values: Sequence[Any], options: CommunicationOptions) -> Any:
    """Return a copy of the source's value."""
    value = values[signature[DETAIL]]
    return _now_or_apart([value], lambda: _each_leaf(signature, value, lambda leaf, _: copied(leaf)))


def all_gather(signature: Signature, values: Sequence[Any], options: CommunicationOptions) -> Any:
    """Return the replicas' arrays put together along the axis, in replica order."""
    return _now_or_apart(values, lambda: _each_column(signature, values, gathered))


def reduce_scatter(signature: Signature, values: Sequence[Any], options: CommunicationOptions) -> Any:
    """Return, for each replica, its part of the reduction: the i-th along the axis, views of one array."""
    alone, axes, size = signature[STRUCTURE] is None, _per_leaf(signature), len(values)
    columns = [values] if alone else list(zip(*values, strict=True))
    total = Reduction(signature[OP], columns, (None,) * len(columns), options)

    def parts(results: list[Array]) -> list[Any]:
        split = [np.split(result, size, axis=axis) for result, axis in zip(results, axes, strict=True)]
        return _to_replicas(signature, split[0] if alone else split, size)

    return total.work(parts) if total.blocks() else parts(total.reduce())


def all_to_all(signature: Signature, values: Sequence[Any], options: CommunicationOptions) -> Any:
    """Return, for each replica i, the i-th part of every replica's array, put together in replica order."""
    size = len(values)
    return _now_or_apart(values, lambda: _to_replicas(signature, _each_column(signature, values, exchanged), size))


def _now_or_apart(values: Sequence[Any], move: Callable[[], Any]) -> Any:
    """Return what a function that copies these values makes; or the `Work` that it is, where they are large."""
    copied = sum(leaf.nbytes for value in values for leaf in _leaves(value) if isinstance(leaf, np.ndarray))
    if not policy.blocks(2 * copied):
        return move()
    results: list[Any] = []
    return Work([[lambda: results.append(move())]], results.pop)


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _each_leaf(signature: Signature, value: Any, fn: Callable[[Any, Any], Any]) -> Any:
    return fn(value, None) if signature[STRUCTURE] is None else [fn(leaf, None) for leaf in value]


def _each_column(signature: Signature, values: Sequence[Any], fn: Callable[[Sequence[Any], Any], Any]) -> Any:
    """Apply ``fn`` to each leaf's column over the replicas, and its axis; a list for a nest."""
    detail = signature[DETAIL]
    if signature[STRUCTURE] is None:
        return fn(values, detail)
    return [fn(leaves, axis) for leaves, axis in zip(zip(*values, strict=True), detail, strict=True)]


def _to_replicas(signature: Signature, parts: Any, size: int) -> list[Any]:
    """Turn parts by leaf, then replica, into values by replica."""
    if signature[STRUCTURE] is None:
        return list(parts)
    return [[leaf[replica_id] for leaf in parts] for replica_id in range(size)]


def gathered(leaves: Sequence[Array], axis: int) -> Array:
    """Return the replicas' arrays put together along the axis."""
    return _frozen(_concatenate(leaves, axis))


def exchanged(leaves: Sequence[Array], axes: tuple[int, int]) -> list[Array]:
    """Return for each replica its parts of all arrays, cut along the first axis and put together along the second."""
    split_axis, concat_axis = axes
    split = [np.split(leaf, len(leaves), axis=split_axis) for leaf in leaves]
    return [_frozen(_concatenate(column, concat_axis)) for column in zip(*split, strict=True)]


def copied(leaf: Any) -> Any:
    """Return a copy of an array, and anything else as it is."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    native = leaf.dtype.newbyteorder("=")
    if leaf.nbytes < pool.POOLED_FROM:
        return _frozen(np.array(leaf, dtype=native, order="K", subok=False))
    copy = empty_like(leaf, native)
    np.copyto(copy, leaf)
    return _frozen(copy)


def _concatenate(arrays: Sequence[Array], axis: int) -> Array:
    native = arrays[0].dtype.newbyteorder("=")
    if sum([array.nbytes for array in arrays]) < pool.POOLED_FROM:
        return np.concatenate([array.astype(native, copy=False) for array in arrays], axis=axis)
    shape = list(arrays[0].shape)
    shape[axis] = sum([array.shape[axis] for array in arrays])
    fortran = all(array.flags.f_contiguous and not array.flags.c_contiguous for array in arrays)
    together = pool.results.empty(shape, native, "F" if fortran else "C")
    return np.concatenate(arrays, axis=axis, out=together)


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
