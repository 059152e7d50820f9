"""How each kind of collective crosses to other workers: this worker's part, and the result from everybody's.

A plan is made when all local replicas have arrived and mean the same. Making it reduces the local values; carrying out
its transfers and finishing it is for when all workers have agreed. A finished result is what the kind's ``combine``
gives on one machine: for shared kinds one leaf or a list of them, for others a list with one such item a local replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.leaves import LeafMark, LeafType
from aiodist._arrays.slices import IndexedSlices
from aiodist._collectives.host import fold_slices
from aiodist._collectives.plan import Folded
from aiodist.collective.signature import DETAIL, OP, SHAPES, STRUCTURE, Signature, leaf_fields
from aiodist.workers import segments
from aiodist.workers.arrays import (
    ArrayGathering,
    Exchange,
    Gathered,
    concatenated,
    is_large,
    is_plain,
    lies_together,
    native,
)
from aiodist.workers.communicator import Array
from aiodist.workers.integers import IntegerReduction
from aiodist.workers.layout import Layout
from aiodist.workers.leaves import Leaf
from aiodist.workers.objects import Broadcast, Gathering
from aiodist.workers.ordered import tree_of
from aiodist.workers.record import ALL_RECEIVE_ALL
from aiodist.workers.reduction import Reduction, in_order_of
from aiodist.workers.transfers import Hands, Steps, Transfer, as_bytes, by_hand
from aiodist_kernels import Accumulate, ReduceOp, policy
from aiodist_kernels.rules import rule_for


class Span(NamedTuple):
    """What a kind needs to know of the workers.

    Attributes:
        layout: which replicas live where.
        ordered: reductions are to give the same bits for every layout.
    """

    layout: Layout
    ordered: bool = False


class Plan(NamedTuple):
    """What is to be exchanged, and how the result comes of it.

    Attributes:
        transfers: at most one reduction, and behind it at most one of something else.
        finish: makes the result of the transfers' results, in their order.
        nbytes: how many bytes `finish` copies.
    """

    transfers: Sequence[Transfer]
    finish: Callable[[Sequence[Any]], Any]
    nbytes: int = 0

    def prepared(self, hands: Hands) -> Steps[None]:
        """Make what is to be exchanged, where that takes long."""
        for transfer in self.transfers:
            if not transfer.is_light:
                yield from by_hand(hands, transfer.prepare)

    def finished(self, results: Sequence[Any], hands: Hands) -> Steps[Any]:
        """Make the result."""
        if policy.blocks(self.nbytes):
            return (yield from by_hand(hands, self.finish, results))
        return self.finish(results)


NOTHING: Final = Plan([], lambda _: None)
"""A plan of nothing: that all have arrived is all that there is to know."""

Crossing = Callable[[Signature, Sequence[Any], Accumulate, Span], Plan]


# Reductions.


def reduce_columns(
    op: ReduceOp,
    columns: Sequence[Sequence[Any]],
    types: Sequence[LeafMark],
    accumulate: Accumulate,
    span: Span,
) -> Plan:
    """Plan the reduction of leaves.

    Args:
        op: the reduce op.
        columns: by leaf, the local replicas' values.
        types: by leaf, its leaf type.
        accumulate: the accumulator.
        span: the workers.

    Returns:
        A plan that gives a list with the reduced leaves.
    """
    dense = [i for i, leaf_type in enumerate(types) if _is_dense(leaf_type)]
    integers: dict[int, Sequence[int]] = {}
    numbers: list[int] = []
    if span.layout.workers > ALL_RECEIVE_ALL and not span.ordered:
        # to gather numbers from thousands of workers takes longer than anything else in a step
        numbers = [i for i, leaf_type in enumerate(types) if leaf_type == LeafType.PYTHON_NUMBER]
        integers = {i: columns[i] for i in numbers if type(columns[i][0]) is int and op is not ReduceOp.PRODUCT}
        dense += [i for i in numbers if type(columns[i][0]) is not int]
    others = {i: column for i, column in enumerate(columns) if i not in dense and i not in integers}
    nbytes = _nbytes_of(list(others.values()))
    transfers: list[Transfer] = []
    if dense:
        transfers.append(_reduction(op, [_leaf(op, columns[i], types[i], accumulate) for i in dense], span))
    if integers:
        transfers.append(IntegerReduction(_fold(op), list(integers.values())))
    if others:
        transfers.append(Gathering(others, nbytes, lambda others: {i: _plain(column) for i, column in others.items()}))
    elif not integers and not numbers:
        return Plan(transfers, lambda results: results[0] if dense else [])

    def finish(results: Sequence[Any]) -> list[Any]:
        found = dict(zip(dense, results[0], strict=True)) if dense else {}
        found |= {i: found[i].item() for i in numbers if i in found}
        if integers:
            totals = zip(integers, results[1 if dense else 0], strict=True)
            found |= {i: total / span.layout.replicas if op is ReduceOp.MEAN else total for i, total in totals}
        for index in others:
            values = span.layout.in_order([worker[index] for worker in results[-1]])
            found[index] = _reduced_things(op, values, types[index], accumulate)
        return [found[index] for index in range(len(columns))]

    return Plan(transfers, finish, policy.SLOWNESS_BY_ROWS * nbytes)


def _is_dense(leaf_type: LeafMark) -> bool:
    return leaf_type not in (LeafType.PYTHON_NUMBER, LeafType.INDEXED_SLICES)


def _plain(column: Sequence[Any]) -> list[Any]:
    """Return what travels as it is: Python's numbers, which have no size, and rows, of which each may have others."""
    return [(np.asarray(v.values), v.indices, v.dense_shape) if isinstance(v, IndexedSlices) else v for v in column]


