"""Reductions, gathers and copies of values outside of replicas, with the plans and executors of the collectives.

Each leaf that takes part is first checked and described as an `Operand`. Operands with equally many components, on the
host or with results on the same GPUs, form one collective. Work that would hold up the event loop is done in a worker
thread. Devices are always waited for, even after a cancellation.

Reductions along an axis are NumPy's, because no other framework adds in the same order. For them, and to reach other
workers, values on GPUs are copied to page-locked memory first (`to_host`). So results have the same bits wherever the
values are.
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
from aiodist._arrays.host import Array, HostType, check_unmasked, frozen, in_native_order
from aiodist._arrays.leaves import LeafMark, LeafType, Spec, describe_leaf
from aiodist._arrays.values import DistributedValues, Mirrored, components_of
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    Collective,
    Kind,
    check_leaf,
    normalized_axis,
)
from aiodist._collectives.work import Work
from aiodist._core.call import leaf_text
from aiodist._runtime.arguments import check_awaited, check_not_all_none
from aiodist._runtime.requests import array_text, dtype_text
from aiodist._strategy.scope import group_here, replicas_here, replicas_of, require_cross_replica
from aiodist._strategy.variable import Variable, as_distributed
from aiodist_kernels import Accumulate, ReduceOp, policy
from aiodist_kernels.rules import rule_for

# Operands.


class Operand(NamedTuple):
    """A leaf that takes part in an operation."""

    arrays: Sequence[Any]  # its components, in replica order and native byte order; or one that stands for all of them
    shape: tuple[int | None, ...]  # of each component, with None along the axes
    dtype: Any  # of each component; the type of a Python number
    mark: LeafMark
    axes: tuple[int, ...] | None = None  # to reduce along, or the one to gather along

    @property
    def on_gpus(self) -> bool:
        """Whether the components are on GPUs."""
        return isinstance(self.mark, DeviceType)


class Operation(NamedTuple):
    """The operation on each leaf of a nest: a reduction, a gather, or a copy of one value."""

    kind: Kind  # ALL_REDUCE, ALL_GATHER or BROADCAST
    op: ReduceOp | None = None
    axis: Any = None  # as the caller gave it; None: a reduction over the replicas alone
    accumulate: Accumulate = "native"

    def collective(self, operands: Sequence[Operand]) -> Collective:
        """Return the collective that combines the operands."""
        shapes, dtypes, marks = zip(*[operand[1:4] for operand in operands], strict=True)
        marks = tuple([None if isinstance(mark, HostType) else mark for mark in marks])  # computed by NumPy
        detail: Any = 0 if self.kind is BROADCAST else None
        if self.kind is ALL_GATHER:
            detail = tuple([axis for operand in operands for axis in operand.axes or ()])
        return Collective(self.kind, self.op, detail, Spec(shapes, dtypes, marks, len(operands) == 1))

    def operand(self, leaf: Any, replicas: Sequence[int], *, bare: bool) -> Operand | None:
        """Return the operand for a leaf; None if the leaf is its own result.

        ``replicas`` have the leaf's components. If ``bare``, a plain value is the component of the only replica.
        """
        if leaf is None:
            return None
        if self.kind is BROADCAST:
            return _copied(leaf)
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
        """Return the axes along which sizes may differ between replicas."""
        axis = self.axis
        check_leaf(self.kind, self.op, dtype, mark)
        if self.op is None:
            return (normalized_axis(axis, rank),)
        if axis is None:
            return None
        if mark == LeafType.INDEXED_SLICES:
            raise ValueError(f"IndexedSlices are reduced over the replicas alone, with axis=None, got axis={axis!r}")
        axes = tuple([normalized_axis(one, rank) for one in (axis if isinstance(axis, (tuple, list)) else (axis,))])
        if len(set(axes)) != len(axes):
            raise ValueError(f"axis must name each axis once, got {axis!r}")
        return axes

    def _described(self, parts: Sequence[Any], replicas: Sequence[int]) -> Operand:
        """Return the operand for components."""
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
    """Return whether all are NumPy arrays of one shape and native dtype, the common case."""
    first = parts[0]
    if type(first) is not np.ndarray or not first.dtype.isnative:
        return False
    shape, dtype = first.shape, first.dtype
    return all(type(part) is np.ndarray and part.dtype is dtype and part.shape == shape for part in parts)


COPY = Operation(BROADCAST)


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
    """Return a shape with None for the sizes along axes, which may differ between replicas."""
    return tuple([None if axis in axes else size for axis, size in enumerate(shape)]) if axes else shape


def _different(described: Sequence[Any], replicas: Sequence[int], axes: tuple[int, ...] | None) -> ValueError:
    """Return the error for components of different mark, shape or dtype."""
    other = next(position for position, one in enumerate(described) if one != described[0])
    first, second = (
        leaf_text(shape, dtype_text(dtype, ALL_REDUCE), array_text(mark))
        for mark, shape, dtype in (described[0], described[other])
    )
    but = "; to reduce ragged batches, give the axis that they differ along"
    if axes is not None:
        but = f", and may differ along axis {axes[0] if len(axes) == 1 else axes} only"
    return ValueError(
        f"the components must have the same type, dtype and shape{but}; replica {replicas[0]}'s is {first}, "
        f"replica {replicas[other]}'s is {second}"
    )


def values_of(operands: Sequence[Operand]) -> list[Any]:
    """Return each replica's contribution to the collective of operands."""
    columns = [operand.arrays for operand in operands]
    return list(columns[0]) if len(columns) == 1 else [list(row) for row in zip(*columns, strict=True)]


