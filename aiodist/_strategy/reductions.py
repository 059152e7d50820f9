"""Reducing, gathering and copying values outside of replicas, by the plans and the executors of the collectives.

A leaf of a per-replica value becomes an `Operand`, checked and described before anything is done with it. Those that
are alike are one collective: those of as many components, on the host or with results on the same GPUs. What holds up
the event loop is made in a worker thread, and the devices are waited for, whoever is cancelled.

NumPy alone reduces along an axis, in an order of its own, which no framework's sum has. Values on GPUs get there, and
to other workers, by way of page-locked memory (`on_host`), so results have the same bits wherever the values lie.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import anyio.to_thread
import numpy as np
from anyio import CancelScope
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

import aiodist_kernels as kernels
from aiodist._arrays import gpus, nests
from aiodist._arrays.device import DeviceType
from aiodist._arrays.devices import resolve
from aiodist._arrays.frameworks import device_type_of
from aiodist._arrays.host import Array, HostType, host_type_of
from aiodist._arrays.leaves import LeafMark, LeafType, Spec, describe_leaf
from aiodist._arrays.slices import IndexedSlices
from aiodist._arrays.values import DistributedValues, Mirrored, check_awaited
from aiodist._collectives.execution import executor
from aiodist._collectives.host import copied, frozen, in_native_order
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
from aiodist._collectives.work import Work
from aiodist._strategy.scope import is_in_group_of_this_worker, replicas_here, replicas_of
from aiodist._strategy.variable import Variable, as_distributed
from aiodist_kernels import Accumulate, ReduceOp, policy
from aiodist_kernels.arguments import check_unmasked
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
    """What is made of each leaf of a nest: by a collective of a kind, of leaves that ``operand`` describes.

    ``operand`` returns None for a leaf that stays as it is.
    """

    kind: Kind
    operand: Callable[[Any], Operand | None]
    op: ReduceOp | None = None
    accumulate: Accumulate = "native"
    along_axes: bool = False  # beside over the replicas

    def collective(self, operands: Sequence[Operand]) -> Collective:
        """Return what is to be carried out for operands."""
        shapes, dtypes, marks = zip(*[operand[1:4] for operand in operands], strict=True)
        marks = tuple([None if isinstance(mark, HostType) else mark for mark in marks])  # NumPy's, until they are given
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

    def along(dtype: Any, mark: LeafMark, rank: int) -> tuple[int, ...] | None:
        check_reducible(op, dtype, mark)
        if axis is None:
            return None
        if mark == LeafType.INDEXED_SLICES:
            raise ValueError(f"IndexedSlices are reduced over the replicas alone, with axis=None, got axis={axis!r}")
        axes = tuple(normalized_axis(a, rank) for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
        if len(set(axes)) != len(axes):
            raise ValueError(f"axis must name each axis once, got {axis!r}")
        return axes

    def operand(leaf: Any) -> Operand | None:
        if leaf is None:
            return None
        components = _components(op, as_distributed(leaf), replicas)
        if axis is None and _are_arrays_alike(components):
            first = components[0]
            check_reducible(op, first.dtype, LeafType.NUMPY_ARRAY)
            return Operand(components, first.shape, first.dtype, LeafType.NUMPY_ARRAY)
        return _described(components, replicas, along)

    return Operation(ALL_REDUCE, operand, op, accumulate, axis is not None)


def gathering(axis: Any, replicas: Sequence[int], *, bare: bool = False) -> Operation:
    """Return the concatenation of components along an axis; plain values stay as they are, unless ``bare``."""

    def along(_: object, mark: LeafMark, rank: int) -> tuple[int, ...]:
        if mark == LeafType.INDEXED_SLICES:
            raise TypeError("gather does not take IndexedSlices, reduce does; gather their .values and .indices")
        return (normalized_axis(axis, rank),)

    def operand(leaf: Any) -> Operand | None:
        if leaf is None:
            return None
        leaf = as_distributed(leaf)
        if isinstance(leaf, DistributedValues) or bare:
            return _described(_components(None, leaf, replicas), replicas, along)
        check_awaited(leaf, "value")
        if len(replicas) == 1:
            normalized_axis(axis, len(describe_leaf(leaf)[0]))
        return None

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
    parts: Sequence[Any], replicas: Sequence[int], along: Callable[[Any, LeafMark, int], tuple[int, ...] | None]
) -> Operand:
    """Describe components, in this machine's byte order.

    ``along`` returns the axes, of a dtype, a mark and a rank, along which their sizes may differ; None where none may.
    """
    columns: list[Sequence[Any]] = list(zip(*map(describe_leaf, parts), strict=True))
    shapes, dtypes, marks, arrays = columns
    mark = marks[0]
    _check_same("must have the same type", marks, replicas, list(map(_text, marks)))
    if not _alike(dtypes) or not getattr(dtypes[0], "isnative", True):
        dtypes = [dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype for dtype in dtypes]
        arrays = list(map(in_native_order, arrays))
    axes = along(dtypes[0], mark, len(shapes[0]))
    if axes is None:
        hint = "; to reduce ragged batches, give the axis that they differ along"
        _check_same("must have the same shape", shapes, replicas, shapes, hint)
        _check_same("must have the same dtype", dtypes, replicas, dtypes)
        return Operand(arrays, shapes[0], dtypes[0], mark)
    if not _alike(dtypes) and {np.dtype(dtype).kind for dtype in dtypes} in ({"U"}, {"S"}):
        dtypes = [np.result_type(*dtypes)] * len(dtypes)  # strings may differ in width
    rest = [tuple([None if place in axes else size for place, size in enumerate(shape)]) for shape in shapes]
    shown = [f"{dtype}{list(shape)}" for dtype, shape in zip(dtypes, shapes, strict=True)]
    which = axes[0] if len(axes) == 1 else axes
    _check_same(f"may differ along axis {which} only", list(zip(rest, dtypes, strict=True)), replicas, shown)
    if isinstance(mark, DeviceType):
        return Operand(arrays, rest[0], dtypes[0], mark, axes)
    mark = mark if isinstance(mark, HostType) else LeafType.NUMPY_ARRAY
    return Operand(list(map(np.asarray, arrays)), rest[0], np.dtype(dtypes[0]), mark, axes)


def _alike(column: Sequence[Any]) -> bool:
    return column.count(column[0]) == len(column)


def _check_same(
    rule: str, column: Sequence[Any], replicas: Sequence[int], shown: Sequence[Any], hint: str = ""
) -> None:
    if _alike(column):
        return
    place = next(place for place, found in enumerate(column) if found != column[0])
    raise ValueError(
        f"the components {rule}; replica {replicas[0]}'s is {shown[0]}, replica {replicas[place]}'s is "
        f"{shown[place]}{hint}"
    )


def _text(mark: LeafMark) -> str:
    if isinstance(mark, DeviceType):
        return f"{mark.name} array on a GPU"
    if isinstance(mark, HostType):
        return f"{mark.name} array"
    return mark or "NumPy array"


_LOOKS = 3
"""Turns of the event loop in which it looks whether the devices are done, before a thread waits for them."""


# Carrying out.


class Combination:
    """An operation on nests, checked and described, before anything is done.

    Args:
        operation: what is made of each leaf.
        values: the nests.
        devices: the strategy's, on whose replicas' streams arrays may have been made.
        destinations: for each nest, the devices that get a result; None: the host, or the GPU of the first component.

    Attributes:
        operands: the leaves that take part, by their place among those of all nests.
    """

    def __init__(
        self,
        operation: Operation,
        values: Sequence[Any],
        devices: tuple[str, ...],
        destinations: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self._operation = operation
        self._devices = devices
        self._structures: list[nests.Structure] = []
        self._leaves: list[Any] = []
        self._goals: list[Sequence[str] | None] = []
        for number, value in enumerate(values):
            leaves, structure = nests.flatten_with_none(value)
            self._structures.append(structure)
            self._leaves += leaves
            self._goals += [None if destinations is None else destinations[number]] * len(leaves)
        described = enumerate(map(operation.operand, self._leaves))
        self.operands = {place: operand for place, operand in described if operand is not None}
        foreign = HostType, DeviceType
        self._foreign = {place for place, operand in self.operands.items() if isinstance(operand.mark, foreign)}
        self._targets = {place: self._gpus(place) for place in self._foreign if self.operands[place].on_gpus}

    def _gpus(self, place: int) -> tuple[int, ...]:
        """Return the GPUs that get a result each of an operand on GPUs."""
        goals = self._goals[place]
        if goals is None:
            return (self.operands[place].arrays[0].ordinal,)
        for name in goals:
            if not name.startswith("GPU:"):
                raise TypeError(
                    f"an array on a GPU can only go to GPUs, got the destination {name!r}; copy the array to the host "
                    "first, or the result afterwards"
                )
        return tuple([gpus.logical.ordinal(name) for name in goals])

    async def results(self, places: Iterable[int]) -> dict[int, Any]:
        """Carry it out for some of the operands; return their results by place, as `rebuilt` takes them."""
        await checkpoint()
        if self._operation.along_axes:
            return await self._reduced_along(list(places))
        groups: dict[tuple[int, tuple[int, ...] | None], list[int]] = {}
        for place in places:
            groups.setdefault((len(self.operands[place].arrays), self._targets.get(place)), []).append(place)
        found: dict[int, Any] = {}
        works: list[tuple[Work, Callable[[Any], dict[int, Any]]]] = []
        # What is made here at once comes before devices are put to work, for it may raise.
        in_order = sorted(groups, key=lambda key: key[1] is not None) if self._targets else groups
        for size, targets in in_order:
            among = groups[size, targets]
            operands = [self.operands[place] for place in among]
            collective, devices = self._operation.collective(operands), () if targets is None else self._devices
            carrier = executor(collective, size, (), self._operation.accumulate, devices, targets)
            result = carrier.run(values_of(operands))
            by_place = partial(self._by_place, among)
            if type(result) is not Work:
                found |= by_place(result)
            elif targets is None:
                works.append((result.then(by_place), dict))
            else:
                works.append((result, by_place))
        if works:
            with CancelScope(shield=True):
                for work, finish in reversed(works):  # devices are at work already, threads are not
                    found |= finish(await _waited(work))
            await checkpoint_if_cancelled()
        return found

    def _by_place(self, places: list[int], result: Any) -> dict[int, Any]:
        """Return a collective's results by place: another framework's as a list by target, NumPy's one for all."""
        if len(places) == 1:
            result = [result]
        elif places[0] in self._targets:
            result = map(list, zip(*result, strict=True))
        found = dict(zip(places, result, strict=True))
        return self._given(found) if self._foreign else found

    def _given(self, found: dict[int, Any]) -> dict[int, Any]:
        """Give arrays on the host to their frameworks, as many as there are destinations."""
        for place in self._foreign.intersection(found):
            mark, goals = self.operands[place].mark, self._goals[place]
            if isinstance(mark, HostType):
                found[place] = mark.give_each(found[place], 1 if goals is None else len(goals))
        return found

    async def _reduced_along(self, places: Sequence[int]) -> dict[int, Any]:
        op, accumulate = self._operation.op, self._operation.accumulate
        assert op is not None
        operands, down = on_host([self.operands[place] for place in places], self._devices)
        if down is not None:
            await down()

        def totals() -> list[Array]:
            return [combine_parts(op, each, parts_along(op, each, accumulate)) for each in operands]

        arrays = [array for each in operands for array in each.arrays]
        return await self.lifted(places, await _called(totals, arrays))

    async def lifted(self, places: Sequence[int], results: Sequence[Any]) -> dict[int, Any]:
        """Return results on the host by place, and those of other frameworks' operands as theirs, where they were."""
        found = self._given(dict(zip(places, results, strict=True)))
        there = [place for place in places if self.operands[place].on_gpus]
        if there:
            from aiodist._collectives.device import bring_up, staged  # loaded where there are arrays on GPUs

            arrays = [np.asarray(found[place]) for place in there]
            columns = [[array] for array in await _called(partial(staged, arrays), arrays)]
            marks: Any = [self.operands[place].mark for place in there]
            run = bring_up(marks, columns, [self._targets[place] for place in there], self._devices)
            found.update(zip(there, await _finished(run), strict=True))
            await checkpoint_if_cancelled()
        return found

    def rebuilt(self, results: Mapping[int, Any]) -> list[Any]:
        """Return the nests of results by place; a result for several destinations is mirrored."""
        leaves = (self._rebuilt_leaf(place, leaf, results) for place, leaf in enumerate(self._leaves))
        return [each.unflatten(islice(leaves, each.num_leaves)) for each in self._structures]

    def _rebuilt_leaf(self, place: int, leaf: Any, results: Mapping[int, Any]) -> Any:
        result: Any = results.get(place, leaf)
        goals = self._goals[place]
        if goals is None:
            return result[0] if place in self._foreign else result
        if leaf is None:
            return None
        if self._operation is COPY and isinstance(result, IndexedSlices):
            result = IndexedSlices(frozen(copied(leaf.values)), frozen(copied(leaf.indices)), leaf.dense_shape)
        each = result if place in self._foreign else [result] * len(goals)
        return each[0] if len(each) == 1 else Mirrored(each)


