"""all_reduce: the leaves of a nest, reduced one by one; in worker threads where that would hold up the event loop.

Leaves are never put together in one buffer first: copying them costs more than the calls that it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, LeafType
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.slices import IndexedSlices
from aiodist.collective.out_buffers import OutBuffers, are_entangled
from aiodist.collective.packs import packs
from aiodist.collective.reduction import reduce_arrays, reduce_leaf
from aiodist.collective.signature import OP, STRUCTURE, TYPES, Signature
from aiodist.collective.warming import ask_for
from aiodist.collective.work import Call, Work, worker_count
from aiodist_kernels import Accumulate, ReduceOp, policy

Array = np.ndarray[Any, Any]
Leaves = Sequence[Any]

LOOK_FROM = 256 * 1024
"""Bytes brought by all replicas below which nothing holds up the event loop: all that is asked of a small value."""


def all_reduce(signature: Signature, values: Sequence[Any], options: CommunicationOptions) -> Any:
    """Return the reduction of the replicas' values: a read-only leaf, or a list of them for a nest; or a `Work`."""
    op, types, accumulate = signature[OP], signature[TYPES], options.accumulate
    if signature[STRUCTURE] is None:
        if types is None:
            if values[0].nbytes * len(values) < LOOK_FROM:
                return reduce_arrays(op, values, accumulate)
        elif types in (LeafType.NUMPY_SCALAR, LeafType.PYTHON_NUMBER):
            return reduce_leaf(op, values, types, accumulate)
        leaves = Reduction(op, [values], (types,), options)
        return leaves.work(_only) if leaves.blocks() else leaves.reduce()[0]
    columns = list(zip(*values, strict=True))
    if types is None:
        if sum([leaf.nbytes for leaf in values[0]]) * len(values) < LOOK_FROM:
            return [reduce_arrays(op, leaves, accumulate) for leaves in columns]
        types = (None,) * len(columns)
    elif sum(map(_nbytes, values[0])) * len(values) < LOOK_FROM:
        return [reduce_leaf(op, leaves, kind, accumulate) for leaves, kind in zip(columns, types, strict=True)]
    nest = Reduction(op, columns, types, options)
    return nest.work(list) if nest.blocks() else nest.reduce()


def all_reduce_into(
    signature: Signature, values: Sequence[Any], options: CommunicationOptions, outs: dict[int, OutBuffers]
) -> Any:
    """Reduce into the buffers that replicas brought.

    The result is written straight into replica 0's and copied from there, if every replica brought some. Else those who
    brought none share one of their own.

    Returns:
        What those who brought none get, as from `all_reduce`; or a `Work`.
    """
    alone, types = signature[STRUCTURE] is None, signature[TYPES]
    columns = [values] if alone else list(zip(*values, strict=True))
    kinds = (types,) if alone else types or (None,) * len(columns)
    brought = [outs[replica_id].leaves for replica_id in sorted(outs)]
    straight = len(outs) == len(values) and all(map(_is_array, kinds)) and not are_entangled(columns, brought[0])
    reduction = Reduction(signature[OP], columns, kinds, options, brought[0] if straight else None)
    copies = brought[1:] if straight else brought
    if reduction.blocks():
        return reduction.work(_only if alone else list, copies)
    results = reduction.reduce()
    for buffers in copies:
        for buffer, result in zip(buffers, results, strict=True):
            np.copyto(buffer, result)
    return results[0] if alone else results