# Execution.


class Leaf:
    """A leaf of a nest: its operand, if it takes part, and its result for each destination.

    ``targets`` are the GPUs that get a result; None for an operand on the host.
    """

    __slots__ = ("_results", "operand", "targets")

    def __init__(self, leaf: Any, operand: Any, destinations: Sequence[str] | None) -> None:
        self.operand: Any = operand
        self._results: Sequence[Any] = [leaf] * (1 if destinations is None or leaf is None else len(destinations))
        self.targets: tuple[int, ...] | None = None
        if operand is not None and operand.on_gpus:
            ordinal = operand.arrays[0].ordinal
            self.targets = (ordinal,) if destinations is None else tuple(map(_gpu, destinations))

    def set_result(self, result: Any) -> None:
        """Set the result: NumPy's or, for an operand on GPUs, a list by target."""
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
    """An operation on a nest whose leaves are checked and described; those in ``operands`` take part.

    If ``destinations`` are given, the value is a list of nests, and there is a sequence of devices for each nest.
    Otherwise each result stays on the host, or on the GPU of the first component.
    """

    def __init__(
        self,
        operation: Operation,
        value: Any,
        strategy: Any,
        replicas: Sequence[int],
        destinations: Sequence[Sequence[str]] | None,
        *,
        bare: bool,
    ) -> None:
        self._operation = operation
        self._devices = strategy.extended.devices  # whose streams may have made the arrays
        leaves, structure = ([value], None) if isinstance(value, DistributedValues) else nests.flatten_with_none(value)
        self._structure: nests.Structure | None = structure
        if operation is not COPY:
            leaves = [as_distributed(leaf, strategy) for leaf in leaves]
        by_leaf: list[Sequence[str] | None] = [None] * len(leaves)
        if structure is not None and destinations is not None:
            of_nests = zip(destinations, structure.children(), strict=True)
            by_leaf = [each for each, nest in of_nests for _ in range(nest.num_leaves)]
        self._leaves = [
            Leaf(leaf, operation.operand(leaf, replicas, bare=bare), each)
            for leaf, each in zip(leaves, by_leaf, strict=True)
        ]
        self.participating = [leaf for leaf in self._leaves if leaf.operand is not None]

    async def carry_out(self, leaves: Sequence[Leaf]) -> None:
        """Compute the results of some of the leaves that take part."""
        await checkpoint()
        if self._operation.op is not None and self._operation.axis is not None:
            await self._reduce_along_axes(self._operation.op, leaves)
            return
        groups: dict[tuple[int, tuple[int, ...] | None], list[Leaf]] = {}
        for leaf in leaves:
            groups.setdefault((len(leaf.operand.arrays), leaf.targets), []).append(leaf)
        for (size, targets), members in groups.items():
            operands = [leaf.operand for leaf in members]
            collective, devices = self._operation.collective(operands), () if targets is None else self._devices
            carrier = executor(collective, size, (), self._operation.accumulate, devices, targets)
            result, distribute = carrier.run(values_of(operands)), partial(_distribute, members)
            if type(result) is not Work:
                distribute(result)
            elif targets is None:  # the worker thread also copies NumPy's results for other frameworks
                await finished(result.then(distribute))
            else:
                distribute(await finished(result))

    async def _reduce_along_axes(self, op: ReduceOp, leaves: Sequence[Leaf]) -> None:
        operands: Sequence[Operand] = [leaf.operand for leaf in leaves]
        copying = to_host(operands, self._devices)
        if copying is not None:
            operands = await finished(copying)
        accumulate = self._operation.accumulate
        work = Work((), lambda: [combine_parts(op, each, parts_along(op, each, accumulate)) for each in operands])
        blocks = policy.blocks(sum(array.nbytes for each in operands for array in each.arrays))
        await self.set_results(leaves, await finished(work) if blocks else work.result())

    async def set_results(self, leaves: Sequence[Leaf], results: Sequence[Any]) -> None:
        """Set the leaves' results, which are on the host, copying them to the GPUs where they belong."""
        copied = []
        for leaf, result in zip(leaves, results, strict=True):
            if leaf.targets is None:
                leaf.set_result(result)
            else:
                copied.append((leaf, np.asarray(result)))
        if copied:
            from aiodist._collectives.device import staged, transfer  # loaded only for arrays on GPUs

            columns = [[array] for array in await anyio.to_thread.run_sync(staged, [array for _, array in copied])]
            marks: Any = [leaf.operand.mark for leaf, _ in copied]
            targets: Any = [leaf.targets for leaf, _ in copied]
            work = transfer(marks, columns, targets, self._devices).work(list)
            for (leaf, _), found in zip(copied, await finished(work), strict=True):
                leaf.set_result(found)

    def results(self) -> Any:
        """Return the nest of results."""
        results = [leaf.result() for leaf in self._leaves]
        return results[0] if self._structure is None else self._structure.unflatten(results)