Make: TypeAlias = Callable[[Sequence[int], bool], tuple[Operation, Sequence[Any], Sequence[Sequence[str]] | None]]
"""Checks arguments, and returns an operation, nests and destinations, as `Combination` takes them.

It gets the ids of the replicas that have the components here, and whether other workers take part.
"""


async def combine(strategy: Any, kind: str, make: Make, site: Any = None) -> list[Any]:
    """Return what an operation makes of nests, over the replicas of all workers.

    Args:
        strategy: the strategy.
        kind: the operation's name for the workers.
        make: the operation and its arguments.
        site: where it was called; None: the caller of the strategy that is awaiting this.
    """
    replicas = replicas_here(strategy)
    workers: Any = replicas_of(strategy)
    over_workers = workers.combine is not None and not is_in_group_of_this_worker()
    if not over_workers:
        return await combine_here(*make(replicas, over_workers), strategy.extended.devices)
    site = site or workers.caller()
    with workers.telling_refusal(kind, site):
        operation, values, destinations = make(replicas, over_workers)
        doing: Awaitable[list[Any]] = workers.combine(kind, site, operation, values, replicas, destinations)
    return await doing


async def combine_here(
    operation: Operation, values: Sequence[Any], destinations: Sequence[Sequence[str]] | None, devices: tuple[str, ...]
) -> list[Any]:
    """Return what an operation makes of nests whose components are all here; see `Combination`."""
    combination = Combination(operation, values, devices, destinations)
    return combination.rebuilt(await combination.results(combination.operands))


