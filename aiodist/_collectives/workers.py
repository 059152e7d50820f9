"""Plans over workers: what each worker contributes to a collective, and what its replicas get.

    values ── begin ──▶ rows, parts, values to gather ── exchanged ──▶ result

A leaf's plan determines what is exchanged:

- If all results come from one fold of all inputs, it is a **reduction**: each worker contributes one row, the left fold
  of its replicas' values in the accumulator's dtype. All workers' rows are folded into one, which is scaled and rounded
  at the end. This is done range by range, so that no large value is folded or rounded in one go.
- If results take a part of each input (all_to_all), it is an **exchange**: each worker sends every other one the parts
  that it needs.
- Otherwise, each worker sends all others the inputs that results are made from, and computes the results as one machine
  would. Python numbers and `IndexedSlices` are always handled in this way.

So the bits are those of one machine if each worker has one replica and rows are folded by rank. With ``ordered``, each
worker contributes a row per replica, and the rows are folded in the order of all replicas: then the bits are those of
one machine for every layout. A plan reads no values and is the same on every worker, so their transfers match.
Reductions are sent from where the values are, and the result of an all_gather stays where it was received, if possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.device import DeviceType
from aiodist._arrays.host import Array, HostType, frozen, in_native_order
from aiodist._arrays.leaves import LeafType
from aiodist._collectives import host
from aiodist._collectives.host import HostExecutor, part
from aiodist._collectives.kinds import ALL_GATHER, ALL_TO_ALL, Collective, Result
from aiodist_kernels import Accumulate, ReduceOp, plan_for
from aiodist_kernels.numpy_tier import finished, quietly
from aiodist_kernels.pool import results as pool
from aiodist_kernels.rules import DType, Finish, Rule, rule_for


@dataclass(frozen=True, eq=False)
class Members:
    """The replicas that take part."""

    rank: int  # this worker's, among the workers with replicas that take part
    ids: tuple[tuple[int, ...], ...]  # by rank, the positions of a worker's replicas among all, ascending

    @property
    def own(self) -> tuple[int, ...]:
        """The positions of this worker's replicas."""
        return self.ids[self.rank]

    @cached_property
    def replicas(self) -> int:
        """The number of replicas."""
        return sum(map(len, self.ids))


# Reductions.


class Reduction:
    """Rows to reduce over the workers: consecutive leaves with the same accumulator and the same result dtype."""

    def __init__(
        self, op: ReduceOp, rules: Sequence[Rule], shapes: Sequence[Any], members: Members, *, ordered: bool = False
    ) -> None:
        self.op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self.rule = rules[0]  # the others differ at most in the dtype of the inputs
        self.dtype = self.rule.accumulator
        self.finishes = self.rule.finish is not Finish.NOTHING or self.rule.result != self.dtype
        self.shapes, self.sizes = shapes, list(map(math.prod, shapes))
        self.size = sum(self.sizes)  # elements in a row
        plans = [plan_for(self.op, rule.dtype, len(members.own), "native") for rule in rules]
        # About how many bytes could be moved in the time that it takes to fold this worker's rows.
        self.cost = sum(plan.cost(size) for plan, size in zip(plans, self.sizes, strict=True))
        self.replicas, self._ids = members.replicas, members.ids
        self.ordered = ordered  # one row per replica, folded in replica order; else one per worker, in any order
        self.own_rows = self.rows_of(members.rank)
        self.order: Sequence[int] = range(len(members.ids))  # in which rows, by rank, are folded
        if ordered:
            positions = list(chain(*members.ids))
            self.order = sorted(range(len(positions)), key=positions.__getitem__)

    def rows_of(self, rank: int) -> int:
        """Return the number of rows that a worker contributes."""
        return len(self._ids[rank]) if self.ordered else 1

    def combine(self, rows: Sequence[Array]) -> Array:
        """Fold all workers' rows, by rank, into the memory of one of them."""
        in_order = [rows[index] for index in self.order]
        return kernels.reduce(self.op, in_order, out=in_order[0]) if len(rows) > 1 else rows[0]

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each leaf's share of a range: the leaf, a range of its elements, and where that begins in the range."""
        at = 0
        for leaf, size in enumerate(self.sizes):
            low, high = max(begin - at, 0), min(end - at, size)
            if low < high:
                yield leaf, low, high, at + low - begin
            at += size


