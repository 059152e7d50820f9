"""Reducing, gathering and copying values outside of replicas, by the plans and the executors of the collectives.

A leaf of a per-replica value becomes an `Operand`, which is checked and described before anything else happens.
Operands with equally many components, on the host or with results on the same GPUs, form one collective. Work that
would hold up the event loop is done in a worker thread; the devices are always waited for, even after a cancellation.

Reductions along an axis are NumPy's, whose order of additions no framework's sum has. Values on GPUs go there, and to
other workers, through page-locked memory (`on_host`), so results have the same bits wherever the values are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import CoroutineType
from typing import Any, NamedTuple, TypeAlias

import anyio.to_thread
import numpy as np
from anyio import CancelScope
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

import aiodist_kernels as kernels
from aiodist._arrays import nests
from aiodist._arrays.device import DeviceType, framework_of
from aiodist._arrays.devices import gpu_number
from aiodist._arrays.host import Array, HostType
from aiodist._arrays.leaves import LeafMark, LeafType, Spec, describe_leaf
from aiodist._arrays.values import DistributedValues, Mirrored, check_awaited, check_unmasked, components_of
from aiodist._collectives.execution import executor
from aiodist._collectives.host import frozen, in_native_order
from aiodist._collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    Collective,
    Kind,
    check_reducible,
    normalized_axis,
)
from aiodist._collectives.work import Work
from aiodist._core.call import leaf_text
from aiodist._runtime import requests as arguments
from aiodist._strategy.scope import group_here, replicas_here, replicas_of, require_cross_replica
from aiodist._strategy.variable import Variable, as_distributed
from aiodist_kernels import Accumulate, ReduceOp, policy
from aiodist_kernels.rules import rule_for

# What takes part.


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
    """The operation on each leaf of a nest: a reduction, a gather, or a copy of a value that is the same for all."""

    kind: Kind  # ALL_REDUCE, ALL_GATHER or BROADCAST
    op: ReduceOp | None = None
    axis: Any = None  # as the caller gives it; None: a reduction over the replicas alone
    accumulate: Accumulate = "native"

    def collective(self, operands: Sequence[Operand]) -> Collective:
        """Return the collective for operands."""
        shapes, dtypes, marks = zip(*[operand[1:4] for operand in operands], strict=True)
        marks = tuple([None if isinstance(mark, HostType) else mark for mark in marks])  # NumPy's, until they are given
        detail: Any = 0 if self.kind is BROADCAST else None
        if self.kind is ALL_GATHER:
            detail = tuple([axis for operand in operands for axis in operand.axes or ()])
        return Collective(self.kind, self.op, detail, Spec(shapes, dtypes, marks, len(operands) == 1))

    def operand(self, leaf: Any, replicas: Sequence[int], *, bare: bool) -> Operand | None:
        """Return the operand of a leaf; None if it stays unchanged.

        ``replicas`` are those that have the components; ``bare`` says that a plain value is the only one's component.
        """
        if leaf is None:
            return None
        if self.kind is BROADCAST:
            return _copied(leaf)
        leaf = as_distributed(leaf)
        if isinstance(leaf, DistributedValues):
            each = components_of(leaf, len(replicas))
            one_for_all = isinstance(leaf, Mirrored) and self.op in (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)
            return self._described(each[:1] if one_for_all else each, replicas)
        check_awaited(leaf, "value")
        if self.kind is ALL_GATHER and not bare:
            if len(replicas) == 1:
                normalized_axis(self.axis, len(describe_leaf(leaf)[0]))
            return None
        if len(replicas) > 1 and self.op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            raise ValueError(
                f"{self.op.name} expects a per-replica value; a plain value is the same on all replicas, and whether "
                "it counts once or for each cannot be known: reduce with MEAN, or return it from strategy.run"
            )
        return self._described([leaf], replicas)

    def _axes(self, dtype: Any, mark: LeafMark, rank: int) -> tuple[int, ...] | None:
        """Return the axes along which such leaves' sizes may differ; None if none may."""
        op, axis = self.op, self.axis
        if op is None:
            if mark == LeafType.INDEXED_SLICES:
                raise TypeError("gather does not take IndexedSlices, reduce does; gather their .values and .indices")
            return (normalized_axis(axis, rank),)
        check_reducible(op, dtype, mark)
        if axis is None:
            return None
        if mark == LeafType.INDEXED_SLICES:
            raise ValueError(f"IndexedSlices are reduced over the replicas alone, with axis=None, got axis={axis!r}")
        axes = tuple([normalized_axis(one, rank) for one in (axis if isinstance(axis, (tuple, list)) else (axis,))])
        if len(set(axes)) != len(axes):
            raise ValueError(f"axis must name each axis once, got {axis!r}")
        return axes

    def _described(self, parts: Sequence[Any], replicas: Sequence[int]) -> Operand:
        """Describe components, in this machine's byte order."""
        if _are_arrays_alike(parts):
            first = parts[0]
            axes = self._axes(first.dtype, LeafType.NUMPY_ARRAY, first.ndim)
            return Operand(parts, _ragged(first.shape, axes), first.dtype, LeafType.NUMPY_ARRAY, axes)
        columns: list[Sequence[Any]] = list(zip(*map(describe_leaf, parts), strict=True))
        shapes, dtypes, marks, arrays = columns
        mark = marks[0]
        if not (_alike(dtypes) and getattr(dtypes[0], "isnative", True)):
            dtypes = [dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype for dtype in dtypes]
            arrays = list(map(in_native_order, arrays))
        axes = self._axes(dtypes[0], mark, len(shapes[0]))
        shapes = [_ragged(shape, axes) for shape in shapes]
        if axes is not None and not _alike(dtypes) and {np.dtype(one).kind for one in dtypes} in ({"U"}, {"S"}):
            dtypes = [np.result_type(*dtypes)] * len(dtypes)  # strings may differ in width
        if not all(map(_alike, (marks, shapes, dtypes))):
            raise _different(list(zip(marks, shapes, dtypes, strict=True)), replicas, axes)
        if axes is not None and not isinstance(mark, DeviceType):
            mark = mark if isinstance(mark, HostType) else LeafType.NUMPY_ARRAY
            return Operand(list(map(np.asarray, arrays)), shapes[0], np.dtype(dtypes[0]), mark, axes)
        return Operand(arrays, shapes[0], dtypes[0], mark, axes)


