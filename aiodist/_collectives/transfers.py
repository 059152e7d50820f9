"""Transfers: what workers exchange as rows and parts, flat and contiguous, and how it is read when it comes.

Nothing is copied that can be moved from where it lies, or read where it came to.

A **reduction** has one row a worker: the left fold, in the accumulator, of what its replicas contribute; an ordered one
has more (`ordered`). The rows of all workers become one, which is scaled and rounded at the end. All this goes range by
range, so that nothing of the size of a whole value is ever folded, copied or rounded at one go. An **exchange** gives
each worker the parts of arrays that its replicas' results are made of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate as running_sums
from typing import Any, Final, TypeAlias

import numpy as np

import aiodist_kernels as kernels
from aiodist._collectives.host import frozen, part
from aiodist._collectives.ordered import Tree, fold_into, forest_of
from aiodist._collectives.plan import LeafPlan
from aiodist_kernels import ReduceOp
from aiodist_kernels.numpy_tier import finished, quietly
from aiodist_kernels.pool import results as pool
from aiodist_kernels.rules import Finish, Rule

Array = np.ndarray[Any, Any]
DType: TypeAlias = np.dtype[Any]

_BLOCK: Final = 256 * 1024


@dataclass(frozen=True, eq=False)
class Members:
    """Who takes part."""

    rank: int  # this worker's place among those that have replicas in it
    ids: tuple[tuple[int, ...], ...]  # by rank, the positions of a worker's replicas among all, ascending

    @property
    def own(self) -> tuple[int, ...]:
        """The positions of this worker's replicas."""
        return self.ids[self.rank]

    @cached_property
    def replicas(self) -> int:
        """How many replicas there are."""
        return sum(map(len, self.ids))


@lru_cache(maxsize=64)  # workers in one process, of which there may be thousands, share it
def _one_each(workers: int) -> tuple[int, ...]:
    return (1,) * workers