class Rows:
    """This worker's part of a reduction: by leaf, the local replicas' arrays in order, and the results."""

    def __init__(self, reduction: Reduction, arrays: Sequence[Sequence[Array]]) -> None:
        # Whatever can be made before the workers have agreed is made here, while their records travel.
        self.reduction = reduction
        self._flat = [[array.reshape(-1) for array in of_leaf] for of_leaf in arrays]  # copied unless in C order
        self._whole: Array | None = None
        if len(arrays) == 1:
            self._shaped = [pool.empty(reduction.shapes[0], reduction.rule.result)]
            self._results = self._shaped[0].reshape(-1)
            self._whole = self.own(0, reduction.size)
            return
        self._results = pool.empty((reduction.size,), reduction.rule.result)
        self._shaped, end = [], 0
        for size, shape in zip(reduction.sizes, reduction.shapes, strict=True):
            begin, end = end, end + size
            self._shaped.append(self._results[begin:end].reshape(shape))

    def own(self, begin: int, end: int) -> Array | None:
        """Return a range of this worker's row without a copy; None if it must be computed."""
        if self._whole is not None:
            return self._whole if end - begin == self.reduction.size else self._whole[begin:end]
        leaf, low, high = 0, begin, end
        if len(self._flat) > 1:
            leaf, low, high, _ = next(self.reduction.ranges(begin, end))
        arrays, dtype = self._flat[leaf], self.reduction.dtype
        if len(arrays) > 1 or high - low < end - begin or arrays[0].dtype != dtype:
            return None
        found = arrays[0] if high - low == arrays[0].size else arrays[0][low:high]
        if not found.flags.carray and not (found.flags.c_contiguous and found.flags.aligned):
            return None
        return found if found.dtype is dtype else found.view(dtype)  # an engine may know an equal one by one name only

    def fold(self, begin: int, end: int, out: Array) -> None:
        """Compute a range of this worker's rows, one after the other."""
        reduction, rows = self.reduction, out.reshape(self.reduction.own_rows, end - begin)
        for leaf, low, high, at in reduction.ranges(begin, end):
            targets = rows[:, at : at + high - low]
            arrays = [array[low:high] for array in self._flat[leaf]]
            if reduction.ordered or len(arrays) == 1:
                for row, array in zip(targets, arrays, strict=True):
                    np.copyto(row, array)
            else:
                wide = [array.astype(reduction.dtype, copy=False) for array in arrays]
                kernels.reduce(reduction.op, wide, out=targets[0])

    def room(self, begin: int, end: int) -> Array:
        """Return memory for the total of a range: that of its result if possible."""
        if self.reduction.rule.result == self.reduction.dtype:
            return self._results if end - begin == self.reduction.size else self._results[begin:end]
        return pool.empty((end - begin,), self.reduction.dtype)

    def finish(self, begin: int, end: int, total: Array) -> None:
        """Compute a range of the results from its total, which is overwritten."""
        if self.reduction.finishes:
            total = quietly(finished, self.reduction.rule, total, self.reduction.replicas)
            if not np.may_share_memory(total, self._results):
                self._results[begin:end] = total

    def results(self) -> list[Array]:
        """Return the leaves' results, when all ranges are finished."""
        return list(map(frozen, self._shaped))


# A collective.


