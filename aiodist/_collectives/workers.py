"""The executor over workers: what each worker contributes to a collective, and what its replicas get of it.

    values ── begin ──▶ transfers ── moved, whichever way ──▶ result

What is exchanged follows from what a plan says of a leaf:

- Results of one fold of all inputs: each worker folds its own, and the folds are reduced.
- Results that take a part of each input: each worker gives every other one the parts that it needs.
- All others: whoever has an input that results are made of gives it to all, and each makes its replicas' results. That
  is also the way of Python's numbers and of `IndexedSlices`, so that they are combined in the order of the replicas.

So the bits are those of one machine where workers have one replica each and rows are folded by rank; ``ordered`` gives
the same bits for every layout. A plan touches no values, and is the same on every worker: so their transfers match.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, LeafType
from aiodist._collectives import host
from aiodist._collectives.host import HostExecutor, frozen
from aiodist._collectives.kinds import Collective
from aiodist._collectives.plan import Folded, LeafPlan, Result
from aiodist._collectives.transfers import (
    ANY_INTEGER,
    NUMBERS,
    TOO_LARGE,
    Codec,
    Exchange,
    Gathering,
    Members,
    Part,
    Reduction,
    Transfer,
    bounded,
    codec_of,
    together,
)
from aiodist._collectives.work import Work
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import rule_for

MANY: Final = 64
"""Workers beyond which Python's numbers are reduced as arrays: to gather them from thousands would take longest."""

APART_FROM: Final = 1 << 16
"""Bytes of a leaf from which it is given to all by itself, from where it lies to where it will be read."""


class _Leaf(NamedTuple):
    """One leaf: what becomes of it, its dtype (a Python number's type), what it is, and how it travels."""

    plan: LeafPlan
    dtype: Any
    mark: LeafMark
    codec: Codec


class WorkerPlan:
    """What workers exchange for a collective, and what comes of it.

    Args:
        collective: what is asked for, with a value; it has been checked.
        members: who takes part.
        accumulate: as in `aiodist_kernels.reduce`.
        ordered: reductions give the same bits however replicas are laid out over workers.

    Attributes:
        shared: one result serves all local replicas; else there is one for each, by local position.
        specs: the shape and dtype of each leaf.
        folded: values on GPUs are copied to the host as one fold of the local replicas' contributions.
        groups: the places of leaves that travel together, by how they do.
    """

    def __init__(
        self, collective: Collective, members: Members, accumulate: Accumulate = "native", *, ordered: bool = False
    ) -> None:
        spec = collective.spec
        assert spec is not None
        self.collective, self.members, self.ordered = collective, members, ordered
        self.accumulate: Accumulate = accumulate
        self.single = spec.single
        self.specs: list[Any] = list(zip(spec.shapes, spec.dtypes, strict=True))
        of_leaves = zip(collective.plans(members.replicas), *spec[:3], strict=True)
        self.leaves = [_Leaf(plan, dtype, mark, codec_of(shape, dtype, mark)) for plan, shape, dtype, mark in of_leaves]
        self.shared = collective.kind.shared and not any(isinstance(mark, HostType) for mark in spec.marks)
        one_fold = bool(self.leaves) and all(leaf.plan.is_one_fold for leaf in self.leaves)
        self.folded = one_fold and len(members.own) > 1 and not ordered
        self.groups: dict[tuple[type[Transfer], Any], list[int]] = {}
        for place, shape in enumerate(spec.shapes):
            self.groups.setdefault(self._way(place, shape), []).append(place)
        self._host = HostExecutor(collective, len(members.own))

    @cached_property
    def sources(self) -> Sequence[Sequence[int]]:
        """By rank, the positions of replicas whose values are needed by others, where values are not reduced."""
        needed = self.leaves[0].plan.inputs
        if len(needed) == self.members.replicas:
            return self.members.ids  # which all workers in a process share
        return [[position for position in ids if position in needed] for ids in self.members.ids]

    def _way(self, place: int, shape: Sequence[int | None]) -> tuple[type[Transfer], Any]:
        """Return how a leaf travels, and what leaves must have in common to travel together."""
        plan, dtype, mark, _ = self.leaves[place]
        is_number = mark == LeafType.PYTHON_NUMBER
        as_array = dtype is not bool and len(self.members.ids) > MANY and not self.ordered
        if dtype is int:
            as_array = as_array and self.collective.op is not ReduceOp.PRODUCT
        if plan.is_one_fold and mark != LeafType.INDEXED_SLICES and (as_array or not is_number):
            return Reduction, self.rule(place).accumulator
        if plan.takes_parts:
            return Exchange, None
        nbytes = 0 if isinstance(dtype, type) else math.prod([size or 0 for size in shape]) * dtype.itemsize
        return Gathering, place if nbytes >= APART_FROM else None

    def rule(self, place: int) -> Any:
        """Return the rule by which a leaf is reduced."""
        op, leaf = self.collective.op, self.leaves[place]
        assert op is not None
        if leaf.mark != LeafType.PYTHON_NUMBER:
            return _rule_for(op, leaf.dtype, self.accumulate)
        summed = leaf.dtype is int and op is ReduceOp.MEAN  # it is divided as Python does
        return _rule_for(ReduceOp.SUM if summed else op, NUMBERS[leaf.dtype], "native")

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
        """Return the work that gives values with arrays on GPUs as `begin` takes them."""
        from aiodist._collectives.device import to_host  # loaded where there are arrays on GPUs

        places = [self.members.own.index(position) for position in self.sources[self.members.rank]]
        return to_host(self.collective, values, devices, self.accumulate, folded=self.folded, needed=places)