def _are_arrays_alike(parts: Sequence[Any]) -> bool:
    """Return whether leaves are NumPy arrays of one shape and native dtype. This common case needs no description."""
    first = parts[0]
    if type(first) is not np.ndarray or not first.dtype.isnative:
        return False
    shape, dtype = first.shape, first.dtype
    return all(type(part) is np.ndarray and part.dtype is dtype and part.shape == shape for part in parts)


COPY = Operation(BROADCAST)
"""A copy of a value that is the same for all; a per-replica value or a masked array is a TypeError."""


def _copied(leaf: Any) -> Operand | None:
    if isinstance(leaf, DistributedValues):
        raise TypeError(
            f"broadcast_to expects one value for all, got a {type(leaf).__name__}; reduce it first: "
            "reduce_to(op, value, destinations)"
        )
    check_unmasked(leaf, "to be copied")
    if not (isinstance(leaf, (np.ndarray, Variable)) or framework_of(leaf) is not None):
        return None
    shape, dtype, mark, array = describe_leaf(np.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf)
    return Operand([array], shape, dtype, mark)


def _alike(column: Sequence[Any]) -> bool:
    return column.count(column[0]) == len(column)


def _ragged(shape: tuple[int, ...], axes: tuple[int, ...] | None) -> tuple[int | None, ...]:
    """Return a shape without its sizes along axes, which may differ between replicas."""
    return tuple([None if place in axes else size for place, size in enumerate(shape)]) if axes else shape


def _different(kinds: Sequence[Any], replicas: Sequence[int], axes: tuple[int, ...] | None) -> ValueError:
    """Return the error for components whose marks, shapes and dtypes differ."""
    other = next(place for place, kind in enumerate(kinds) if kind != kinds[0])
    first, second = (
        leaf_text(shape, arguments.dtype_text(dtype, ALL_REDUCE), arguments.array_text(mark))
        for mark, shape, dtype in (kinds[0], kinds[other])
    )
    but = "; to reduce ragged batches, give the axis that they differ along"
    if axes is not None:
        but = f", and may differ along axis {axes[0] if len(axes) == 1 else axes} only"
    return ValueError(
        f"the components must have the same type, dtype and shape{but}; replica {replicas[0]}'s is {first}, "
        f"replica {replicas[other]}'s is {second}"
    )


def values_of(operands: Sequence[Operand]) -> list[Any]:
    """Return, by replica, the contributions of operands to their collective."""
    columns = [operand.arrays for operand in operands]
    return list(columns[0]) if len(columns) == 1 else [list(row) for row in zip(*columns, strict=True)]


# Carrying out.


