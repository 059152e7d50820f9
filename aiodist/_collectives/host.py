"""The host executor: carries out plans over NumPy arrays, scalars, Python numbers and `IndexedSlices`.

Leaves are never copied into one buffer first, because that costs more than the calls that it saves. Work that would
hold up the event loop is returned as `Work` for worker threads. So is the first reduction for which a compiled kernel
would pay: it waits until the kernel is compiled. NumPy does all other reductions, with the same bits.

A result never shares memory with an input. Its arrays are views of a read-only base, so replicas can share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import Array, HostType, copied, frozen
from aiodist._arrays.leaves import LeafMark, LeafType, is_array
from aiodist._arrays.values import IndexedSlices
from aiodist._collectives.kinds import Collective, Cut, LeafPlan, Result
from aiodist._collectives.out import NO_OUTS, Outs
from aiodist._collectives.work import Call, Work, thread_count
from aiodist_kernels import Accumulate, Plan, ReduceOp, plan_for, policy, pool
from aiodist_kernels.numpy_tier import finished, quietly
from aiodist_kernels.rules import rule_for

Column = Sequence[Any]  # one leaf of every replica that takes part, in replica order

COST_FROM: Final = 256 * 1024
"""Bytes contributed by all replicas from which a collective may hold up the event loop, so its cost is computed."""


# One leaf.


def fold(op: ReduceOp, column: Column, mark: LeafMark, accumulate: Accumulate = "native") -> Any:
    """Return the left fold of leaves, of their own type; arrays of other frameworks become NumPy arrays."""
    dtype, shape = (None, ()) if mark == LeafType.PYTHON_NUMBER else (column[0].dtype, column[0].shape)
    return _folding(op, dtype, shape, len(column), mark, accumulate)(column)


def _folding(
    op: ReduceOp, dtype: Any, shape: Any, count: int, mark: LeafMark, accumulate: Accumulate, among: bool = False
) -> Callable[[Column], Any]:
    """Return a function that folds that many leaves, for repeated use; see `fold`."""
    if mark == LeafType.PYTHON_NUMBER:
        return partial(kernels.reduce_numbers, op)
    if mark == LeafType.INDEXED_SLICES:
        return lambda slices: quietly(fold_slices, op, slices, accumulate)
    reduce = kernels.reduction(op, dtype, shape, count, accumulate, among)
    return reduce if is_array(mark) else lambda scalars: reduce(scalars)[()]


def fold_slices(op: ReduceOp, column: Sequence[IndexedSlices], accumulate: Accumulate = "native") -> IndexedSlices:
    """Return the sum of the replicas' rows by index, read-only; for MEAN divided by the number of replicas.

    Rows are added in replica order, and in their own order within a replica: a left fold in the accumulator of a dense
    reduction of the dtype. Rows are never made dense.
    """
    rule = rule_for(op, column[0].dtype, accumulate)
    rows = np.concatenate([np.asarray(part.values, rule.accumulator) for part in column])
    indices, first, place = np.unique(
        np.concatenate([part.indices for part in column]), return_index=True, return_inverse=True
    )
    total = rows[first]
    further = np.ones(len(rows), bool)
    further[first] = False
    np.add.at(total, place[further], rows[further])
    total = finished(rule, total, len(column))
    return IndexedSlices(frozen(total), frozen(indices), column[0].dense_shape)


def assembled(result: Result, arrays: Sequence[Any] | Mapping[int, Any], inputs: int) -> Any:
    """Return a result in memory of its own, made from inputs followed by totals that nothing else uses."""
    parts = [arrays[source] for source in result.sources]
    if result.cut is not None:
        parts = [part(array, result.cut) for array in parts]
    if len(parts) > 1:
        assert result.axis is not None
        return concatenated(parts, result.axis)
    return parts[0] if result.sources[0] >= inputs else copied(parts[0])


def part(array: Array, cut: Cut) -> Array:
    """Return one of the equal parts of an array, a view."""
    return array[(*(slice(None),) * cut.axis, slice(*cut.bounds(array.shape[cut.axis])))]


def concatenated(arrays: Sequence[Array], axis: int) -> Array:
    """Return arrays concatenated along an axis, in native byte order; strings get the widest width."""
    dtypes = [array.dtype for array in arrays]
    native = dtypes[0]
    if not native.isnative or dtypes.count(native) < len(dtypes):
        native = np.result_type(*dtypes) if native.kind in "US" else native.newbyteorder("=")
        arrays = [array.astype(native, copy=False) for array in arrays]
    if sum([array.nbytes for array in arrays]) < pool.POOLED_FROM:
        return np.concatenate(arrays, axis)
    shape = list(arrays[0].shape)
    shape[axis] = sum([array.shape[axis] for array in arrays])
    return np.concatenate(arrays, axis, out=pool.results.empty(shape, native))


def in_framework(mark: LeafMark, result: Any, count: int, *, shared: bool) -> Sequence[Any]:
    """Return a leaf's result, one for all or a list with one for each replica, in its own framework."""
    if isinstance(mark, HostType):
        return mark.give_each(result, count) if shared else list(map(mark.give, result))
    return [result] * count if shared else result


