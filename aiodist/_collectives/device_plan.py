"""Plans on devices: which arrays are made where, and what is launched and copied, to carry plans out on GPUs.

    inputs ── folds ──▶ totals ── moves ──▶ results ── moves ──▶ callers' buffers

What all who are on one device get is moved there once, for the first of them, and copied from there. Memory of the host
is a place like a device: to and from it go values whose way leads to other workers, or through NumPy.

All of this depends on shapes, dtypes, devices and the layout of buffers, and on no address: arrays have numbers, in
this order: inputs, buffers, arrays that are made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from aiodist._arrays.device import Allocate, DeviceArray, DeviceType, DType, Spec
from aiodist._collectives.kinds import LeafPlan, Result
from aiodist._gpu import enqueue
from aiodist._gpu.enqueue import Batch, Schedule, symbol
from aiodist._gpu.steps import HOST, Job, Move, Place, View, has_no_gaps, whole
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import rule_for

Column: TypeAlias = Sequence[DeviceArray]
"""One leaf of all that contribute it, in order."""

Where: TypeAlias = tuple[int, int]
"""A leaf, and a taker of results."""


class PageLocked(DeviceType):
    """NumPy arrays in memory of the host that devices copy to and from."""

    name = "NumPy"

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:  # noqa: ARG002
        """Return new arrays, each with its address."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        arrays = [
            allocate(HOST, max(1, size))[:size].view(dtype).reshape(shape)
            for size, (shape, dtype) in zip(sizes, specs, strict=True)
        ]
        return [(array, array.ctypes.data) for array in arrays]

    def stream(self, ordinal: int) -> int:  # noqa: ARG002
        """Return a stream that nobody looks at."""
        return 0


PAGE_LOCKED: Final = PageLocked()


class Leaf(NamedTuple):
    """A leaf on devices: whose arrays it has, and what becomes of them."""

    mark: DeviceType
    plan: LeafPlan


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """What becomes of some leaves on devices, again and again: it stands for their plans."""

    leaves: Sequence[Leaf]
    op: ReduceOp | None = None
    accumulate: Accumulate = "native"
    devices: Sequence[str] = ()  # on whose streams inputs may have been made
    ragged: bool = False  # inputs of one leaf may differ in shape


class Makes(NamedTuple):
    """Arrays to be made of one framework, on one GPU."""

    mark: DeviceType  # the framework
    ordinal: int
    specs: Sequence[Spec]  # shape and dtype of each
    places: Sequence[int]  # of each, among all that are made


class DevicePlan(NamedTuple):
    """What leaves on devices come to."""

    makes: Sequence[Makes]  # arrays to be made
    total: int  # how many they are
    results: Sequence[Sequence[int | None]]  # by leaf and taker: which it gets; None: has a buffer
    schedule: Schedule  # what is enqueued