class Leaf:
    """A leaf of a nest, its operand if it takes part, and its result for each destination.

    ``targets`` are the GPUs that get a result each; None for an operand on the host.
    """

    __slots__ = ("_results", "operand", "targets")

    def __init__(self, leaf: Any, operand: Any, goals: Sequence[str] | None) -> None:
        self.operand: Any = operand
        self._results: Sequence[Any] = [leaf] * (1 if goals is None or leaf is None else len(goals))
        self.targets: tuple[int, ...] | None = None
        if operand is not None and operand.on_gpus:
            self.targets = (operand.arrays[0].ordinal,) if goals is None else tuple(map(_gpu, goals))

    def give(self, result: Any) -> None:
        """Take the result: NumPy's or, for an operand on GPUs, a list by target."""
        mark, count = self.operand.mark, len(self._results)
        if isinstance(mark, HostType):
            self._results = mark.give_each(result, count)
        else:
            self._results = [result] * count if self.targets is None else result

    def result(self) -> Any:
        """Return the result, mirrored if there are several destinations."""
        return self._results[0] if len(self._results) == 1 else Mirrored(self._results)


def _gpu(name: str) -> int:
    if not name.startswith("GPU:"):
        raise TypeError(f"an array on a GPU can only go to GPUs, got the destination {name!r}; copy the result later")
    return gpu_number(name)


class Combination:
    """An operation on a nest, checked and described beforehand; ``taken`` are the leaves that take part.

    With ``destinations`` the value is a list of nests, and they are, for each, the devices that get a result. Without
    them it is the host, or the GPU of the first component. Arrays may have been made on the streams of ``devices``.
    """

    def __init__(
        self,
        operation: Operation,
        value: Any,
        replicas: Sequence[int],
        devices: tuple[str, ...],
        destinations: Sequence[Sequence[str]] | None,
        *,
        bare: bool,
    ) -> None:
        self._operation = operation
        self._devices = devices
        leaves, structure = ([value], None) if isinstance(value, DistributedValues) else nests.flatten_with_none(value)
        self._structure: nests.Structure | None = structure
        goals: list[Sequence[str] | None] = [None] * len(leaves)
        if structure is not None and destinations is not None:
            of_nests = zip(destinations, structure.children(), strict=True)
            goals = [each for each, nest in of_nests for _ in range(nest.num_leaves)]
        self._leaves = [
            Leaf(leaf, operation.operand(leaf, replicas, bare=bare), each)
            for leaf, each in zip(leaves, goals, strict=True)
        ]
        self.taken = [leaf for leaf in self._leaves if leaf.operand is not None]

    async def carry_out(self, leaves: Sequence[Leaf]) -> None:
        """Compute the results of these leaves."""
        await checkpoint()
        if self._operation.op is not None and self._operation.axis is not None:
            await self._reduce_along(leaves)
            return
        groups: dict[tuple[int, tuple[int, ...] | None], list[Leaf]] = {}
        for leaf in leaves:
            groups.setdefault((len(leaf.operand.arrays), leaf.targets), []).append(leaf)
        waited = False
        for (size, targets), among in groups.items():
            operands = [leaf.operand for leaf in among]
            collective, devices = self._operation.collective(operands), () if targets is None else self._devices
            carrier = executor(collective, size, (), self._operation.accumulate, devices, targets)
            result, give = carrier.run(values_of(operands)), partial(_give, among)
            waited = waited or type(result) is Work
            if type(result) is not Work:
                give(result)
            elif targets is None:  # what NumPy makes is copied for its framework in the worker thread, too
                await finished(result.then(give))
            else:
                give(await finished(result))
        if waited:
            await checkpoint_if_cancelled()

    async def _reduce_along(self, leaves: Sequence[Leaf]) -> None:
        op, accumulate = self._operation.op, self._operation.accumulate
        assert op is not None
        operands: Sequence[Operand] = [leaf.operand for leaf in leaves]
        down = on_host(operands, self._devices)
        if down is not None:
            operands = await finished(down)
        work = Work((), lambda: [combine_parts(op, each, parts_along(op, each, accumulate)) for each in operands])
        blocks = policy.blocks(sum(array.nbytes for each in operands for array in each.arrays))
        await self.lift(leaves, await finished(work) if blocks else work.result())

    async def lift(self, leaves: Sequence[Leaf], results: Sequence[Any]) -> None:
        """Give leaves their results, which are on the host; results of operands on GPUs are copied to these."""
        there = []
        for leaf, result in zip(leaves, results, strict=True):
            if leaf.targets is None:
                leaf.give(result)
            else:
                there.append((leaf, np.asarray(result)))
        if there:
            from aiodist._collectives.device import staged, transfer  # loaded where there are arrays on GPUs

            columns = [[array] for array in await anyio.to_thread.run_sync(staged, [array for _, array in there])]
            marks: Any = [leaf.operand.mark for leaf, _ in there]
            targets: Any = [leaf.targets for leaf, _ in there]
            up = transfer(marks, columns, targets, self._devices).work(list)
            for (leaf, _), found in zip(there, await finished(up), strict=True):
                leaf.give(found)
            await checkpoint_if_cancelled()

    def results(self) -> Any:
        """Return the nest of results."""
        results = [leaf.result() for leaf in self._leaves]
        return results[0] if self._structure is None else self._structure.unflatten(results)