class Reduction:
    """The leaves of one meeting, column by column.

    Args:
        op: the reduce op.
        columns: for each leaf, what the replicas brought, in replica order.
        types: for each leaf, its type.
        options: of which the accumulator and the size of packs hold here.
        targets: for each leaf, an array for its result; None makes new ones, which are read-only.
    """

    def __init__(
        self,
        op: ReduceOp,
        columns: Sequence[Leaves],
        types: Sequence[LeafMark],
        options: CommunicationOptions,
        targets: Sequence[Array] | None = None,
    ) -> None:
        self._op = op
        self._columns = columns
        self._types = types
        self._options = options
        self._accumulate: Accumulate = options.accumulate
        self._targets = targets
        self._results: list[Any] = []

    def reduce(self) -> list[Any]:
        """Return the results, made in this thread."""
        return self._reduce(range(len(self._columns)))

    def _reduce(self, places: Sequence[int]) -> list[Any]:
        op, accumulate, targets, columns = self._op, self._accumulate, self._targets, self._columns
        if targets is not None:
            return [kernels.reduce(op, columns[place], out=targets[place], accumulate=accumulate) for place in places]
        among = len(columns) > 1
        return [reduce_leaf(op, columns[place], self._types[place], accumulate, among) for place in places]

    def blocks(self) -> bool:
        """Whether it would keep the event loop's thread too long."""
        return policy.blocks(sum(self._costs()))

    def work(self, result: Callable[[list[Any]], Any], copies: Sequence[Sequence[Array]] = ()) -> Work:
        """Return the calls that make the results: one for each pack, or as it is quickest.

        Args:
            result: makes the meeting's result of the leaves.
            copies: buffers that the leaves are copied into.
        """
        self._results = [None] * len(self._columns)
        calls = self._calls_by_pack() if self._options.bytes_per_pack else self._calls_by_cost()
        copying = [self._copy(place, leaf) for leaves in copies for place, leaf in enumerate(leaves)]
        return Work([calls, copying] if copying else [calls], lambda: result(self._frozen()))

    def _calls_by_pack(self) -> list[Call]:
        sparse = [kind is LeafType.INDEXED_SLICES for kind in self._types]
        sizes = [None if rows else _nbytes(leaves[0]) for leaves, rows in zip(self._columns, sparse, strict=True)]
        return [self._batch(pack) for pack in packs(sizes, self._options.bytes_per_pack)]

    def _calls_by_cost(self) -> list[Call]:
        """Return calls that cost about the same: large leaves in pieces, small ones some to a call."""
        calls: list[Call] = []
        batch: list[int] = []
        held = 0
        for place, cost in enumerate(self._costs()):
            if cost >= policy.LEAST_MOVED_BY_A_THREAD and _is_array(self._types[place]):
                calls.extend(self._pieces(place, cost))
                continue
            batch.append(place)
            held += cost
            if held >= policy.LEAST_MOVED_BY_A_THREAD:
                calls.append(self._batch(batch))
                batch, held = [], 0
        if batch:
            calls.append(self._batch(batch))
        return calls

    def _costs(self) -> list[int]:
        return [self._cost(*column) for column in zip(self._columns, self._types, strict=True)]

    def _cost(self, leaves: Leaves, leaf_type: LeafMark) -> int:
        """Return about how many bytes could be moved in the time that a leaf takes."""
        if leaf_type is LeafType.INDEXED_SLICES:
            nbytes: int = sum(part.values.nbytes for part in leaves)
            return policy.SLOWNESS_BY_ROWS * nbytes
        if not _is_array(leaf_type):
            return 0
        return kernels.cost(self._op, leaves[0].dtype, leaves[0].size, len(leaves), self._accumulate)

    def _pieces(self, place: int, cost: int) -> Sequence[Call]:
        leaves = self._columns[place]
        ask_for(self._op, leaves[0].dtype, len(leaves), leaves[0].nbytes, self._accumulate)
        pieces = kernels.cut(
            self._op,
            leaves,
            out=None if self._targets is None else self._targets[place],
            accumulate=self._accumulate,
            parts=policy.parts(cost, worker_count()),
        )
        self._results[place] = pieces.result
        return pieces.calls

    def _batch(self, places: Sequence[int]) -> Call:
        def call() -> None:
            for place, result in zip(places, self._reduce(places), strict=True):
                self._results[place] = result

        return call

    def _copy(self, place: int, buffer: Array) -> Call:
        return lambda: np.copyto(buffer, self._results[place])

    def _frozen(self) -> list[Any]:
        if self._targets is None:
            for result in self._results:
                if isinstance(result, np.ndarray):
                    result.flags.writeable = False
        return self._results


def _only(results: list[Any]) -> Any:
    return results[0]


def _is_array(leaf_type: LeafMark) -> bool:
    """Whether a leaf takes part as a NumPy array, be it over another framework's memory."""
    return leaf_type is LeafType.NUMPY_ARRAY or isinstance(leaf_type, HostType)


def _nbytes(leaf: Any) -> int:
    """Return about how many bytes a leaf of any type has."""
    if type(leaf) is IndexedSlices:
        return LOOK_FROM  # each replica has another number of rows: look at them all
    nbytes: int = getattr(leaf, "nbytes", 0)
    return nbytes