class WorkerPlan:
    """What workers exchange for a collective, and how the results are made from it.

    Args:
        collective: a collective with a value, which has been checked.
        members: the replicas that take part.
        accumulate: as in `aiodist_kernels.reduce`.
        ordered: reductions give the same bits for every layout of replicas over workers.
    """

    def __init__(
        self, collective: Collective, members: Members, accumulate: Accumulate = "native", *, ordered: bool = False
    ) -> None:
        spec, op = collective.spec, collective.op
        assert spec is not None
        self.collective, self.members, self.spec = collective, members, spec
        self.accumulate: Accumulate = accumulate
        self.plans = collective.plans(members.replicas)
        # One result serves all local replicas; otherwise there is a list of results by local position.
        self.shared = collective.kind.shared and not any(isinstance(mark, HostType) for mark in spec.marks)
        self.pieces: list[tuple[int, Sequence[int], DType, int]] = []  # exchanged leaves; shape, dtype, bytes of parts
        self.gathered: list[int] = []  # leaves whose values are gathered
        by_dtypes: dict[Any, dict[int, Rule]] = {}
        for index, (plan, mark) in enumerate(zip(self.plans, spec.marks, strict=True)):
            shape: Any = spec.shapes[index]
            if plan.is_one_fold and mark not in (LeafType.INDEXED_SLICES, LeafType.PYTHON_NUMBER):
                assert op is not None
                rule = rule_for(op, spec.dtypes[index], accumulate)
                by_dtypes.setdefault((rule.accumulator, rule.result), {})[index] = rule
            elif collective.kind is ALL_TO_ALL:
                axis, _, count = plan.cut(0)
                shape = (*shape[:axis], shape[axis] // count, *shape[axis + 1 :])
                native = spec.dtypes[index].newbyteorder("=")
                self.pieces.append((index, shape, native, math.prod(shape) * native.itemsize))
            else:
                self.gathered.append(index)
        self._nbytes = sum(nbytes for *_, nbytes in self.pieces)
        self.reductions: list[tuple[Reduction, list[int]]] = []  # with the indices of their leaves
        for rules in by_dtypes.values():
            assert op is not None
            reduction = Reduction(op, list(rules.values()), spec.of(list(rules)).shapes, members, ordered=ordered)
            self.reductions.append((reduction, list(rules)))
        self.sources: Sequence[Sequence[int]] = members.ids  # by rank, the positions whose values are gathered
        needed = self.plans[0].inputs if self.plans else range(members.replicas)
        if len(needed) < members.replicas:
            self.sources = [[position for position in ids if position in needed] for ids in members.ids]
        self._host = HostExecutor(collective, len(members.own))
        self.on_one_machine: HostExecutor | None = None  # computes the results of gathered leaves
        if self.gathered:
            of_gathered = on_host(collective.of(self.gathered))
            self.on_one_machine = HostExecutor(of_gathered, members.replicas, (), accumulate)

    @cached_property
    def counts(self) -> list[int]:
        """By rank, the number of bytes of parts sent to that worker, which sends as many back."""
        own = len(self.members.own) * self._nbytes
        return [len(ids) * own for ids in self.members.ids]

    @cached_property
    def most(self) -> int:
        """The largest number of bytes of parts that any worker has for any other."""
        return self._nbytes * max(map(len, self.members.ids)) ** 2

    def own_results(self, index: int) -> Sequence[Result]:
        """Return the local replicas' results of a leaf; one for all if it is shared."""
        results = self.plans[index].results
        return results if self.collective.kind.shared else [results[i] for i in self.members.own]

    def results_by_replica(self, result: Any) -> Any:
        """Return `Transfer.result` in the form that replicas get, with other frameworks' arrays."""
        if self.shared:
            return result
        if self.collective.kind.shared:
            return self._host.handed_out([result] if self.spec.single else result, {})
        return self._host.handed_out(self.spec.columns(result), {})


class Transfer:
    """One exchange of a collective's values, from the local replicas' contributions on the host, in order."""

    def __init__(self, plan: WorkerPlan, values: Sequence[Any]) -> None:
        self.plan = plan
        self._columns = plan.spec.columns(values)
        self.rows = [
            Rows(reduction, [list(map(np.asarray, self._columns[index])) for index in indices])
            for reduction, indices in plan.reductions
        ]
        self.given: list[list[Any]] = []  # the gathered leaves of the local replicas whose values all workers need
        if plan.gathered:
            columns, own = [self._columns[index] for index in plan.gathered], plan.members.own
            places = [own.index(position) for position in plan.sources[plan.members.rank]]
            self.given = [[_plain(column[place]) for column in columns] for place in places]
        self._results: list[Sequence[Any]] = [()] * len(plan.plans)

    def parts(self) -> Array:
        """Return the parts for each worker as bytes, by rank; ordered by leaf, then receiver, then sender."""
        plans = self.plan.plans
        return joined(
            [
                np.ascontiguousarray(part(np.asarray(array), plans[index].cut(receiver)), dtype)
                .reshape(-1)
                .view(np.uint8)
                for ids in self.plan.members.ids
                for index, _, dtype, _ in self.plan.pieces
                for receiver in ids
                for array in self._columns[index]
            ]
        )

    def take_parts(self, data: Array) -> None:
        """Take the bytes of the parts from all workers, by rank."""
        members, at = self.plan.members, 0
        parts: dict[tuple[int, int, int], Array] = {}
        for sources in members.ids:
            for index, shape, dtype, nbytes in self.plan.pieces:
                for receiver, source in product(members.own, sources):
                    parts[index, receiver, source] = np.ndarray(shape, dtype, data[at : at + nbytes] if nbytes else b"")
                    at += nbytes
        for index, *_ in self.plan.pieces:
            self._results[index] = [
                frozen(
                    host.concatenated([parts[index, receiver, source] for source in result.sources], result.axis or 0)
                )
                for receiver, result in zip(members.own, self.plan.own_results(index), strict=True)
            ]

    def all_values(self, everyone: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the gathered leaves of each replica, by position; ``everyone`` are all workers' ``given``."""
        rows = dict(zip(chain(*self.plan.sources), chain(*everyone), strict=True))
        anything = next(iter(rows.values()))  # for replicas whose values are not used
        return [rows.get(position, anything) for position in range(self.plan.members.replicas)]

    def joined_in_place(self, values: Sequence[Sequence[Any]]) -> list[Array] | None:
        """Return the result of an all_gather of one array without a copy; None if one is needed.

        The values were received into adjacent memory that nothing else uses.
        """
        if self.plan.collective.kind is not ALL_GATHER or len(self.plan.gathered) != 1:
            return None
        axis = self.plan.plans[self.plan.gathered[0]].results[0].axis
        found = _as_one([array for (array,) in values], axis or 0)
        return None if found is None else [found]

    def take_gathered(self, result: Any) -> None:
        """Take the results of `WorkerPlan.on_one_machine`."""
        plan = self.plan
        own = [result] if plan.collective.kind.shared else [result[position] for position in plan.members.own]
        for index, column in zip(plan.gathered, zip(*own, strict=True), strict=True):
            self._results[index] = column

    def result(self) -> Any:
        """Return the result: a leaf or a list of leaves for all local replicas, or a list of these, one for each."""
        plan, shared, single = self.plan, self.plan.collective.kind.shared, self.plan.spec.single
        for (_, indices), rows in zip(plan.reductions, self.rows, strict=True):
            for index, total in zip(indices, rows.results(), strict=True):
                size = plan.plans[index].size
                if shared:
                    self._results[index] = [total[()] if plan.spec.marks[index] == LeafType.NUMPY_SCALAR else total]
                else:
                    made = [host.assembled(each, {size: total}, size) for each in plan.own_results(index)]
                    self._results[index] = list(map(frozen, made))
        found = [[column[i] for column in self._results] for i in range(1 if shared else len(plan.members.own))]
        results = [leaves[0] for leaves in found] if single else found
        return results[0] if shared else results


def on_host(collective: Collective) -> Collective:
    """Return it for NumPy arrays instead of arrays of other frameworks or on GPUs."""
    assert collective.spec is not None
    marks = tuple(None if isinstance(mark, (DeviceType, HostType)) else mark for mark in collective.spec.marks)
    return collective._replace(spec=collective.spec._replace(marks=marks))


def _plain(leaf: Any) -> Any:
    """Return an array as a plain one in native byte order, which is pickled without its memory; or the leaf."""
    return in_native_order(np.asarray(leaf)) if isinstance(leaf, np.ndarray) else leaf


# Bytes.


def joined(pieces: Sequence[Array]) -> Array:
    """Return concatenated bytes; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.uint8)])


def _as_one(arrays: Sequence[Array], axis: int) -> Array | None:
    """Return arrays that are adjacent in memory as one along an axis, without a copy; None if they are not."""
    first = arrays[0]
    owner, begin = _owner(first), _address(first)
    if math.prod(first.shape[:axis]) != 1 or not first.flags.aligned or not isinstance(owner, np.ndarray):
        return None
    end = begin
    for array in arrays:
        is_next = array.flags.c_contiguous and _address(array) == end and _owner(array) is owner
        if not (is_next and array.nbytes and array.dtype == first.dtype):
            return None
        end += array.nbytes
    shape = (*first.shape[:axis], sum(array.shape[axis] for array in arrays), *first.shape[axis + 1 :])
    return frozen(np.ndarray(shape, first.dtype, owner, begin - _address(owner)))


def _owner(array: Any) -> Any:
    """Return the object that owns an array's memory."""
    while True:
        base = array.base if isinstance(array, np.ndarray) else array.obj if isinstance(array, memoryview) else None
        if base is None:
            return array
        array = base


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