class _Leaf:
    """The plan for one leaf of a collective, and its cost."""

    def __init__(self, collective: Collective, index: int, plan: LeafPlan, accumulate: Accumulate) -> None:
        spec, op = collective.spec, collective.op
        assert spec is not None
        self.plan, self.mark = plan, spec.marks[index]
        self.accumulate: Accumulate = accumulate
        self.shared, self.is_array = collective.kind.shared, is_array(self.mark)
        self.whole = plan.is_one_fold and plan.results == (Result((plan.size,)),)
        self._dtype, shape = spec.dtypes[index], spec.shapes[index]
        self.nbytes = 0.0  # of one input; infinity if inputs may differ
        if self.mark == LeafType.INDEXED_SLICES or None in shape:
            self.nbytes = math.inf
        elif self.mark != LeafType.PYTHON_NUMBER:
            self.nbytes = self._dtype.itemsize * math.prod([size or 0 for size in shape])
        if op is ReduceOp.MEAN and plan.size == 1 and getattr(self._dtype, "kind", "") in ("f", "c"):
            op = ReduceOp.SUM  # the same result, at a lower cost
        self.op = op
        self.folds: list[Callable[[Column], Any]] = []
        if op is not None:
            among = not spec.single
            self.folds = [_folding(op, self._dtype, shape, len(f), self.mark, accumulate, among) for f in plan.folds]
        self.compute: Callable[[Column], Any] = lambda column: self.results(column, self._totals(column))
        if self.shared and self.whole and not isinstance(self.mark, HostType):  # the commonest, in the fewest calls
            total_of = self.folds[0]
            self.compute = (lambda column: frozen(total_of(column))) if self.is_array else total_of

    def due(self) -> Plan | None:
        """Return the plan whose kernel must be compiled before the fold; None if there is none."""
        if self.op is None or not self.is_array:
            return None
        plan = plan_for(self.op, self._dtype, self.plan.size, self.accumulate)
        return plan if plan.is_due(int(self.nbytes)) else None

    def cost(self, column: Column) -> int:
        """Return the cost, as the number of bytes that could be moved in the same time."""
        if self.mark == LeafType.INDEXED_SLICES:
            return policy.SLOWNESS_BY_ROWS * sum([int(part.values.nbytes) for part in column])
        if not self.is_array:
            return 0
        moved = [column[i] for i in self.plan.results[0].sources if i < self.plan.size]  # other results' are as many
        cost: int = 2 * sum([array.nbytes for array in moved])
        for inputs in self.plan.folds:
            assert self.op is not None
            cost += plan_for(self.op, column[0].dtype, len(inputs), self.accumulate).cost(column[0].size)
        return cost

    def _totals(self, column: Column) -> list[Any]:
        if self.whole:
            return [self.folds[0](column)]
        pairs = zip(self.folds, self.plan.folds, strict=True)
        return [fold([column[i] for i in inputs]) for fold, inputs in pairs]

    def calls(self, column: Column, totals: list[Any]) -> list[Call]:
        """Return the calls that fold a column into ``totals``, with large arrays in pieces."""
        cost, folds = self.cost(column), self.plan.folds
        if cost < policy.LEAST_MOVED_BY_A_THREAD or not self.is_array:
            return [lambda: totals.extend(self._totals(column))]
        calls: list[Call] = []
        for inputs in folds:
            assert self.op is not None
            arrays, parts = [column[i] for i in inputs], policy.parts(cost // len(folds), thread_count())
            pieces = kernels.cut(self.op, arrays, accumulate=self.accumulate, parts=parts)
            totals.append(pieces.result)
            calls += pieces.calls
        return calls

    def results(self, column: Column, totals: Sequence[Any]) -> Any:
        """Return the results made from inputs and totals: one for all replicas, or a list with one for each."""
        if not self.whole:
            arrays = [*column, *totals]
            totals = [assembled(result, arrays, len(column)) for result in self.plan.results]
        if not isinstance(self.mark, HostType):  # another framework takes over writeable memory
            totals = [frozen(total) if isinstance(total, np.ndarray) else total for total in totals]
        return totals[0] if self.shared else totals


# A collective.


class HostExecutor:
    """Carries out the plan of one collective, any number of times; see `execution.executor` for the arguments."""

    def __init__(
        self, collective: Collective, size: int, absent: Sequence[int] = (), accumulate: Accumulate = "native"
    ) -> None:
        kind, spec = collective.kind, collective.spec
        self._size = size
        self._positions = sorted({*range(size)}.difference(absent))
        self._one_result = kind.shared  # perhaps copied for each replica
        self._single = spec is not None and spec.single
        plans = enumerate(collective.without(absent).plans(len(self._positions)))
        leaves = self._leaves = [_Leaf(collective, place, plan, accumulate) for place, plan in plans]
        # One result serves all; otherwise there is a list of results by position.
        self.shared = kind.shared and not any(isinstance(leaf.mark, HostType) for leaf in leaves)
        self._is_small = sum([leaf.nbytes for leaf in leaves]) * len(self._positions) < COST_FROM
        self._varies = any(leaf.nbytes == math.inf for leaf in leaves)
        self._cost: int | None = None  # once it is known, if it is the same each time
        self._due: list[Plan] = []  # plans whose kernels must be compiled first
        if not self._is_small:
            self._due = list(dict.fromkeys(plan for leaf in leaves if (plan := leaf.due()) is not None))
        self._straight: Callable[[Sequence[Any]], Any] | None = None  # the shortest way to the result
        self.run: Callable[[Sequence[Any]], Any] = self.run_into  # without buffers for the results
        if not leaves:
            nothing: Any = None if spec is None else []
            self.run = lambda _: nothing if self.shared else [list(nothing) for _ in range(size)]
        elif self.shared and not absent and all(leaf.whole for leaf in leaves):
            self._straight = leaves[0].compute if self._single else _tiny_folds(collective, size, accumulate)
            if self._straight is not None and self._is_small:
                self.run = self._straight

    def run_into(self, values: Sequence[Any], outs: Outs = NO_OUTS) -> Any:
        """Carry it out, and return the result, or the `Work` that computes it if it would hold up the event loop.

        Args:
            values: by position, each replica's contribution: a leaf or a list of leaves; anything if it is absent.
            outs: buffers for the results, from `out.checked`.

        Returns:
            A leaf or a list of leaves for all; or, unless ``shared``, a list of these by position, with None for
            positions that are absent or passed buffers.
        """
        if len(self._positions) < self._size:
            values = [values[position] for position in self._positions]
        if not self._is_small and self._blocks(values):
            return self._work(values, outs)
        if self._straight is not None and not outs:
            return self._straight(values)
        by_leaf = [leaf.compute(column) for leaf, column in zip(self._leaves, self._columns(values), strict=True)]
        for call in self._copies(by_leaf, outs) if outs else ():
            call()
        return self.handed_out(by_leaf, outs)

    def _columns(self, values: Sequence[Any]) -> Sequence[Column]:
        return [values] if self._single else list(zip(*values, strict=True))

    def _blocks(self, values: Sequence[Any]) -> bool:
        """Return whether it would hold up the event loop."""
        cost = self._cost  # cached, because computing it takes 20 microseconds
        if cost is None or policy.blocks(cost):
            cost = sum(map(_Leaf.cost, self._leaves, self._columns(values)))
            self._cost = None if self._varies else cost
        if self._due:
            self._due = [plan for plan in self._due if not plan.settled]
        return bool(self._due) or policy.blocks(cost)

    def _work(self, values: Sequence[Any], outs: Outs) -> Work:
        """Return the calls that compute the result, after compiling the kernels that it needs."""
        columns, by_leaf, handed_out = self._columns(values), list[Any](), list[Any]()
        totals: list[list[Any]] = [[] for _ in columns]

        def make() -> None:
            by_leaf.extend(map(_Leaf.results, self._leaves, columns, totals))
            handed_out.append(self.handed_out(by_leaf, outs))

        compiled = [partial(kernels.warm, self._due, required=False)] if self._due else []
        folds = [call for each in map(_Leaf.calls, self._leaves, columns, totals) for call in each]
        return Work([compiled, folds, [make], self._copies(by_leaf, outs)], handed_out.pop)

    def _copies(self, by_leaf: Sequence[Any], outs: Outs) -> list[Call]:
        """Return the calls that copy complete results, by leaf, into the callers' buffers."""

        def copy(buffer: Array, leaf: int, index: int) -> None:
            np.copyto(buffer, by_leaf[leaf] if self._one_result else by_leaf[leaf][index])

        return [
            partial(copy, buffer, leaf, index)
            for index, position in enumerate(self._positions)
            for leaf, buffer in enumerate(outs.get(position, ()))
        ]

    def handed_out(self, by_leaf: Sequence[Any], outs: Outs) -> Any:
        """Return the result in the form of `run_into`, from the results by leaf."""
        if self.shared:
            return by_leaf[0] if self._single else by_leaf
        receivers = [index for index, position in enumerate(self._positions) if position not in outs]
        columns = []
        for leaf, result in zip(self._leaves, by_leaf, strict=True):
            own = result if self._one_result else [result[index] for index in receivers]
            columns.append(in_framework(leaf.mark, own, len(receivers), shared=self._one_result))
        found: list[Any] = [None] * self._size
        for index, *row in zip(receivers, *columns, strict=True):
            found[self._positions[index]] = row[0] if self._single else row
        return found


def _tiny_folds(
    collective: Collective, size: int, accumulate: Accumulate
) -> Callable[[Sequence[Sequence[Any]]], list[Any]] | None:
    """Return a function that reduces nests of tiny arrays; None for other nests."""
    spec, op = collective.spec, collective.op
    if spec is None or op is None or any(spec.marks) or accumulate != "native":
        return None
    shapes: Any = spec.shapes  # all of them are known
    return kernels.nest_reduction(op, spec.dtypes, shapes, size)