def _distribute(leaves: Sequence[Leaf], result: Any) -> None:
    """Set the results of leaves that formed one collective."""
    if len(leaves) == 1:
        result = [result]
    elif leaves[0].targets is not None:
        result = map(list, zip(*result, strict=True))
    for leaf, one in zip(leaves, result, strict=True):
        leaf.set_result(one)


def combine(
    strategy: Any, kind: str, operation: Operation, value: Any, destinations: Sequence[Sequence[str]] | None = None
) -> CoroutineType[Any, Any, Any]:
    """Apply an operation to a nest over the replicas of all workers; for ``destinations`` see `Combination`."""
    return named(kind, _combined(strategy, kind, operation, value, destinations, replicas_of(strategy).caller()))


def named(name: str, coroutine: Any) -> CoroutineType[Any, Any, Any]:
    """Name a coroutine like the public method and return it; its type lets checkers find a missing await."""
    coroutine.__qualname__ = name
    return coroutine  # type: ignore[no-any-return]


async def _combined(strategy: Any, kind: str, operation: Operation, value: Any, destinations: Any, site: Any) -> Any:
    require_cross_replica(strategy, kind)
    replicas, over_workers, group = replicas_here(strategy), replicas_of(strategy).combine, group_here()
    if operation is COPY or (group is not None and not group.spans):  # other workers have no part
        over_workers = None
    bare = over_workers is not None and len(replicas) == 1
    combination = Combination(operation, value, strategy, replicas, destinations, bare=bare)
    if destinations is None and not combination.participating:
        check_not_all_none(value, 3)
    if over_workers is None:
        await combination.carry_out(combination.participating)
    else:
        await over_workers(kind, operation, combination, site)
    return combination.results()


async def finished(work: Work) -> Any:
    """Carry out work in a worker thread and return its result, or be cancelled once it has ended."""
    result = None
    with CancelScope(shield=True):
        result = await anyio.to_thread.run_sync(work.carry_out)
    await checkpoint_if_cancelled()
    return result


def to_host(operands: Sequence[Operand], devices: tuple[str, ...]) -> Work | None:
    """Return the work that copies operands to the host; None if none is on GPUs."""
    on_gpus = [operand for operand in operands if operand.on_gpus]
    if not on_gpus:
        return None
    from aiodist._collectives.device import transfer  # loaded only for arrays on GPUs
    from aiodist._gpu.steps import HOST

    def replaced(columns: list[list[Any]]) -> list[Operand]:
        copies = (array for (array,) in columns)
        return [
            operand._replace(arrays=[next(copies) for _ in operand.arrays], mark=None) if operand.on_gpus else operand
            for operand in operands
        ]

    marks: Any = [operand.mark for operand in on_gpus for _ in operand.arrays]
    columns = [[array] for operand in on_gpus for array in operand.arrays]
    return transfer(marks, columns, [[HOST]] * len(columns), devices).work(replaced)


# Reductions along axes.

Part: TypeAlias = tuple[Array, int]
"""A component reduced along the axes, and the number of elements that each of its numbers is made of."""


def parts_along(op: ReduceOp, operand: Operand, accumulate: Accumulate) -> list[Part]:
    """Reduce each component along the axes, but only sum it for a MEAN, and leave empty ones out for MIN and MAX."""
    axes, result = operand.axes, kernels.result_dtype(op, operand.dtype)
    assert axes is not None
    rule = rule_for(op, result, accumulate)
    wide = np.promote_types(result, np.float64) if op is ReduceOp.MEAN else rule.accumulator
    parts: list[Part] = []
    for array in operand.arrays:
        count = math.prod(array.shape[axis] for axis in axes)
        if count or op not in (ReduceOp.MIN, ReduceOp.MAX):
            with np.errstate(all="ignore"):  # infinities and NaN are ordinary values
                parts.append((np.asarray(rule.ufunc.reduce(array, axis=axes, dtype=wide), wide), count))
    return parts


def combine_parts(op: ReduceOp, operand: Operand, parts: Sequence[Part]) -> Array:
    """Fold the parts of all replicas in replica order; a MEAN divides once, by the true count."""
    result = kernels.result_dtype(op, operand.dtype)
    arrays = [array for array, _ in parts]
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
