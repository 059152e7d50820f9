"""The host executor: plans carried out over NumPy arrays, scalars, Python numbers and `IndexedSlices`.

Leaves are never put together in one buffer first: copying them costs more than the calls that it saves. What would hold
up the event loop is returned as `Work` for worker threads. So is the first reduction of its sort from which on a
compiled kernel would pay: there it waits until the kernel is compiled. NumPy serves all others, with the same bits.

A result never shares memory with an input, and arrays in it are views of a read-only base: they may be shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, LeafType, Spec, is_array
from aiodist._arrays.values import IndexedSlices
from aiodist._collectives.kinds import Collective, Cut, LeafPlan, Result
from aiodist._collectives.out import Outs
from aiodist._collectives.work import Call, Work, thread_count
from aiodist_kernels import Accumulate, Plan, ReduceOp, plan_for, policy, pool
from aiodist_kernels.numpy_tier import finished, quietly
from aiodist_kernels.pool import empty_like
from aiodist_kernels.rules import rule_for

Array = np.ndarray[Any, Any]
Column = Sequence[Any]
"""One leaf of all replicas that take part, in replica order."""

LOOK_FROM: Final = 256 * 1024
"""Bytes contributed by all replicas below which nothing holds up the event loop: all that is asked of a small value."""

_QUICK: Final = {LeafType.NUMPY_ARRAY, LeafType.NUMPY_SCALAR, LeafType.PYTHON_NUMBER}
"""Marks of leaves whose folds a collective need not look at each time."""


# One leaf.


def fold(op: ReduceOp, column: Column, mark: LeafMark, accumulate: Accumulate = "native", among: bool = False) -> Any:
    """Return a left fold of leaves, in their order, as the type that they have; foreign arrays as NumPy's."""
    if is_array(mark):
        return kernels.reduce(op, column, accumulate=accumulate, among=among)
    if mark == LeafType.PYTHON_NUMBER:
        return kernels.reduce_numbers(op, column)
    if mark == LeafType.INDEXED_SLICES:
        return quietly(fold_slices, op, column, accumulate)
    return kernels.reduce(op, column, accumulate=accumulate)[()]


def fold_slices(op: ReduceOp, column: Sequence[IndexedSlices], accumulate: Accumulate = "native") -> IndexedSlices:
    """Return the replicas' rows added up by index, for MEAN divided by the number of replicas; read-only.

    Rows are added in the order of the replicas, and within a replica in the order in which they stand: a left fold in
    the accumulator that a dense reduction of the dtype has. Nothing dense is ever made of them.
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


def made(result: Result, arrays: Sequence[Any] | Mapping[int, Any], inputs: int) -> Any:
    """Return what a result is made of inputs and, behind them, totals that nobody else sees; in memory of its own."""
    parts = [arrays[source] for source in result.sources]
    if result.cut is not None:
        parts = [part(array, result.cut) for array in parts]
    if len(parts) > 1:
        assert result.axis is not None
        return put_together(parts, result.axis)
    return parts[0] if result.sources[0] >= inputs else copied(parts[0])


def part(array: Array, cut: Cut) -> Array:
    """Return one of the equal parts of an array, a view."""
    step = array.shape[cut.axis] // cut.parts
    where = (slice(None),) * cut.axis
    return array[(*where, slice(cut.place * step, (cut.place + 1) * step))]


def copied(leaf: Any) -> Any:
    """Return a copy of an array, in this machine's byte order; anything else as it is."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    native = leaf.dtype.newbyteorder("=")
    if leaf.nbytes < pool.POOLED_FROM:
        return np.array(leaf, dtype=native, order="K", subok=False)
    copy = empty_like(leaf, native)
    np.copyto(copy, leaf)
    return copy


def put_together(arrays: Sequence[Array], axis: int) -> Array:
    """Return arrays one behind the other along an axis, in this machine's byte order; strings in the widest's width."""
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


def frozen(array: Array) -> Array:
    """Return an array, whose memory nobody else has written about, as a view that flags cannot make writeable."""
    base = array.base
    array.setflags(False)  # type: ignore[call-arg]  # by position: the keyword alone takes as long as the call
    if isinstance(base, np.ndarray):
        base.setflags(False)  # type: ignore[call-arg]
        return array
    return array[...]


def in_native_order(value: Any) -> Any:
    """Return what a replica contributes, a leaf or a list of leaves, with its arrays in this machine's byte order."""
    if isinstance(value, list):
        return [in_native_order(leaf) for leaf in value]
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value