class Reduction:
    """Rows to be reduced over the workers: leaves of one accumulator, one behind the other.

    Args:
        op: the reduce op.
        rules: by leaf, how it is reduced.
        shapes: by leaf.
        members: who takes part.
        ordered: the bits are the same however replicas are laid out over workers.

    Attributes:
        op: SUM, PRODUCT, MIN or MAX.
        dtype: the accumulator.
        size: how many elements a row has.
        sizes: by leaf, how many elements it has.
        rows: by rank, how many rows a worker contributes.
        own_rows: for each of this worker's, which of its replicas it is folded of, and how.
        engine_may_reduce: the order in which rows become one does not matter.
        cost: about how many bytes could be moved in the time that it takes to fold this worker's rows.
    """

    def __init__(
        self,
        op: ReduceOp,
        rules: Sequence[Rule],
        shapes: Sequence[Sequence[int]],
        members: Members,
        *,
        ordered: bool = False,
    ) -> None:
        self.op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self.rules, self.shapes, self.replicas = rules, shapes, members.replicas
        self.dtype = rules[0].accumulator
        self.sizes = [math.prod(shape) for shape in shapes]
        self.size = sum(self.sizes)
        self.cost = sum(
            kernels.cost(self.op, rule.dtype, size, len(members.own))
            for rule, size in zip(rules, self.sizes, strict=True)
        )
        self.engine_may_reduce = not ordered
        self.finishes = any(rule.finish is not Finish.NOTHING for rule in rules)
        self.in_accumulator = all(rule.result == self.dtype for rule in rules)  # so totals are results as they are
        self._forest = forest_of(members.ids) if ordered else None
        self.rows: Sequence[int] = _one_each(len(members.ids))
        self.own_rows: Sequence[tuple[slice, Tree | None]] = [(slice(None), None)]
        if self._forest is not None:
            self.rows, self.own_rows = self._forest.rows, self._forest.parts(members.rank)

    def combine(self, rows: Sequence[Array]) -> Array:
        """Return one row of all workers', by rank; it lies in one of them."""
        if self._forest is not None:
            return self._forest.combine(self.op, rows)
        return kernels.reduce(self.op, rows, out=rows[0]) if len(rows) > 1 else rows[0]

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what a range has of each leaf: the leaf, the range in it, and where that lies in the range."""
        at = 0
        for leaf, size in enumerate(self.sizes):
            low, high = max(begin - at, 0), min(end - at, size)
            if low < high:
                yield leaf, low, high, at + low - begin
            at += size


class Rows:
    """What this worker contributes to a reduction, and the results.

    Args:
        reduction: what is reduced.
        arrays: by leaf, the local replicas' arrays in their order; or one fold of them, in the accumulator.

    Attributes:
        whole: all of this worker's row, as it lies in memory; None where something has to be made of it.
    """

    def __init__(self, reduction: Reduction, arrays: Sequence[Sequence[Array]]) -> None:
        self.reduction = reduction
        self._flat = [[array.reshape(-1) for array in of_leaf] for of_leaf in arrays]  # in C's order: else a copy
        self._total: Array | None = None
        if reduction.in_accumulator:
            self._total = pool.empty((reduction.size,), reduction.dtype)
            self._results = [self._total]
            if len(reduction.sizes) > 1:
                ends = running_sums(reduction.sizes)
                self._results = [self._total[end - size : end] for end, size in zip(ends, reduction.sizes, strict=True)]
        else:
            sizes = zip(reduction.sizes, reduction.rules, strict=True)
            self._results = [pool.empty((size,), rule.result) for size, rule in sizes]
        self._shaped = list(map(np.ndarray.reshape, self._results, reduction.shapes))
        self.whole: Array | None = None
        self.whole = self.own(0, reduction.size) if len(arrays) == 1 and reduction.size else None

    def own(self, begin: int, end: int) -> Array | None:
        """Return a range of this worker's row as it lies in memory; None where something has to be made of it."""
        if self.whole is not None:
            return self.whole[begin:end]
        if len(self.reduction.own_rows) > 1:
            return None
        leaf, low, high = 0, begin, end
        if len(self._flat) > 1:
            leaf, low, high, _ = next(self.reduction.ranges(begin, end))
        arrays = self._flat[leaf]
        if len(arrays) > 1 or high - low < end - begin or arrays[0].dtype != self.reduction.dtype:
            return None
        found = arrays[0][low:high]
        if not (found.flags.c_contiguous and found.flags.aligned):
            return None
        return found.view(self.reduction.dtype)  # an engine may know only one of equal dtypes of several names

    def fold(self, begin: int, end: int, out: Array) -> None:
        """Fold a range of this worker's rows, one behind the other."""
        reduction = self.reduction
        size, step = end - begin, _BLOCK // reduction.dtype.itemsize  # a cache holds what is folded at a time
        for number, (places, tree) in enumerate(reduction.own_rows):
            row = out[number * size : (number + 1) * size]
            for leaf, low, high, at in reduction.ranges(begin, end):
                arrays = self._flat[leaf][places]
                for a in range(low, high, step):
                    b = min(a + step, high)
                    self._fold([array[a:b] for array in arrays], tree, row[at + a - low : at + b - low])

    def _fold(self, arrays: Sequence[Array], tree: Tree | None, out: Array) -> None:
        if len(arrays) == 1:
            np.copyto(out, arrays[0])
            return
        parts = [array.astype(self.reduction.dtype, copy=False) for array in arrays]
        if tree is None:
            kernels.reduce(self.reduction.op, parts, out=out)
        else:
            fold_into(tree, self.reduction.op, parts, out)

    def room(self, begin: int, end: int) -> Array | None:
        """Return where the total of a range may lie for its result to lie there, too; None where it cannot."""
        return None if self._total is None else self._total[begin:end]

    def finish(self, begin: int, end: int, total: Array) -> None:
        """Make a range of the results of its total, which is spoilt."""
        reduction = self.reduction
        if self._total is not None and not reduction.finishes and np.may_share_memory(total, self._total):
            return
        for leaf, low, high, at in reduction.ranges(begin, end):
            row, out = total[at : at + high - low], self._results[leaf][low:high]
            result = quietly(finished, reduction.rules[leaf], row, reduction.replicas)
            if not np.may_share_memory(result, out):
                out[...] = result

    def results(self) -> list[Array]:
        """Return the leaves' results, all ranges of which are finished."""
        return [frozen(array) for array in self._shaped]