class Planner:
    """Works out what leaves come to; for the arguments see `device.DeviceRun`.

    Buffers are ``straight`` where results may be written into them while inputs are read.
    """

    def __init__(
        self,
        group: Leaves,
        columns: Sequence[Column],
        takers: Sequence[Sequence[int]],
        buffers: Mapping[Where, DeviceArray],
        *,
        straight: bool,
    ) -> None:
        self._group, self._straight = group, straight
        numbers = itertools.count()
        inputs = [[self._view(next(numbers), array) for array in column] for column in columns]
        self._buffers = {where: self._view(next(numbers), buffer) for where, buffer in buffers.items()}
        self._first_made = next(numbers)
        self._total = 0  # arrays to be made
        self._makes: dict[tuple[DeviceType, int], tuple[list[Spec], list[int]]] = {}
        self._jobs: dict[Any, list[Job]] = {}
        self._moves: list[Move] = []
        self._last: list[Move] = []
        self._results: list[list[int | None]] = []
        for leaf, column, ordinals in zip(group.leaves, inputs, takers, strict=True):
            self._add(leaf, column, ordinals)

    def plan(self) -> DevicePlan:
        """Return what it has come to."""
        batches = [Batch(rule, jobs) for (rule, *_), jobs in self._jobs.items()]
        with enqueue.enqueuing:
            schedule = enqueue.queue().schedule(batches, [*self._moves, *self._last], self._first_made + self._total)
        return DevicePlan(
            [Makes(*key, *group) for key, group in self._makes.items()], self._total, self._results, schedule
        )

    @staticmethod
    def _view(number: int, array: DeviceArray) -> View:
        return whole(Place(array.ordinal, symbol(number)), tuple(array.shape), array.dtype)

    def _add(self, leaf: Leaf, inputs: Sequence[View], takers: Sequence[int]) -> None:
        """Plan a leaf's results: those that are folds, then those that are moved, what is alike once a device."""
        plan = leaf.plan
        which = range(len(takers)) if len(plan.results) > 1 else [0] * len(takers)
        self._results.append([None] * len(takers))
        totals = [self._fold(leaf, fold, inputs, takers, which) for fold in range(len(plan.folds))]
        firsts: dict[tuple[int, int], View] = {}
        for taker, (number, ordinal) in enumerate(zip(which, takers, strict=True)):
            result = plan.results[number]
            if _is_fold(plan, result):
                continue
            sources = [inputs[i] if i < plan.size else totals[i - plan.size][ordinal] for i in result.sources]
            parts = [_part(source, result) for source in sources]
            target = self._result(leaf, taker, ordinal, _shape(parts, result), sources[0].dtype)
            first = firsts.setdefault((number, ordinal), target)
            if first is target:
                self._assemble(target, parts, result)
            else:
                self._moves.append(Move(target, first))

    def _assemble(self, target: View, parts: Sequence[View], result: Result) -> None:
        at = 0
        for part in parts:
            where = target
            if len(parts) > 1:
                assert result.axis is not None
                begin, at = at, at + part.shape[result.axis]
                where = target.part(result.axis, begin, at)
            self._moves.append(Move(where, part))

    def _fold(
        self, leaf: Leaf, fold: int, inputs: Sequence[View], takers: Sequence[int], which: Sequence[int]
    ) -> dict[int, View]:
        """Plan a fold into the results that are nothing else, and what others are made of; return where it lies."""
        plan, parts = leaf.plan, [inputs[i] for i in leaf.plan.folds[fold]]
        assert self._group.op is not None
        shape, rule = parts[0].shape, rule_for(self._group.op, parts[0].dtype, self._group.accumulate)
        outputs: list[View] = []
        lies: dict[int, View] = {}
        lacking: list[int] = []
        for taker, (number, ordinal) in enumerate(zip(which, takers, strict=True)):
            result = plan.results[number]
            if plan.size + fold not in result.sources:
                continue
            if _is_fold(plan, result):
                outputs.append(self._result(leaf, taker, ordinal, shape, rule.result))
                lies.setdefault(ordinal, outputs[-1])
            else:
                lacking.append(ordinal)
        for ordinal in lacking:
            if ordinal not in lies:
                lies[ordinal] = self._make(leaf.mark, ordinal, shape, rule.result)
                outputs.append(lies[ordinal])
        job = Job(tuple([p.place for p in parts]), tuple([o.place for o in outputs]), math.prod(shape))
        alike = rule, tuple([place.device for place in job.inputs]), tuple([place.device for place in job.outputs])
        self._jobs.setdefault(alike, []).append(job)
        return lies

    def _result(self, leaf: Leaf, taker: int, ordinal: int, shape: tuple[int, ...], dtype: DType) -> View:
        """Plan the memory of a result; one that is wanted in a buffer gets there behind all else, if not straight."""
        index = len(self._results) - 1
        buffer = self._buffers.get((index, taker))
        if buffer is not None and self._straight and has_no_gaps(buffer):
            return buffer
        made = self._make(PAGE_LOCKED if ordinal == HOST else leaf.mark, ordinal, shape, dtype)
        if buffer is None:
            self._results[index][taker] = self._total - 1
        else:
            self._last.append(Move(buffer, made))
        return made

    def _make(self, mark: DeviceType, ordinal: int, shape: tuple[int, ...], dtype: DType) -> View:
        specs, places = self._makes.setdefault((mark, ordinal), ([], []))
        specs.append((shape, dtype))
        places.append(self._total)
        self._total += 1
        return whole(Place(ordinal, symbol(self._first_made + self._total - 1)), shape, dtype)


def _is_fold(plan: LeafPlan, result: Result) -> bool:
    """Return whether a result is a fold, and nothing else."""
    return len(result.sources) == 1 and result.cut is None and result.sources[0] >= plan.size


def _part(source: View, result: Result) -> View:
    if result.cut is None:
        return source
    axis, place, parts = result.cut
    step = source.shape[axis] // parts
    return source.part(axis, place * step, (place + 1) * step)


def _shape(parts: Sequence[View], result: Result) -> tuple[int, ...]:
    first, axis = parts[0].shape, result.axis
    if len(parts) == 1 or axis is None:
        return first
    return (*first[:axis], sum([part.shape[axis] for part in parts]), *first[axis + 1 :])
