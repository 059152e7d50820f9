"""Reducing and gathering per-replica values in cross-replica context, over the replicas of all workers.

Each worker brings the components of its own replicas. With one local replica a plain value is its component, as `run`
returns it; with several it is the component of each, so that workers with other numbers of replicas mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays import nests
from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, LeafType, Spec
from aiodist._arrays.values import DistributedValues, Mirrored
from aiodist._collectives.host import fold, frozen, in_native_order
from aiodist._collectives.kinds import ALL_GATHER, ALL_REDUCE, Collective, normalized_axis
from aiodist._core.call import LEAF, Call
from aiodist._runtime.requests import array_text, dtype_text
from aiodist._strategy import across
from aiodist._strategy.variable import as_distributed
from aiodist._workers.channel import Channel
from aiodist._workers.exchange import gather_objects
from aiodist._workers.moving import accumulate_of, moved
from aiodist._workers.record import Found
from aiodist._workers.transport import Steps
from aiodist_kernels import Accumulate, ReduceOp

if TYPE_CHECKING:
    from aiodist._workers.team import Move, Team

Finish = Callable[[Sequence[Any]], Any]


class _Leaf(NamedTuple):
    """A leaf that takes part: the local components, and what they are."""

    arrays: list[Any]
    shape: tuple[Any, ...]
    dtype: Any
    mark: LeafMark
    axis: Any


class _Same(NamedTuple):
    """A leaf that is the same everywhere: each worker makes the result by itself."""

    make: Callable[[], Any]
    nbytes: int
    mark: LeafMark


class Prepared(NamedTuple):
    """An operation, checked and described, before any worker is disturbed.

    Attributes:
        leaves: what takes part.
        rebuild: makes the nest of the leaves' results.
        nbytes: of leaves whose results that makes.
    """

    leaves: list[_Leaf]
    rebuild: Finish
    nbytes: int


def _prepared(value: Any, leaf_of: Callable[[Any], _Leaf | _Same | None], marks: Sequence[LeafMark] | None) -> Prepared:
    """Take a nest apart into leaves that take part, those that are the same everywhere, and others, which stay."""
    given, structure = nests.flatten_with_none(value)
    found = [leaf_of(as_distributed(leaf)) for leaf in given]
    for place, mark in enumerate(marks or ()):
        leaf = found[place]
        if mark is not None and leaf is not None:
            found[place] = leaf._replace(mark=mark)
    taking_part = [leaf for leaf in found if isinstance(leaf, _Leaf)]

    def rebuild(results: Sequence[Any]) -> Any:
        totals, leaves = iter(results), list(given)
        for place, leaf in enumerate(found):
            if leaf is not None:
                result = next(totals) if isinstance(leaf, _Leaf) else leaf.make()
                leaves[place] = across._given(leaf.mark, result)
        return nests.unflatten(structure, leaves)

    return Prepared(taking_part, rebuild, sum(leaf.nbytes for leaf in found if isinstance(leaf, _Same)))


def prepare_reduce(
    op: ReduceOp,
    value: Any,
    axis: Any,
    local: Sequence[int],
    marks: Sequence[LeafMark] | None = None,
    *,
    bare: bool = False,
) -> Prepared:
    """Check a reduction on this worker.

    Args:
        op: the reduce op.
        value: the nest.
        axis: None, or what to reduce along.
        local: the ids of its replicas, over all workers.
        marks: of leaves that came from elsewhere, what they are there.
        bare: some worker has a single replica, whose component nothing tells from a value that is the same for all.

    Raises:
        TypeError: the op does not take a leaf's dtype.
        ValueError: a SUM of a plain value on several local replicas; shapes differ; an axis out of range.
    """
    return _prepared(value, partial(_reduced_leaf, op, axis, local, bare), marks)


def _reduced_leaf(op: ReduceOp, axis: Any, local: Sequence[int], bare: bool, leaf: Any) -> _Leaf | _Same | None:
    if leaf is None:
        return None
    components = across.components(op, leaf, local)
    if not (bare or _differs(op, leaf, local)):
        return _same(op, _checked(op, axis, local, components))
    if len(components) < len(local):  # one stands for all of them
        components = [components[0]] * len(local)
    return _checked(op, axis, local, components)


def _checked(op: ReduceOp, axis: Any, local: Sequence[int], components: Sequence[Any]) -> _Leaf:
    shapes, dtypes, marks, arrays = across._described(components, local)
    dtypes = [across._native(dtype) for dtype in dtypes]
    if LeafType.INDEXED_SLICES in marks:
        across._check_rows(op, dtypes, marks, axis)
    elif axis is not None:
        return _along(op, [np.asarray(array) for array in arrays], axis, marks[0], local)
    for what, column in (("shape", shapes), ("dtype", dtypes), ("type", marks)):
        across.check_same(what, column, local)
    if marks[0] == LeafType.PYTHON_NUMBER:
        kernels.check_number(op, dtypes[0])
    elif marks[0] != LeafType.INDEXED_SLICES:
        kernels.result_dtype(op, dtypes[0])
    return _Leaf(arrays, shapes[0], dtypes[0], marks[0], None)


def _differs(op: ReduceOp, leaf: Any, local: Sequence[int]) -> bool:
    """Whether a leaf differs by worker. A mirrored value is the same everywhere, and a plain one must be."""
    if isinstance(leaf, Mirrored):
        return op in (ReduceOp.SUM, ReduceOp.PRODUCT)
    return isinstance(leaf, DistributedValues) or len(local) == 1


def _same(op: ReduceOp, leaf: _Leaf) -> _Same:
    """Return a leaf that one component stands for on all workers, as on one machine."""

    def make() -> Any:
        if leaf.axis is None:
            return fold(op, leaf.arrays, leaf.mark)
        return across._whole(op, leaf.dtype, _parts(op, leaf, "native"), leaf.axis)

    return _Same(make, sum(getattr(array, "nbytes", 0) for array in leaf.arrays), leaf.mark)


def _parts(op: ReduceOp, leaf: _Leaf, accumulate: Accumulate) -> list[across.Part]:
    """Reduce each local component of a leaf along its axes."""
    return [across._part(op, array, leaf.axis, accumulate) for array in leaf.arrays]


def _along(op: ReduceOp, arrays: list[Any], axis: Any, mark: LeafMark, local: Sequence[int]) -> _Leaf:
    kernels.result_dtype(op, arrays[0].dtype)
    axes = across._axes(axis, arrays[0].ndim)
    across._check_along(axes, arrays, axis, local)
    shape = tuple(None if place in axes else size for place, size in enumerate(arrays[0].shape))
    return _Leaf(arrays, shape, across._native(arrays[0].dtype), mark, axes)


def prepare_gather(value: Any, axis: Any, local: Sequence[int], marks: Sequence[LeafMark] | None = None) -> Prepared:
    """Check a gathering on this worker; see `prepare_reduce` for the arguments.

    Raises:
        TypeError: a component is no array.
        ValueError: the axis is out of range, or the components differ in more than the size along it.
    """
    return _prepared(value, partial(_gathered_leaf, axis, local), marks)


def _gathered_leaf(axis: Any, local: Sequence[int], leaf: Any) -> _Leaf | None:
    if leaf is None or (len(local) > 1 and not isinstance(leaf, DistributedValues)):
        return None
    if isinstance(leaf, DistributedValues):
        across.check_count(leaf, local)
    components = leaf.values if isinstance(leaf, DistributedValues) else [leaf]
    _, _, marks, arrays = across._described(components, local)
    if LeafType.INDEXED_SLICES in marks:
        raise TypeError("gather does not take IndexedSlices, reduce does; gather their .values and .indices")
    arrays = [np.asarray(array) for array in arrays]
    along = normalized_axis(axis, arrays[0].ndim)
    across._check_along([along], arrays, along, local)
    shape = tuple(None if place == along else size for place, size in enumerate(arrays[0].shape))
    return _Leaf(arrays, shape, across._native(arrays[0].dtype), marks[0], along)


def call_of(kind: str, op: ReduceOp | None, prepared: Prepared) -> Call:
    """Return what the workers compare."""
    leaves = prepared.leaves
    axes = tuple(leaf.axis for leaf in leaves)
    return Call(
        kind,
        op=None if op is None else op.name,
        axis=axes if any(axis is not None for axis in axes) else None,
        structure=f"[{', '.join([LEAF] * len(leaves))}]",
        paths=tuple(f"[{place}]" for place in range(len(leaves))),
        shapes=tuple(leaf.shape for leaf in leaves),
        dtypes=tuple(dtype_text(leaf.dtype) for leaf in leaves),
        arrays=tuple(array_text(leaf.mark) for leaf in leaves),
    )


# What is moved, once all workers have agreed.


def reduced(op: ReduceOp, prepared: Prepared, team: Team) -> Move:
    """Return what reduces over the replicas of all workers."""
    along = [leaf for leaf in prepared.leaves if leaf.axis is not None]
    if along:  # an axis holds for every leaf but IndexedSlices, which take none
        return partial(_reduce_along, op, along, prepared)
    return partial(_moved, Collective(ALL_REDUCE, op, None, _spec(prepared)), prepared, team)


def gathered(prepared: Prepared, team: Team) -> Move:
    """Return what puts together the components of all workers."""
    axes = tuple(leaf.axis for leaf in prepared.leaves)
    return partial(_moved, Collective(ALL_GATHER, None, axes, _spec(prepared)), prepared, team)


def _spec(prepared: Prepared) -> Spec:
    leaves = prepared.leaves
    shapes, dtypes = tuple(leaf.shape for leaf in leaves), tuple(leaf.dtype for leaf in leaves)
    return Spec(shapes, dtypes, tuple(map(_mark, leaves)), single=False)


def _mark(leaf: _Leaf) -> LeafMark:
    return None if isinstance(leaf.mark, (DeviceType, HostType)) else leaf.mark


def _moved(collective: Collective, prepared: Prepared, team: Team, channel: Channel, found: Found) -> Steps[Any]:
    leaves, layout = prepared.leaves, team.layout
    if not leaves:
        return prepared.rebuild([])
    values = [[in_native_order(leaf.arrays[position]) for leaf in leaves] for position in range(layout.local)]
    results = yield from moved(channel, layout, collective, values, found, team.threads, ordered=team.settings.ordered)
    return prepared.rebuild(results)


def _reduce_along(
    op: ReduceOp, leaves: Sequence[_Leaf], prepared: Prepared, channel: Channel, found: Found
) -> Steps[Any]:
    """Reduce each component along its axes here, and fold what comes of them in the order of all replicas."""
    own = [_parts(op, leaf, accumulate_of(found)) for leaf in leaves]
    told = yield from gather_objects(channel.communicator, own)
    columns = [[part for worker in told for part in worker[i]] for i in range(len(leaves))]
    totals = [across._whole(op, leaf.dtype, column, leaf.axis) for leaf, column in zip(leaves, columns, strict=True)]
    return prepared.rebuild([frozen(total) for total in totals])