class Exchange:
    """Parts of all replicas' arrays, given to the replicas whose results are made of them.

    Args:
        members: who takes part.
        plans: by leaf; each result takes its own part of every input.
        specs: by leaf, shape and dtype of an array.
        columns: by leaf, the arrays of this worker's replicas.

    Attributes:
        send_counts, receive_counts: by rank, how many bytes are for that worker, and come from it.
        most: how many any worker has for any other, at most.
    """

    def __init__(
        self,
        members: Members,
        plans: Sequence[LeafPlan],
        specs: Sequence[tuple[Sequence[int], DType]],
        columns: Sequence[Sequence[Array]],
    ) -> None:
        self._members, self._plans, self._columns = members, plans, columns
        self._pieces: list[tuple[Sequence[int], DType, int]] = []
        for plan, (shape, dtype) in zip(plans, specs, strict=True):
            axis, _, count = plan.cut(0)
            piece, native = (*shape[:axis], shape[axis] // count, *shape[axis + 1 :]), dtype.newbyteorder("=")
            self._pieces.append((piece, native, math.prod(piece) * native.itemsize))
        nbytes, own = sum(size for _, _, size in self._pieces), len(members.own)
        counts = [len(ids) * own * nbytes for ids in members.ids]
        self.send_counts = self.receive_counts = counts
        self.most = nbytes * max(map(len, members.ids)) ** 2

    def data(self) -> Array:
        """Return this worker's bytes by rank: by leaf, by its replica, by our source."""
        of_leaves = list(zip(self._pieces, self._plans, self._columns, strict=True))
        return joined(
            [
                bytes_of(np.asarray(part(np.asarray(array), plan.cut(taker)), dtype))
                for ids in self._members.ids
                for (_, dtype, _), plan, column in of_leaves
                for taker in ids
                for array in column
            ]
        )

    def parts(self, data: Array) -> list[dict[int, list[Array]]]:
        """Return, by leaf, the parts for each local replica, by position, of the bytes of all workers by rank."""
        found: list[dict[int, dict[int, Array]]] = [{taker: {} for taker in self._members.own} for _ in self._pieces]
        at = 0
        for sources in self._members.ids:
            for (shape, dtype, nbytes), of_leaf in zip(self._pieces, found, strict=True):
                for taker in self._members.own:
                    for source in sources:
                        of_leaf[taker][source] = np.ndarray(shape, dtype, data[at : at + nbytes] if nbytes else b"")
                        at += nbytes
        return [{taker: [of[i] for i in sorted(of)] for taker, of in of_leaf.items()} for of_leaf in found]


# Bytes.

_FEW: Final = 1 << 16
"""Bytes that are copied sooner than anybody finds out how they lie."""


def bytes_of(array: Array) -> Array:
    """Return an array's bytes, where they lie if that is in C's order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def joined(pieces: Sequence[Array]) -> Array:
    """Return bytes one behind the other: where they lie, if they lie like that; else a copy."""
    if len(pieces) == 1:
        return pieces[0]
    found = _as_they_lie(pieces)
    return np.concatenate(pieces or [np.empty(0, np.uint8)]) if found is None else found


def together(arrays: Sequence[Array], axis: int) -> Array | None:
    """Return arrays one behind the other along an axis, where they lie; None where they do not lie like that."""
    first = arrays[0]
    if math.prod(first.shape[:axis]) != 1 or any(array.dtype != first.dtype for array in arrays):
        return None
    found = _as_they_lie([array for array in arrays if array.nbytes])
    if found is None:
        return None
    length = sum(array.shape[axis] for array in arrays)
    whole = found.view(first.dtype).reshape((*first.shape[:axis], length, *first.shape[axis + 1 :]))
    return whole if whole.flags.aligned else None


def _as_they_lie(arrays: Sequence[Array]) -> Array | None:
    """Return the bytes of arrays without gaps that lie one behind the other, if they do, and are not just a few."""
    if len(arrays) < 2 or sum([array.nbytes for array in arrays]) < _FEW:
        return None
    base = arrays[0].base
    if not isinstance(base, np.ndarray) or not base.flags.c_contiguous or any(x.base is not base for x in arrays):
        return None
    ends = list(running_sums([array.nbytes for array in arrays], initial=_address(arrays[0])))
    if [_address(array) for array in arrays] != ends[:-1]:
        return None
    return np.ndarray((ends[-1] - ends[0],), np.uint8, base, ends[0] - _address(base))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