# A collective.


class _Leaf(NamedTuple):
    """One leaf of a collective."""

    plan: LeafPlan  # what becomes of it
    mark: LeafMark  # what it is
    whole: bool  # its one result is a fold of all inputs


def given(mark: LeafMark, results: Sequence[Any], count: int) -> Sequence[Any]:
    """Return a leaf's results, one for all or one for each, for so many replicas: in the framework that it is of."""
    shared = len(results) != count
    if isinstance(mark, HostType):
        return mark.give_each(results[0], count) if shared else [mark.give(result) for result in results]
    return [results[0]] * count if shared else results


def _cheapest(op: ReduceOp, dtypes: Sequence[Any], size: int) -> ReduceOp:
    """Return an op that gives the same: the mean of one value is the value, unless it is one of integers."""
    floats = all(isinstance(dtype, np.dtype) and dtype.kind in "fc" for dtype in dtypes)
    return ReduceOp.SUM if size == 1 and op is ReduceOp.MEAN and floats else op


class HostExecutor:
    """Carries out one collective's plan, again and again.

    Args:
        collective: what is asked for.
        size: how many positions there are.
        absent: those that take part with nothing.
        accumulate: as in `aiodist_kernels.reduce`.

    Attributes:
        shared: one result serves all; else there is a list of results by position, with None for those that are absent
            or passed buffers.
        run: carries it out; see `HostExecutor.general`.
    """

    def __init__(
        self,
        collective: Collective,
        size: int,
        absent: Sequence[int] = (),
        accumulate: Accumulate = "native",
    ) -> None:
        kind, spec = collective.kind, collective.spec
        self.size = size
        self.positions = [position for position in range(size) if position not in absent]
        self.op = collective.op
        self.accumulate: Accumulate = accumulate
        self.single = spec is not None and spec.single
        plans = collective.without(absent).plans(len(self.positions))
        marks = spec.marks if spec is not None else ()
        whole = [plan.is_one_fold and plan.results == (Result((plan.size,)),) for plan in plans]
        self.leaves = list(map(_Leaf, plans, marks, whole))
        self.of_each = not kind.shared
        self.shared = kind.shared and not any(isinstance(mark, HostType) for mark in marks)
        self.folds_alone = self.shared and all(whole)
        self.run: Callable[..., Any] = self.general
        self._quick: Callable[..., Any] | None = None
        self._waits = self.op is not None  # for kernels to be compiled, perhaps
        self._cost: int | None = None  # of folds of arrays and numbers, once nothing has to be compiled for them
        self._is_small = spec is not None and _nbytes(spec) * len(self.positions) < LOOK_FROM
        if not self.leaves:
            nothing: Any = None if spec is None else []
            self.run = lambda *_: nothing if self.shared else [list(nothing) for _ in range(size)]
        elif self.folds_alone and not absent and _QUICK.issuperset(marks):
            self._quick = self._quick_way(collective)
            self.run = self._quick if self._is_small else self._quick_or_not
        elif self.shared and not absent and self.op is None and set(marks) == {LeafType.NUMPY_ARRAY}:
            self.run = self._copied

    def _quick_way(self, collective: Collective) -> Callable[..., Any]:
        """Return the way of folds of arrays and numbers, the commonest: straight to the kernels."""
        general, op, spec = self.general, collective.op, collective.spec
        assert op is not None
        assert spec is not None
        shapes: Any = spec.shapes  # all of them are known
        arrays_alone = not any(spec.marks)
        op = _cheapest(op, spec.dtypes, self.size)
        if self.single and arrays_alone:
            reduce = kernels.reduction(op, spec.dtypes[0], shapes[0], self.size, self.accumulate)

            def run(values: Sequence[Any], outs: Outs | None = None) -> Any:
                if outs is not None:
                    return general(values, outs)
                total = reduce(values)
                if total.base is not None:
                    return frozen(total)
                total.setflags(False)  # type: ignore[call-arg]  # what `frozen` does, without a call
                return total[...]

            return run
        tiny = None
        if arrays_alone and self.accumulate == "native":
            tiny = kernels.nest_reduction(op, spec.dtypes, shapes, self.size)
        each = [self._reduction(op, *fields) for fields in zip(shapes, spec.dtypes, spec.marks, strict=True)]

        def run_nest(values: Sequence[Any], outs: Outs | None = None) -> Any:
            if outs is not None:
                return general(values, outs)
            if tiny is not None:
                totals = tiny(values)
                for total in totals:
                    total.setflags(False)  # type: ignore[call-arg]
                return [total[...] for total in totals]
            columns = [values] if self.single else zip(*values, strict=True)
            leaves = [reduce(column) for reduce, column in zip(each, columns, strict=True)]
            return leaves[0] if self.single else leaves

        return run_nest

    def _reduction(self, op: ReduceOp, shape: Any, dtype: Any, mark: LeafMark) -> Callable[[Any], Any]:
        """Return what reduces a leaf of a nest, a scalar or a number."""
        if mark == LeafType.PYTHON_NUMBER:
            return partial(kernels.reduce_numbers, op)
        reduce = kernels.reduction(op, dtype, shape, self.size, self.accumulate, not self.single)
        if mark == LeafType.NUMPY_SCALAR:
            return lambda scalars: reduce(scalars)[()]
        return lambda arrays: frozen(reduce(arrays))

    def _quick_or_not(self, values: Sequence[Any], outs: Outs | None = None) -> Any:
        """Carry out what costs as much as the last time: to look at it all again would take 20 microseconds."""
        if self._quick is None or self._cost is None or policy.blocks(self._cost):
            return self.general(values, outs)
        return self._quick(values, outs)

    def _copied(self, values: Sequence[Any], outs: Outs | None = None) -> Any:
        """Carry out an all_gather or a broadcast of arrays."""
        columns = [values] if self.single else list(zip(*values, strict=True))
        if sum([array.nbytes for column in columns for array in column]) >= LOOK_FROM:
            return self.general(values, outs)
        pairs = zip(self.leaves, columns, strict=True)
        leaves = [frozen(made(leaf.plan.results[0], column, self.size)) for leaf, column in pairs]
        return leaves[0] if self.single else leaves

    def general(self, values: Sequence[Any], outs: Outs | None = None) -> Any:
        """Carry it out.

        Args:
            values: by position, what each replica contributes: a leaf, or a list of leaves; anything for who is absent.
            outs: buffers that the results are wanted in, from `out.checked`.

        Returns:
            The result: a leaf or a list of leaves for all; or by position, see ``shared``. Or the `Work` that it is.
        """
        if len(self.positions) < self.size:
            values = [values[position] for position in self.positions]
        columns: list[Column] = [values] if self.single else list(zip(*values, strict=True))
        run = _Run(self, columns, outs or {})
        if self._is_small:
            return run.now()
        due, cost = self._due(columns), sum(map(self.cost, self.leaves, columns))
        if due or policy.blocks(cost):
            return run.work(due)
        self._cost = cost
        return run.now()

    def _due(self, columns: Sequence[Column]) -> list[Plan]:
        """Return the kernels that these folds wait for: each is compiled once in the process, at its first need."""
        if self.op is None or not self._waits:
            return []
        plans = [
            (plan_for(self.op, column[0].dtype, len(column), self.accumulate), column[0].nbytes)
            for leaf, column in zip(self.leaves, columns, strict=True)
            if is_array(leaf.mark)
        ]
        due = dict.fromkeys(plan for plan, nbytes in plans if plan.is_due(nbytes))
        self._waits = bool(due)
        return list(due)

    def cost(self, leaf: _Leaf, column: Column) -> int:
        """Return about how many bytes could be moved in the time that a leaf takes."""
        if leaf.mark == LeafType.INDEXED_SLICES:
            return policy.SLOWNESS_BY_ROWS * sum([int(part.values.nbytes) for part in column])
        if not is_array(leaf.mark):
            return 0
        moved = [i for i in leaf.plan.results[0].sources if i < leaf.plan.size]  # other results' move as much
        cost = 2 * sum([int(column[source].nbytes) for source in moved])
        for inputs in leaf.plan.folds:
            assert self.op is not None
            cost += plan_for(self.op, column[0].dtype, len(inputs), self.accumulate).cost(column[0].size)
        return cost

    def handed_out(self, by_leaf: Sequence[Sequence[Any]], outs: Outs) -> Any:
        """Return results by leaf as ``shared`` says."""
        if self.shared:
            leaves = [results[0] for results in by_leaf]
            return leaves[0] if self.single else leaves
        places = [place for place, position in enumerate(self.positions) if position not in outs]
        columns = []
        for leaf, results in zip(self.leaves, by_leaf, strict=True):
            own = [results[place] for place in places] if self.of_each else results
            columns.append(given(leaf.mark, own, len(places)))
        found: list[Any] = [None] * self.size
        rows: Iterable[Sequence[Any]] = zip(*columns, strict=True) if columns else [[]] * len(places)
        for place, row in zip(places, rows, strict=True):
            found[self.positions[place]] = row[0] if self.single else list(row)
        return found