class Crossing:
    """One collective's values on their way.

    Attributes:
        transfers: what is to be exchanged, in this order.
    """

    def __init__(self, plan: WorkerPlan, values: Sequence[Any]) -> None:
        self._plan = plan
        self._columns: list[Sequence[Any]] = [values] if plan.single else list(zip(*values, strict=True))
        self._moved = [(places, self._transfer(way, places)) for (way, _), places in plan.groups.items()]
        self.transfers: list[Transfer] = [transfer for _, transfer in self._moved]

    def _transfer(self, way: type[Transfer], places: Sequence[int]) -> Transfer:
        plan = self._plan
        if way is Reduction:
            assert plan.collective.op is not None
            parts = [Part(plan.rule(place), self._arrays(place)) for place in places]
            return Reduction(plan.collective.op, parts, plan.members, ordered=plan.ordered)
        if way is Exchange:
            plans = [plan.leaves[place].plan for place in places]
            specs = [plan.specs[place] for place in places]
            return Exchange(plan.members, plan.sources, plans, specs, self._given(places))
        return Gathering(plan.sources, [plan.leaves[place].codec for place in places], self._given(places))

    def _arrays(self, place: int) -> list[np.ndarray[Any, Any]]:
        plan, leaf, column = self._plan, self._plan.leaves[place], self._columns[place]
        if leaf.dtype is int:
            return [bounded(number, plan.collective.op, plan.members.replicas) for number in column]
        return [column[0].array] if isinstance(column[0], Folded) else [leaf.codec.split(value)[0] for value in column]

    def _given(self, places: Sequence[int]) -> list[list[Any]]:
        """Return, by leaf, the values of those local replicas that others need."""
        own, sources = self._plan.members.own, self._plan.sources[self._plan.members.rank]
        return [[self._columns[place][own.index(position)] for position in sources] for place in places]

    @property
    def further(self) -> list[Transfer]:
        """What else is to be exchanged, once the transfers have been; the same on every worker, mostly nothing."""
        found = []
        for places, transfer in self._moved:
            integers = [(n, place) for n, place in enumerate(places) if self._plan.leaves[place].dtype is int]
            if isinstance(transfer, Gathering):
                found += [place for n, place in integers if TOO_LARGE in transfer.values[n].values()]
            elif isinstance(transfer, Reduction) and integers:
                totals = transfer.results()
                found += [place for n, place in integers if totals[n][1]]
        if not found:
            return []
        again = Gathering(self._plan.sources, [ANY_INTEGER] * len(found), self._given(found))
        self._moved.append((found, again))
        return [again]

    def result(self) -> Any:
        """Return the result: a leaf or a list of leaves for all local replicas, or a list of such, one for each."""
        columns: list[Any] = [None] * len(self._plan.leaves)
        for places, transfer in self._moved:
            by_leaf = transfer.results() if isinstance(transfer, Reduction) else transfer.values
            for place, found in zip(places, by_leaf, strict=True):
                columns[place] = self._results(place, transfer, found, len(places) == 1)
        count = 1 if self._plan.collective.kind.shared else len(self._plan.members.own)
        rows: list[Any] = [[column[index] for column in columns] for index in range(count)]
        if self._plan.single:
            rows = [row[0] for row in rows]
        return rows[0] if self._plan.collective.kind.shared else rows

    def _results(self, place: int, transfer: Transfer, found: Any, alone: bool) -> list[Any]:
        """Return a leaf's results for the local replicas, or the one for all, of what has come of it."""
        leaf, plan = self._plan.leaves[place], self._plan.leaves[place].plan
        takers = [0] if self._plan.collective.kind.shared else self._plan.members.own
        if isinstance(transfer, Exchange):
            made = [_put_together(plan.results[i]._replace(cut=None), found[i], plan.size, alone) for i in takers]
        elif isinstance(transfer, Reduction):
            total = {plan.size: self._total(leaf, found)}
            made = [host.made(plan.results[i], total, plan.size) for i in takers]
        else:
            arrays = self._with_folds(leaf, found, takers)
            made = [_put_together(plan.results[i], arrays, plan.size, alone) for i in takers]
        return [frozen(each) if isinstance(each, np.ndarray) else each for each in made]

    def _total(self, leaf: _Leaf, found: np.ndarray[Any, Any]) -> Any:
        if leaf.dtype is not int:
            return leaf.codec.join(found)
        total, mean = int(found[0]), self._plan.collective.op is ReduceOp.MEAN
        return total / self._plan.members.replicas if mean else total

    def _with_folds(self, leaf: _Leaf, inputs: Mapping[int, Any], takers: Sequence[int]) -> Mapping[int, Any]:
        """Return inputs, and the totals of those folds that results are made of, by their numbers in the plan."""
        plan, op = leaf.plan, self._plan.collective.op
        folds = {source for taker in takers for source in plan.results[taker].sources if source >= plan.size}
        totals = {}
        for source in folds:
            assert op is not None
            column = [inputs[position] for position in plan.folds[source - plan.size]]
            totals[source] = host.fold(op, column, leaf.mark, self._plan.accumulate)
        return {**inputs, **totals}


def _put_together(result: Result, arrays: Mapping[int, Any], inputs: int, alone: bool) -> Any:
    """Return what a result is made of; what has come by itself stays where it came to."""
    parts = [arrays[source] for source in result.sources]
    if result.cut is None and alone and isinstance(parts[0], np.ndarray):
        if len(parts) > 1:
            assert result.axis is not None
            return together(parts, result.axis)
        if parts[0].flags.aligned:
            return parts[0]
    return host.made(result, arrays, inputs)


_rule_for = lru_cache(maxsize=1024)(rule_for)
