"""The executor over workers: what each worker contributes to a collective, and what its replicas get of it.

    values ── begin ──▶ rows, parts, values to gather ── moved, whichever way ──▶ result

What is exchanged follows from what a plan says of a leaf:

- Results of one fold of all inputs: each worker folds its own, and the folds are reduced.
- Results that take a part of each input (all_to_all): each worker gives every other one the parts that it needs.
- All others: whoever has an input that results are made of gives it to all, and each makes its replicas' results. That
  is also the way of Python's numbers and of `IndexedSlices`, so that they are combined in the order of the replicas.

So the bits are those of one machine where workers have one replica each and rows are folded by rank; ``ordered`` gives
the same bits for every layout. A plan touches no values, and is the same on every worker: so their transfers match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, LeafType
from aiodist._collectives import host
from aiodist._collectives.host import HostExecutor, frozen
from aiodist._collectives.kinds import ALL_TO_ALL, Collective
from aiodist._collectives.plan import Folded, LeafPlan, Result
from aiodist._collectives.transfers import Exchange, Members, Reduction, Rows, together
from aiodist._collectives.work import Work
from aiodist_kernels import Accumulate
from aiodist_kernels.rules import Rule, rule_for


class WorkerPlan:
    """What workers exchange for a collective, and what comes of it.

    Args:
        collective: what is asked for, with a value; it has been checked.
        members: who takes part.
        accumulate: as in `aiodist_kernels.reduce`.
        ordered: reductions give the same bits however replicas are laid out over workers.

    Attributes:
        shared: one result serves all local replicas; else there is one for each, by local position.
        is_one_array: the result is one array that is reduced, for all of them.
        leaves: by place, what becomes of a leaf, and what it is.
        folded: values on GPUs are copied to the host as one fold of the local replicas' contributions.
        reductions: the leaves that are reduced, by their accumulator, with their places.
        exchanged: the places of those of which parts are exchanged.
        gathered: the places of all others.
        sources: by rank, the positions of replicas whose values are gathered.
    """

    def __init__(
        self, collective: Collective, members: Members, accumulate: Accumulate = "native", *, ordered: bool = False
    ) -> None:
        spec = collective.spec
        assert spec is not None
        self.collective, self.members = collective, members
        self.accumulate: Accumulate = accumulate
        self.single = spec.single
        self.leaves: list[tuple[LeafPlan, LeafMark]] = list(
            zip(collective.plans(members.replicas), spec.marks, strict=True)
        )
        self.shared = collective.kind.shared and not any(isinstance(mark, HostType) for mark in spec.marks)
        self.reductions: list[tuple[Reduction, list[int]]] = []
        self.exchanged: list[int] = []
        self.gathered: list[int] = []
        rules: dict[int, Rule] = {}
        for place, (plan, mark) in enumerate(self.leaves):
            if plan.is_one_fold and mark not in (LeafType.INDEXED_SLICES, LeafType.PYTHON_NUMBER):
                assert collective.op is not None
                rules[place] = rule_for(collective.op, spec.dtypes[place], accumulate)
            else:
                (self.exchanged if collective.kind is ALL_TO_ALL else self.gathered).append(place)
        for accumulator in dict.fromkeys(rule.accumulator for rule in rules.values()):
            places = [place for place, rule in rules.items() if rule.accumulator == accumulator]
            shapes: Any = [spec.shapes[place] for place in places]  # all of them are known
            assert collective.op is not None
            of_leaves = [rules[place] for place in places]
            self.reductions.append((Reduction(collective.op, of_leaves, shapes, members, ordered=ordered), places))
        self.is_one_array = self.shared and self.single and bool(rules) and spec.marks == (LeafType.NUMPY_ARRAY,)
        one_fold = bool(self.leaves) and all(plan.is_one_fold for plan, _ in self.leaves)
        self.folded = one_fold and len(members.own) > 1 and not ordered
        self.sources: Sequence[Sequence[int]] = members.ids  # which all workers in a process share
        needed = self.leaves[0][0].inputs if self.leaves else range(members.replicas)
        if len(needed) < members.replicas:
            self.sources = [[position for position in ids if position in needed] for ids in members.ids]
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
        """Return the work that gives values with arrays on GPUs as `begin` takes them."""
        from aiodist._collectives.device import to_host  # loaded where there are arrays on GPUs

        places = [self.members.own.index(position) for position in self.sources[self.members.rank]]
        return to_host(self.collective, values, devices, self.accumulate, folded=self.folded, needed=places)


class Crossing:
    """One collective's values on their way.

    Attributes:
        plan: what is exchanged for it.
        rows: what is to be reduced.
        exchange: what is to be exchanged; None for nothing.
        given: by gathered leaf, the values of those local replicas that all workers need.
    """

    def __init__(self, plan: WorkerPlan, values: Sequence[Any]) -> None:
        self.plan = plan
        columns: list[Sequence[Any]] = [values] if plan.single else list(zip(*values, strict=True))
        self.rows = [
            Rows(reduction, [_arrays(columns[place]) for place in places]) for reduction, places in plan.reductions
        ]
        self.exchange: Exchange | None = None
        self.given: list[list[Any]] = []
        if plan.exchanged:
            spec = plan.collective.spec
            assert spec is not None
            specs: Any = [(spec.shapes[place], spec.dtypes[place]) for place in plan.exchanged]
            plans = [plan.leaves[place][0] for place in plan.exchanged]
            self.exchange = Exchange(plan.members, plans, specs, [columns[place] for place in plan.exchanged])
        if plan.gathered:
            own, sources = plan.members.own, plan.sources[plan.members.rank]
            self.given = [[columns[place][own.index(position)] for position in sources] for place in plan.gathered]
        self._results: list[list[Any]] = [[] for _ in plan.leaves]

    def take_exchanged(self, data: np.ndarray[Any, Any]) -> None:
        """Take the bytes of the exchange, of all workers by rank."""
        assert self.exchange is not None
        for place, of_leaf in zip(self.plan.exchanged, self.exchange.parts(data), strict=True):
            for result, parts in zip(self._own_results(place), of_leaf.values(), strict=True):
                assert result.axis is not None
                self._results[place].append(frozen(host.put_together(parts, result.axis)))

    def take_gathered(self, everyone: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Take what all workers give, by rank, as ``given`` is."""
        plan = self.plan
        for number, place in enumerate(plan.gathered):
            inputs: dict[int, Any] = {}
            for sources, by_leaf in zip(plan.sources, everyone, strict=True):
                inputs.update(zip(sources, by_leaf[number], strict=True))
            self._results[place] = self._of_gathered(place, inputs)

    def _own_results(self, place: int) -> list[Result]:
        """Return what the local replicas' results of a leaf are made of; the one for all where that is shared."""
        results = self.plan.leaves[place][0].results
        return list(results) if self.plan.collective.kind.shared else [results[i] for i in self.plan.members.own]

    def _of_gathered(self, place: int, inputs: Mapping[int, Any]) -> list[Any]:
        plan, mark = self.plan.leaves[place]
        results, op, found = self._own_results(place), self.plan.collective.op, []
        arrays = dict(inputs)
        for source in {source for result in results for source in result.sources if source >= plan.size}:
            assert op is not None
            column = [inputs[position] for position in plan.folds[source - plan.size]]
            arrays[source] = host.fold(op, column, mark, self.plan.accumulate)
        for result in results:
            parts = [arrays[source] for source in result.sources]
            made = None
            if result.cut is None and isinstance(parts[0], np.ndarray):
                own = result.sources[0] in self.plan.members.own
                if len(parts) > 1 and result.axis is not None:
                    made = together(parts, result.axis)
                elif len(parts) == 1 and parts[0].flags.aligned and not own:
                    made = parts[0]  # as it has come
            if made is None:
                made = host.made(result, arrays, plan.size)
            found.append(frozen(made) if isinstance(made, np.ndarray) else made)
        return found

    def result(self) -> Any:
        """Return the result: a leaf or a list of leaves for all local replicas, or a list of such, one for each."""
        plan = self.plan
        if plan.is_one_array:
            return self.rows[0].results()[0]
        for (_, places), rows in zip(plan.reductions, self.rows, strict=True):
            for place, total in zip(places, rows.results(), strict=True):
                self._results[place] = self._of_total(place, total)
        if plan.single and plan.collective.kind.shared:
            return self._results[0][0]
        count = 1 if plan.collective.kind.shared else len(plan.members.own)
        found: list[Any] = [[column[index] for column in self._results] for index in range(count)]
        if plan.single:
            found = [row[0] for row in found]
        return found[0] if plan.collective.kind.shared else found

    def _of_total(self, place: int, total: np.ndarray[Any, Any]) -> list[Any]:
        plan, mark = self.plan.leaves[place]
        if mark == LeafType.NUMPY_SCALAR:
            return [total[()]]
        if self.plan.collective.kind.shared:
            return [total]
        return [frozen(host.made(each, {plan.size: total}, plan.size)) for each in self._own_results(place)]


def _arrays(column: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    return [column[0].array] if isinstance(column[0], Folded) else [np.asarray(value) for value in column]