def _nbytes(spec: Spec) -> float:
    """Return the bytes of one replica's leaves; infinity where they may differ between replicas."""
    total = 0.0
    for shape, dtype, mark in zip(*spec[:3], strict=True):
        if mark == LeafType.INDEXED_SLICES or None in shape:
            return math.inf
        if mark != LeafType.PYTHON_NUMBER:
            total += dtype.itemsize * math.prod([size or 0 for size in shape])
    return total


class _Run:
    """One collective under way: its columns of inputs by leaf, and the buffers by position that results go into."""

    def __init__(self, executor: HostExecutor, columns: Sequence[Column], outs: Outs) -> None:
        self._executor, self._columns, self._outs = executor, columns, outs
        self._totals: list[list[Any]] = [[None] * len(leaf.plan.folds) for leaf in executor.leaves]
        self._results: list[list[Any]] = []
        self._handed_out: Any = None

    def now(self) -> Any:
        """Return the result, made in this thread."""
        for place in range(len(self._columns)):
            self._fold(place)
        self._make()
        for call in self._copies():
            call()
        return self._handed_out

    def work(self, due: Sequence[Plan]) -> Work:
        """Return the calls that make the result, once the kernels that are due have been compiled."""
        phases: list[Sequence[Call]] = [[partial(kernels.warm_if_possible, due)]] if due else []
        phases.append(self._folds())
        if self._executor.folds_alone and not self._outs:
            return Work(phases, self._make)
        return Work([*phases, [self._make], self._copies()], lambda: self._handed_out)

    def _fold(self, place: int) -> None:
        executor, column, leaf = self._executor, self._columns[place], self._executor.leaves[place]
        for number, inputs in enumerate(leaf.plan.folds):
            assert executor.op is not None
            of = column if leaf.whole else [column[i] for i in inputs]
            self._totals[place][number] = fold(executor.op, of, leaf.mark, executor.accumulate, len(self._columns) > 1)

    def _folds(self) -> list[Call]:
        """Return the calls that fold: large leaves in pieces."""
        executor = self._executor
        calls: list[Call] = []
        for place, (leaf, column) in enumerate(zip(executor.leaves, self._columns, strict=True)):
            cost, folds = executor.cost(leaf, column), leaf.plan.folds
            if cost < policy.LEAST_MOVED_BY_A_THREAD or not is_array(leaf.mark):
                calls.append(partial(self._fold, place))
                continue
            for number, inputs in enumerate(folds):
                assert executor.op is not None
                pieces = kernels.cut(
                    executor.op,
                    [column[i] for i in inputs],
                    accumulate=executor.accumulate,
                    parts=policy.parts(cost // len(folds), thread_count()),
                )
                self._totals[place][number] = pieces.result
                calls += pieces.calls
        return calls

    def _make(self) -> Any:
        """Make the results of inputs and folds; return them as they are handed out."""
        self._results = [self._results_of(place) for place in range(len(self._columns))]
        self._handed_out = self._executor.handed_out(self._results, self._outs)
        return self._handed_out

    def _results_of(self, place: int) -> list[Any]:
        leaf, column, totals = self._executor.leaves[place], self._columns[place], self._totals[place]
        if not leaf.whole:
            arrays = [*column, *totals]
            totals = [made(result, arrays, len(column)) for result in leaf.plan.results]
        if isinstance(leaf.mark, HostType):  # a framework takes over memory that it can write to
            return totals
        return [frozen(total) if isinstance(total, np.ndarray) else total for total in totals]

    def _copies(self) -> list[Call]:
        """Return what copies results into the buffers that are wanted, once they are there."""
        return [
            partial(self._copy, buffer, leaf, place)
            for place, position in enumerate(self._executor.positions)
            for leaf, buffer in enumerate(self._outs.get(position, ()))
        ]

    def _copy(self, buffer: Array, leaf: int, place: int) -> None:
        np.copyto(buffer, self._results[leaf][place if self._executor.of_each else 0])