def _reduced_things(op: ReduceOp, values: Sequence[Any], leaf_type: LeafMark, accumulate: Accumulate) -> Any:
    if leaf_type == LeafType.PYTHON_NUMBER:
        return kernels.reduce_numbers(op, values)
    return fold_slices(op, [IndexedSlices(*value) for value in values], accumulate)


def _nbytes(value: Any) -> int:
    return int(getattr(value.values if isinstance(value, IndexedSlices) else value, "nbytes", 0))


_rule_for = lru_cache(maxsize=1024)(rule_for)


def _fold(op: ReduceOp) -> ReduceOp:
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _leaf(op: ReduceOp, column: Sequence[Any], leaf_type: LeafMark, accumulate: Accumulate) -> Leaf:
    if leaf_type == LeafType.PYTHON_NUMBER:
        kernels.check_number(op, type(column[0]))
        accumulate = "native"
    if isinstance(column[0], Folded):
        return Leaf(rule_for(op, column[0].dtype, accumulate), [column[0].array], scalar=False)
    arrays = [np.asarray(value) for value in column]
    return Leaf(_rule_for(op, arrays[0].dtype, accumulate), arrays, scalar=leaf_type == LeafType.NUMPY_SCALAR)


def _reduction(op: ReduceOp, leaves: Sequence[Leaf], span: Span) -> Reduction:
    fold, layout = _fold(op), span.layout
    if span.ordered:
        return Reduction(fold, leaves, layout.replicas, tree_of(layout), through_engine=False)
    return Reduction(fold, leaves, layout.replicas, in_order_of(layout))


def frozen(array: Array) -> Array:
    """Return an array, read-only from now on."""
    array.flags.writeable = False
    return array


def all_reduce(signature: Signature, values: Sequence[Any], accumulate: Accumulate, span: Span) -> Plan:
    """Plan an all_reduce."""
    single = signature[STRUCTURE] is None
    types = [leaf_type for *_, leaf_type in leaf_fields(signature)]
    columns = [values] if single else list(zip(*values, strict=True))
    plan = reduce_columns(signature[OP], columns, types, accumulate, span)
    if single:
        return plan._replace(finish=lambda results: plan.finish(results)[0])
    return plan


# What moves values.


def barrier(signature: Signature, values: Sequence[None], accumulate: Accumulate, span: Span) -> Plan:
    """Plan a barrier: that all have arrived is all that it says."""
    return NOTHING


def broadcast(signature: Signature, values: Sequence[Any], accumulate: Accumulate, span: Span) -> Plan:
    """Plan a broadcast from one replica."""
    worker, place = span.layout.worker_of(signature[DETAIL])
    mine = _leaves(signature, values[place]) if worker == span.layout.rank else []

    def finish(results: Sequence[Any]) -> Any:
        leaves = [frozen(native(leaf)) if isinstance(leaf, np.ndarray) else leaf for leaf in results[0]]
        return leaves[0] if signature[STRUCTURE] is None else leaves

    return Plan([Broadcast(mine, worker, span.layout.rank, sum(map(_nbytes, mine)))], finish)


def all_gather(signature: Signature, values: Sequence[Any], accumulate: Accumulate, span: Span) -> Plan:
    """Plan an all_gather: the local arrays, put together, from every worker."""
    axes = _axes(signature)
    columns = list(zip(*(_leaves(signature, value) for value in values), strict=True))
    if span.layout.in_blocks:
        return gather_columns(columns, axes, span.layout, single=signature[STRUCTURE] is None)
    nbytes = _nbytes_of(columns)

    def apart(columns: Sequence[Sequence[Any]]) -> list[list[Array]]:
        return [[native(np.asarray(array)) for array in column] for column in columns]

    def finish(results: Sequence[Any]) -> Any:
        ordered = [span.layout.in_order(column) for column in zip(*results[0], strict=True)]
        return _nest(signature, [frozen(concatenated(c, axis)) for c, axis in zip(ordered, axes, strict=True)])

    return Plan([Gathering(columns, nbytes, apart)], finish, nbytes * span.layout.workers)


