"""The executor over workers: what each worker contributes to a collective, and what its replicas get of it.

    values ── begin ──▶ transfers ── moved, whichever way ──▶ result

Reductions are folded on every worker and reduced over them; parts of replicas' results are cut from that. The source of
a broadcast gives its bytes to all; an all_to_all moves bytes for each from each; everything else, also what has several
folds, gives all inputs to all workers, which make of them what their plan says. Python's numbers and rows of
`IndexedSlices` go that way, too, so that they are combined in the order of the replicas, as on one machine; but sums of
Python's integers are reductions of parts of them. So the bits are those of one machine where workers have one replica
each and rows are folded by rank; ``ordered`` gives the same bits for every layout.

A plan depends on what is asked for and who is where; it touches no values. It is the same on every worker, so their
transfers match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafType
from aiodist._arrays.slices import IndexedSlices
from aiodist._collectives import host
from aiodist._collectives.host import HostExecutor, fold_slices, frozen
from aiodist._collectives.kinds import Collective, Detail
from aiodist._collectives.plan import Folded
from aiodist._collectives.transfers import (
    NUMBERS,
    Arrays,
    Broadcast,
    Column,
    Exchange,
    Gathering,
    Integers,
    LargeIntegers,
    Members,
    Numbers,
    Part,
    Reduction,
    Transfer,
    folding,
    nbytes_of,
)
from aiodist._collectives.work import Work
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import rule_for

MANY: Final = 64
"""Workers beyond which Python's numbers are reduced as arrays: to gather them from thousands would take longest."""

APART_FROM: Final = 1 << 16
"""Bytes of a leaf from which it is broadcast by itself, from where it lies to where it will be read."""


class WorkerPlan:
    """What workers exchange for a collective, and what comes of it.

    Args:
        collective: what is asked for, with a value; it has been checked.
        members: who takes part.
        accumulate: as in `aiodist_kernels.reduce`.
        ordered: reductions give the same bits however replicas are laid out over workers.

    Attributes:
        shared: one result serves all local replicas; else there is one for each, by local position.
        one_fold: the results of each leaf are made of one fold of all that is contributed.
        folded: values on GPUs are brought down as one fold of what the local replicas bring.
    """

    def __init__(
        self, collective: Collective, members: Members, accumulate: Accumulate = "native", *, ordered: bool = False
    ) -> None:
        spec = collective.spec
        assert spec is not None
        self.collective, self.members, self.ordered = collective, members, ordered
        self.accumulate: Accumulate = accumulate
        self.single = spec.single
        self.leaves = list(zip(*spec[:3], strict=True))
        self.plans = collective.plans(members.replicas)
        self.shared = collective.kind.shared and not any(isinstance(mark, HostType) for mark in spec.marks)
        self.one_fold = collective.op is not None and all(plan.folds == (range(plan.size),) for plan in self.plans)
        self.folded = self.one_fold and len(members.own) > 1 and not ordered
        self.many = len(members.ids) > MANY and not ordered
        self._host = HostExecutor(collective, len(members.own))

    def begin(self, values: Sequence[Any]) -> Crossing:
        """Take what the local replicas contribute, in their order, on the host; nothing is folded or copied yet."""
        return Crossing(self, values)

    def hand_out(self, result: Any) -> Any:
        """Return `Crossing.result` as replicas get it: other frameworks' arrays as such."""
        if self.shared:
            return result
        rows = [result] if self.collective.kind.shared else result
        by_leaf = list(zip(*([row] if self.single else row for row in rows), strict=True))
        return self._host.handed_out(by_leaf, {})

    def on_host(self, values: Sequence[Any], devices: Sequence[str] = ()) -> Work:
        """Return the work that gives values with arrays on GPUs as `begin` takes them.

        Args:
            values: what the local replicas contribute.
            devices: their logical devices.
        """
        from aiodist._collectives.device import to_host  # loaded where there are arrays on GPUs

        needed: Sequence[int] | None = None
        if self.collective.kind.detail is Detail.SOURCE:
            source = self.collective.detail
            needed = [self.members.own.index(source)] if source in self.members.own else []
        return to_host(self.collective, values, devices, self.accumulate, folded=self.folded, needed=needed)

    def on_devices(self, values: Sequence[Any], result: Any, devices: Sequence[str] = (), outs: Any = None) -> Work:
        """Return the work that gives the local replicas' results, on the GPUs that their values came from.

        Args:
            values: what the local replicas contribute.
            result: from `Crossing.result`.
            devices: their logical devices.
            outs: by local position, buffers that the results are wanted in.
        """
        from aiodist._collectives.device import from_host

        return from_host(self.collective, values, result, devices, outs)