# Waiting.


async def _called(fn: Callable[[], Any], arrays: Sequence[Array]) -> Any:
    """Call a function that reads arrays, in a worker thread where that holds up the event loop."""
    return await anyio.to_thread.run_sync(fn) if policy.blocks(sum(array.nbytes for array in arrays)) else fn()


async def _waited(work: Work) -> Any:
    """Return what devices make: looked for a few times, before a thread waits for it."""
    for _ in range(_LOOKS if work.ready is not None else 0):
        await checkpoint()
        if work.ready is not None and work.ready():
            return work.result()
    return await anyio.to_thread.run_sync(work.carry_out)


async def _finished(run: Any) -> list[list[Any]]:
    """Return results by leaf and taker; the devices are waited for, whoever is cancelled."""
    found: list[list[Any]] = []
    with CancelScope(shield=True):
        found.extend(await _waited(run.work(lambda by_leaf: by_leaf)))
    return found


def on_host(
    operands: Sequence[Operand], devices: tuple[str, ...]
) -> tuple[list[Operand], Callable[[], Awaitable[None]] | None]:
    """Return operands as on the host, and what is awaited first, if any are on GPUs: it copies those.

    The memory on the host is there before anything is in it: so what is wrong with it is found at the call.
    """
    there = [operand for operand in operands if operand.on_gpus]
    if not there:
        return list(operands), None
    from aiodist._collectives.device import bring_down  # loaded where there are arrays on GPUs

    marks: Any = [operand.mark for operand in there for _ in operand.arrays]
    run = bring_down(marks, [[array] for operand in there for array in operand.arrays], [0], devices)
    landed = (array for (array,) in run.landed())

    def here(operand: Operand) -> Operand:
        if not operand.on_gpus:
            return operand
        return operand._replace(arrays=list(islice(landed, len(operand.arrays))), mark=LeafType.NUMPY_ARRAY)

    async def down() -> None:
        await _finished(run)
        await checkpoint_if_cancelled()

    return list(map(here, operands)), down