def _give(leaves: Sequence[Leaf], result: Any) -> None:
    """Give leaves the results of their collective."""
    if len(leaves) == 1:
        result = [result]
    elif leaves[0].targets is not None:
        result = map(list, zip(*result, strict=True))
    for leaf, one in zip(leaves, result, strict=True):
        leaf.give(one)


def combine(
    strategy: Any, kind: str, operation: Operation, value: Any, destinations: Sequence[Sequence[str]] | None = None
) -> CoroutineType[Any, Any, Any]:
    """Return the result of an operation on a nest, over all workers' replicas; for arguments see `Combination`."""
    return named(kind, _combined(strategy, kind, operation, value, destinations, replicas_of(strategy).caller()))


def named(name: str, doing: Any) -> CoroutineType[Any, Any, Any]:
    """Return a coroutine named like the public method; its type lets checkers find a missing await."""
    doing.__qualname__ = name
    return doing  # type: ignore[no-any-return]


async def _combined(strategy: Any, kind: str, operation: Operation, value: Any, destinations: Any, site: Any) -> Any:
    require_cross_replica(strategy, kind)
    replicas, over_workers = replicas_here(strategy), replicas_of(strategy).combine
    group = group_here()
    if operation is COPY or (group is not None and group.size == len(group.members)):  # all of it is done here
        over_workers = None
    bare = over_workers is not None and len(replicas) == 1
    combination = Combination(operation, value, replicas, strategy.extended.devices, destinations, bare=bare)
    if destinations is None and not combination.taken:
        arguments.check_not_all_none(value, 3)
    if over_workers is None:
        await combination.carry_out(combination.taken)
    else:
        await over_workers(kind, operation, combination, len(replicas), site)
    return combination.results()


async def finished(work: Work) -> Any:
    """Return the result of a worker thread or devices, and wait for these even after a cancellation."""
    with CancelScope(shield=True):
        return await anyio.to_thread.run_sync(work.carry_out)


def on_host(operands: Sequence[Operand], devices: tuple[str, ...]) -> Work | None:
    """Return the work that copies operands to the host; None if they are there."""
    there = [operand for operand in operands if operand.on_gpus]
    if not there:
        return None
    from aiodist._collectives.device import transfer  # loaded where there are arrays on GPUs
    from aiodist._gpu.steps import HOST

    def landed(arrays: list[list[Any]]) -> list[Operand]:
        found = (array for (array,) in arrays)
        return [
            operand._replace(arrays=[next(found) for _ in operand.arrays], mark=None) if operand.on_gpus else operand
            for operand in operands
        ]

    marks: Any = [operand.mark for operand in there for _ in operand.arrays]
    columns = [[array] for operand in there for array in operand.arrays]
    return transfer(marks, columns, [[HOST]] * len(columns), devices).work(landed)


# Along axes.


Part: TypeAlias = tuple[Array | None, int]
"""An array, reduced along the axes, and how many elements each of its numbers is made of; None for what has none."""


def parts_along(op: ReduceOp, operand: Operand, accumulate: Accumulate) -> list[Part]:
    """Reduce each component along the axes; a MEAN is a sum until it is divided."""
    axes, result = operand.axes, kernels.result_dtype(op, operand.dtype)
    assert axes is not None
    rule = rule_for(op, result, accumulate)
    wide = np.promote_types(result, np.float64) if op is ReduceOp.MEAN else rule.accumulator
    parts: list[Part] = []
    for array in operand.arrays:
        count = math.prod(array.shape[axis] for axis in axes)
        if not count and op in (ReduceOp.MIN, ReduceOp.MAX):
            parts.append((None, 0))
            continue
        with np.errstate(all="ignore"):  # infinities and NaN are values like others
            parts.append((np.asarray(rule.ufunc.reduce(array, axis=axes, dtype=wide), wide), count))
    return parts


def combine_parts(op: ReduceOp, operand: Operand, parts: Sequence[Part]) -> Array:
    """Return the fold of all replicas' parts in their order; a MEAN divides once, by the true count."""
    result = kernels.result_dtype(op, operand.dtype)
    arrays = [array for array, _ in parts if array is not None]
    if not arrays:
        raise ValueError(
            f"{op.name} along axis {operand.axes} needs at least one element, got empty components on every replica"
        )
    with np.errstate(all="ignore"):
        if op is not ReduceOp.MEAN:
            return frozen(np.asarray(kernels.reduce(op, arrays).astype(result)))
        # the mean of nothing is NaN, as in TensorFlow
        total = kernels.reduce(ReduceOp.SUM, arrays) / np.float64(sum(count for _, count in parts))
        return frozen(np.asarray(total.astype(result)))