class Crossing:
    """One collective's values on their way.

    Attributes:
        transfers: what is to be exchanged, in this order.
    """

    def __init__(self, plan: WorkerPlan, values: Sequence[Any]) -> None:
        self._plan = plan
        self._members = plan.members
        self._columns: list[Column] = [values] if plan.single else list(zip(*values, strict=True))
        self._integers: tuple[Integers, list[int]] | None = None
        self._made: list[tuple[Sequence[int], Callable[[], Iterable[Any]]]] = []  # by leaf, totals or results
        self.transfers: list[Transfer] = []
        if not plan.leaves:
            return
        if plan.one_fold:
            assert plan.collective.op is not None
            self._reduce(plan.collective.op)
        elif plan.collective.kind.detail is Detail.SOURCE:
            self._broadcast(plan.collective.detail)
        elif plan.collective.kind.detail is Detail.AXES:
            exchange = Exchange(self._members, self._arrays(), self._specs(), plan.collective.detail)
            self._add(range(len(plan.leaves)), exchange, lambda: exchange.results)
        else:
            self._gather()

    @property
    def further(self) -> list[Transfer]:
        """What else is to be exchanged, once the transfers have been; the same on every worker, mostly nothing."""
        if self._integers is None or not self._integers[0].are_too_large():
            return []
        _, places = self._integers
        self._integers = None
        return [self._gather_integers(places)]

    def result(self) -> Any:
        """Return the result: a leaf or a list of leaves for all local replicas, or a list of such, one for each.

        Raises:
            OverflowError: the MEAN of integers is beyond the range of float.
        """
        found: dict[int, Any] = {}
        for places, make in self._made:
            found.update(zip(places, make(), strict=True))
        count, single, own = len(self._plan.leaves), self._plan.single, self._members.own
        rows = [
            [self._of(leaf, found[leaf], place) for leaf in range(count)]
            for place in range(1 if self._plan.collective.kind.shared else len(own))
        ]
        results = [row[0] for row in rows] if single else rows
        return results[0] if self._plan.collective.kind.shared else results

    def _of(self, leaf: int, found: Any, place: int) -> Any:
        """Return a leaf's result for the local replica at a place, of its total or of results by place."""
        plan = self._plan.plans[leaf]
        if not self._plan.one_fold:
            return found[place]
        result = plan.results[0 if len(plan.results) == 1 else self._members.own[place]]
        return host.made(result, [*(None,) * plan.size, found], plan.size)

    def _add(self, places: Sequence[int], transfer: Transfer, make: Callable[[], Iterable[Any]]) -> None:
        self.transfers.append(transfer)
        self._made.append((places, make))

    def _arrays(self) -> list[list[Any]]:
        return [[np.asarray(array) for array in column] for column in self._columns]

    def _specs(self) -> list[Any]:
        return [(shape, dtype) for shape, dtype, _ in self._plan.leaves]

    # What is reduced.

    def _reduce(self, op: ReduceOp) -> None:
        plan = self._plan
        alike: dict[Any, list[int]] = {}
        for place, (_, dtype, mark) in enumerate(plan.leaves):
            if mark == LeafType.INDEXED_SLICES:
                way: Any = self._reduce_slices
            elif dtype is int:
                way = self._reduce_integers
            elif mark == LeafType.PYTHON_NUMBER and (dtype is bool or not plan.many):
                way = self._reduce_numbers
            else:
                way = self._reduce_arrays
            accumulator = self._rule(op, place).accumulator if way == self._reduce_arrays else None
            alike.setdefault((way, accumulator), []).append(place)
        for (way, _), places in alike.items():
            way(op, places)

    def _rule(self, op: ReduceOp, place: int) -> Any:
        _, dtype, mark = self._plan.leaves[place]
        if mark == LeafType.PYTHON_NUMBER:
            kernels.check_number(op, dtype)
            return _rule_for(op, NUMBERS[dtype], "native")
        return _rule_for(op, dtype, self._plan.accumulate)

    def _reduce_arrays(self, op: ReduceOp, places: list[int]) -> None:
        parts = []
        for place in places:
            column, (_, _, mark), rule = self._columns[place], self._plan.leaves[place], self._rule(op, place)
            arrays = [column[0].array] if isinstance(column[0], Folded) else [np.asarray(value) for value in column]
            parts.append(Part(rule, arrays, scalar=mark in (LeafType.NUMPY_SCALAR, LeafType.PYTHON_NUMBER)))
        reduction = Reduction(folding(op), parts, self._members, ordered=self._plan.ordered)
        numbers = {place for place in places if self._plan.leaves[place][2] == LeafType.PYTHON_NUMBER}

        def results() -> list[Any]:
            found = zip(places, reduction.results(), strict=True)
            return [total.item() if place in numbers else total for place, total in found]

        self._add(places, reduction, results)

    def _reduce_numbers(self, op: ReduceOp, places: list[int]) -> None:
        kinds = [self._plan.leaves[place][1] for place in places]
        numbers = Numbers(self._members, [self._columns[place] for place in places], kinds)
        self._add(places, numbers, lambda: [kernels.reduce_numbers(op, column) for column in numbers.columns])

    def _reduce_integers(self, op: ReduceOp, places: list[int]) -> None:
        if op is ReduceOp.PRODUCT:
            self.transfers.append(self._gather_integers(places))
            return
        integers = Integers(op, [self._columns[place] for place in places], self._members)
        self._integers = integers, places
        self._add(places, integers.reduction, integers.results)

    def _gather_integers(self, places: list[int]) -> Gathering:
        op = self._plan.collective.op
        assert op is not None
        large = LargeIntegers(self._members, [self._columns[place] for place in places])
        self._made.append((places, lambda: [kernels.reduce_numbers(op, column) for column in large.columns]))
        return large

    def _reduce_slices(self, op: ReduceOp, places: list[int]) -> None:
        columns: list[Column] = []
        specs: list[Any] = []
        for place in places:
            slices = self._columns[place]
            columns += [[part.indices for part in slices], [part.values for part in slices]]
            specs += [((None,), np.dtype(np.int64)), ((None, *slices[0].values.shape[1:]), slices[0].dtype)]
        gathering = Arrays(self._members, columns, specs, [0] * len(columns))

        def results() -> Iterable[Any]:
            for number, place in enumerate(places):
                found = zip(*gathering.columns[2 * number : 2 * number + 2], strict=True)
                shape = self._columns[place][0].dense_shape
                parts = [IndexedSlices(values, indices, shape) for indices, values in found]
                yield fold_slices(op, parts, self._plan.accumulate)

        self._add(places, gathering, results)

    # What is moved.

    def _broadcast(self, source: int) -> None:
        members, leaves = self._members, self._plan.leaves
        root = next(rank for rank, ids in enumerate(members.ids) if source in ids)
        place = members.own.index(source) if root == members.rank else None
        large = [leaf for leaf, (shape, dtype, _) in enumerate(leaves) if nbytes_of(shape, dtype) >= APART_FROM]
        small = [leaf for leaf in range(len(leaves)) if leaf not in large]
        for places in [*([small] if small else []), *([place] for place in large)]:
            values = None if place is None else [self._columns[leaf][place] for leaf in places]
            transfer = Broadcast(root, [leaves[leaf] for leaf in places], values)
            self._add(places, transfer, partial(_each_in_a_list, transfer.results))

    def _gather(self) -> None:
        """Give all workers all inputs, of which they make their replicas' results: the way of plans without another."""
        kinds = [dtype if mark == LeafType.PYTHON_NUMBER else None for _, dtype, mark in self._plan.leaves]
        integers = [leaf for leaf, kind in enumerate(kinds) if kind is int]
        numbers = [leaf for leaf, kind in enumerate(kinds) if kind is not None and kind is not int]
        arrays = [leaf for leaf, kind in enumerate(kinds) if kind is None]
        if integers:
            self._add_gathering(integers, LargeIntegers(self._members, [self._columns[leaf] for leaf in integers]))
        if numbers:
            of = [self._plan.leaves[leaf][1] for leaf in numbers]
            self._add_gathering(numbers, Numbers(self._members, [self._columns[leaf] for leaf in numbers], of))
        if arrays:
            detail, kind = self._plan.collective.detail, self._plan.collective.kind
            axes = [detail[leaf] if kind.detail is Detail.AXIS else None for leaf in arrays]
            columns, specs = self._arrays(), self._specs()
            gathering = Arrays(self._members, [columns[i] for i in arrays], [specs[i] for i in arrays], axes)
            self._add_gathering(arrays, gathering)

    def _add_gathering(self, places: Sequence[int], gathering: Arrays | LargeIntegers | Numbers) -> None:
        def results() -> Iterable[list[Any]]:
            if isinstance(gathering, Arrays) and gathering.whole is not None and self._plan.collective.kind.shared:
                yield [frozen(gathering.whole)]
                return
            for leaf, inputs in zip(places, gathering.columns, strict=True):
                yield self._of_inputs(leaf, inputs)

        self._add(places, gathering, results)

    def _of_inputs(self, leaf: int, inputs: Sequence[Any]) -> list[Any]:
        """Return a leaf's results for the local replicas, or the one for all, of what all replicas contribute."""
        plan, op, mark = self._plan.plans[leaf], self._plan.collective.op, self._plan.leaves[leaf][2]
        if mark == LeafType.NUMPY_SCALAR:
            inputs = [array[()] for array in inputs]
        needed = plan.results if self._plan.collective.kind.shared else [plan.results[i] for i in self._members.own]
        arrays = [*inputs, *(None,) * len(plan.folds)]
        for fold in {source - plan.size for result in needed for source in result.sources if source >= plan.size}:
            assert op is not None
            column = [inputs[i] for i in plan.folds[fold]]
            arrays[plan.size + fold] = host.fold(op, column, mark, self._plan.accumulate)
        made = [host.made(result, arrays, plan.size) for result in needed]
        return [frozen(each) if isinstance(each, np.ndarray) else each for each in made]


_rule_for = lru_cache(maxsize=1024)(rule_for)


def _each_in_a_list(results: Sequence[Any]) -> list[list[Any]]:
    return [[result] for result in results]