# Along axes.


Part: TypeAlias = tuple[Array | None, int]
"""An array, reduced along the axes, and how many elements each of its numbers is made of; None for what has none."""


def parts_along(op: ReduceOp, operand: Operand, accumulate: Accumulate) -> list[Part]:
    """Reduce each component along the axes; a MEAN is a sum until it is divided."""
    axes, result = operand.axes, kernels.result_dtype(op, operand.dtype)
    assert axes is not None
    rule = rule_for(op, result, accumulate)
    ordered, wide = op in (ReduceOp.MIN, ReduceOp.MAX), rule.accumulator
    if op is ReduceOp.MEAN:
        wide = np.promote_types(result, np.float64)
    parts: list[Part] = []
    for array in operand.arrays:
        count = math.prod(array.shape[axis] for axis in axes)
        with np.errstate(all="ignore"):  # infinities and NaN are values like others
            empty = ordered and not count
            parts.append((None if empty else np.asarray(rule.ufunc.reduce(array, axis=axes, dtype=wide), wide), count))
    return parts


def combine_parts(op: ReduceOp, operand: Operand, parts: Sequence[Part]) -> Array:
    """Return the parts of all replicas, folded in their order; a MEAN divides once, by the true count."""
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


# Destinations.


def devices_of(destinations: Any, replicas: Sequence[str]) -> tuple[str, ...]:
    """Return the devices that are meant."""
    if isinstance(destinations, (DistributedValues, Variable)):
        if len(destinations.values) != len(replicas):
            raise ValueError(
                f"expected as destination a value with {len(replicas)} components, one for each replica, got "
                f"{len(destinations.values)}"
            )
        return tuple(replicas)
    if isinstance(destinations, str):
        return resolve([destinations])
    if len(replicas) == 1 and (isinstance(destinations, np.ndarray) or is_foreign_array(destinations)):
        return tuple(replicas)
    if not isinstance(destinations, Sequence):
        raise TypeError(
            "destinations must be a device such as 'CPU:0', a sequence of devices, a distributed value or a variable, "
            f"got {destinations!r}"
        )
    return resolve(destinations)