def gather_columns(columns: Sequence[Sequence[Any]], axes: Sequence[int], layout: Layout, *, single: bool) -> Plan:
    """Plan the gathering of leaves, each along its axis, where each worker's follow on those of the one before.

    Args:
        columns: by leaf, the local replicas' arrays.
        axes: by leaf, the axis.
        layout: the workers.
        single: the result is the only leaf, not a list.
    """
    copied = [c for c, axis in zip(columns, axes, strict=True) if not (is_large(c) and lies_together(c[0].shape, axis))]

    def finish(results: Sequence[list[Gathered]]) -> Any:
        leaves = [
            frozen(concatenated(leaf.parts, axis) if leaf.whole is None else leaf.whole)
            for leaf, axis in zip(results[0], axes, strict=True)
        ]
        return leaves[0] if single else leaves

    return Plan([ArrayGathering(columns, axes)], finish, _nbytes_of(copied) * layout.workers)


def reduce_scatter(signature: Signature, values: Sequence[Any], accumulate: Accumulate, span: Span) -> Plan:
    """Plan a reduce_scatter: a reduction, of which each replica keeps its part."""
    plan = all_reduce(signature, values, accumulate, span)
    layout, axes = span.layout, _axes(signature)

    def finish(results: Sequence[Any]) -> list[Any]:
        whole = _leaves(signature, plan.finish(results))
        parts = [np.split(leaf, layout.replicas, axis=axis) for leaf, axis in zip(whole, axes, strict=True)]
        return [_nest(signature, [leaf[replica_id] for leaf in parts]) for replica_id in layout.mine]

    return plan._replace(finish=finish)


def all_to_all(signature: Signature, values: Sequence[Any], accumulate: Accumulate, span: Span) -> Plan:
    """Plan an all_to_all: for every worker, the parts that are its replicas', in the order of ours."""
    layout, axes = span.layout, _axes(signature)
    columns = list(zip(*(_leaves(signature, value) for value in values), strict=True))
    cut = [
        [np.split(native(np.asarray(array)), layout.replicas, axis=split_axis) for array in column]
        for column, (split_axis, _) in zip(columns, axes, strict=True)
    ]
    shapes = [(column[0][0].shape, column[0][0].dtype) for column in cut]
    part = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes)
    sizes = [count * layout.local * part for count in layout.counts]
    alone = len(cut) == layout.local == 1 and layout.in_blocks  # there is one order of parts in memory

    def for_each() -> Array:
        blocks = [block for ids in layout.places for block in _for_worker(cut, ids)]
        return np.concatenate(blocks) if blocks else np.empty(0, np.uint8)

    def put_together(results: Sequence[Array]) -> list[Any]:
        by_worker = zip(segments.split(results[0], sizes), layout.counts, strict=True)
        received = [_parts_of(data, shapes, layout.local, count) for data, count in by_worker]
        return [_nest(signature, _put_together(received, axes, place, layout)) for place in range(layout.local)]

    def as_it_is(results: Sequence[Array]) -> list[Any]:
        (shape, dtype), (_, axis) = shapes[0], axes[0]
        whole = (*shape[:axis], shape[axis] * layout.replicas, *shape[axis + 1 :])
        return [_nest(signature, [frozen(np.ndarray(whole, dtype, results[0]))])]

    make, copied, finish, nbytes = for_each, sum(sizes), put_together, sum(sizes)
    if alone and is_plain(columns[0]) and lies_together(columns[0][0].shape, axes[0][0]):
        make, copied = (lambda: as_bytes(columns[0][0])), 0
    if alone and lies_together(shapes[0][0], axes[0][1]):
        finish, nbytes = as_it_is, 0
    return Plan([Exchange(make, sizes, sizes, part * max(layout.counts) ** 2, copied)], finish, nbytes)


def _for_worker(cut: Sequence[Sequence[Sequence[Array]]], ids: Sequence[int]) -> list[Array]:
    """Return what is for a worker, as bytes: by leaf, by its replica, by ours."""
    return [as_bytes(parts[replica_id]) for column in cut for replica_id in ids for parts in column]


def _parts_of(
    data: Array, shapes: Sequence[tuple[tuple[int, ...], np.dtype[Any]]], local: int, count: int
) -> list[list[list[Array]]]:
    """Return what came from one worker: by leaf, by our replica, by theirs."""
    found, at = [], 0
    for shape, dtype in shapes:
        column = []
        for _ in range(local):
            size = prod(shape) * dtype.itemsize
            column.append([np.ndarray(shape, dtype, data, at + size * index) for index in range(count)])
            at += size * count
        found.append(column)
    return found


def _put_together(received: Sequence[Any], axes: Sequence[tuple[int, int]], place: int, layout: Layout) -> list[Array]:
    return [
        frozen(np.concatenate(layout.in_order([worker[leaf][place] for worker in received]), axis=concat_axis))
        for leaf, (_, concat_axis) in enumerate(axes)
    ]


def _axes(signature: Signature) -> list[Any]:
    detail = signature[DETAIL]
    return [detail] if signature[STRUCTURE] is None else list(detail)


def _leaves(signature: Signature, value: Any) -> list[Any]:
    if signature[SHAPES] is None:
        return []
    return [value] if signature[STRUCTURE] is None else list(value)


def _nest(signature: Signature, leaves: list[Any]) -> Any:
    return leaves[0] if signature[STRUCTURE] is None else leaves


def _nbytes_of(columns: Sequence[Sequence[Any]]) -> int:
    return sum(_nbytes(value) for column in columns for value in column)
