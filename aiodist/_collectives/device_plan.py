"""Plans on devices: which arrays are made where, and what is launched and copied, to carry plans out on GPUs.

    inputs ── folds ──▶ totals ── moves ──▶ results ── moves ──▶ callers' buffers

What all who are on one device get is moved there once, for the first of them, and copied from there. Memory of the host
is a place like a device: to and from it go values whose way leads to other workers, or through NumPy.

All of this depends on shapes, dtypes, devices and the layout of buffers, and on no address: arrays have numbers, in
this order: inputs, buffers, the piece of the host's memory that results come to, arrays that are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from aiodist._arrays.device import DeviceArray, DeviceType, DType, Spec
from aiodist._collectives import out
from aiodist._collectives.plan import LeafPlan, Result
from aiodist._gpu import enqueue
from aiodist._gpu.schedule import Batch, Schedule, symbol
from aiodist._gpu.steps import APART, HOST, Job, Move, Place, View, has_no_gaps, whole
from aiodist_kernels.rules import Rule

Column: TypeAlias = Sequence[DeviceArray]
"""One leaf of all that contribute it, in order."""

BYTE: Final = np.dtype(np.uint8)


class Makes(NamedTuple):
    """Arrays to be made of one framework, on one GPU."""

    mark: DeviceType  # the framework
    ordinal: int
    specs: Sequence[Spec]  # shape and dtype of each
    places: Sequence[int]  # of each, among all that are made


class DevicePlan(NamedTuple):
    """What leaves on devices come to."""

    landing: Sequence[Spec]  # of results in the host's memory: one piece, numbered behind inputs and buffers
    makes: Sequence[Makes]  # arrays to be made, whose numbers follow
    total: int  # how many they are
    results: Sequence[Sequence[int | None]]  # by leaf and taker: which it gets; -1 the first landed; None: has a buffer
    schedule: Schedule  # what is enqueued


class Leaf(NamedTuple):
    """A leaf on devices: whose arrays it has, and what becomes of them."""

    mark: DeviceType
    plan: LeafPlan


class Buffers:
    """The buffers on devices that takers passed for their results, by leaf and taker; None where they passed none.

    They are ``straight`` where results may be written into them while inputs are read.
    """

    def __init__(self, outs: Sequence[Sequence[DeviceArray | None]], columns: Sequence[Column]) -> None:
        self.arrays: list[DeviceArray] = []
        self._numbers: dict[tuple[int, int], int] = {}
        for leaf, buffers in enumerate(outs):
            for taker, buffer in enumerate(buffers):
                if buffer is not None:
                    self._numbers[leaf, taker] = len(self.arrays)
                    self.arrays.append(buffer)
        inputs = [out.span(array, leaf) for leaf, column in enumerate(columns) for array in column]
        written = [out.span(self.arrays[number], leaf) for (leaf, _), number in self._numbers.items()]
        one_device = len({array.ordinal for column in columns for array in column}) == 1
        self.straight = not out.entangled(inputs, written, in_place=one_device)

    def layout(self) -> Any:
        """Return what a plan depends on."""
        return self.straight, tuple(self._numbers), tuple([buffer.strides for buffer in self.arrays])

    def known(self, leaf: int, taker: int, first: int) -> View | None:
        """Return a taker's buffer for a leaf; the number of the first buffer is ``first``."""
        number = self._numbers.get((leaf, taker))
        if number is None:
            return None
        buffer = self.arrays[number]
        found = whole(Place(buffer.ordinal, symbol(first + number)), buffer.shape, buffer.dtype)
        return found if buffer.strides is None else found._replace(strides=buffer.strides)


class Planner:
    """Works out what leaves come to; for the arguments see `device.DeviceRun`. Inputs on the host are in one piece."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        columns: Sequence[Column],
        takers: Sequence[Sequence[int]],
        rule: Callable[[DType], Rule],
        buffers: Buffers | None = None,
    ) -> None:
        self._rule = rule
        self._buffers = buffers
        self._inputs = sum(map(len, columns))
        self._host = self._inputs + (0 if buffers is None else len(buffers.arrays))
        self._landing: list[Spec] = []
        self._landed = 0  # bytes
        self._total = 0  # arrays to be made
        self._makes: dict[tuple[DeviceType, int], tuple[list[Spec], list[int]]] = {}
        self._jobs: dict[Any, list[Job]] = {}
        self._moves: list[Move] = []
        self._last: list[Move] = []
        self._results: list[list[int | None]] = []
        number = 0
        piece: tuple[int, int] | None = None  # inputs on the host are in one, see `staged`
        for leaf, column, ordinals in zip(leaves, columns, takers, strict=True):
            inputs = []
            for array in column:
                address = symbol(number)
                if array.ordinal == HOST:
                    piece = piece or (address, array.address)
                    address = piece[0] + array.address - piece[1]
                inputs.append(whole(Place(array.ordinal, address), tuple(array.shape), array.dtype))
                number += 1
            self._add(leaf, inputs, ordinals)

    def plan(self) -> DevicePlan:
        """Return what it has come to."""
        batches = [Batch(rule, jobs) for (rule, *_), jobs in self._jobs.items()]
        with enqueue.enqueuing:
            schedule = enqueue.queue().schedule(batches, [*self._moves, *self._last], self._host + 1 + self._total)
        makes = [Makes(*key, *group) for key, group in self._makes.items()]
        return DevicePlan(self._landing, makes, self._total, self._results, schedule)

    def _add(self, leaf: Leaf, inputs: Sequence[View], takers: Sequence[int]) -> None:
        """Plan a leaf's results: those that are folds, then those that are moved, what is alike once a device."""
        plan = leaf.plan
        which = range(len(takers)) if len(plan.results) > 1 else [0] * len(takers)
        self._results.append([None] * len(takers))
        totals = [self._fold(leaf, fold, inputs, takers, which) for fold in range(len(plan.folds))]
        firsts: dict[tuple[int, int], View] = {}
        for taker, (number, ordinal) in enumerate(zip(which, takers, strict=True)):
            result = plan.results[number]
            if ordinal != HOST and _folds(plan, result) is not None:
                continue
            home = ordinal if ordinal != HOST else inputs[0].place.device
            sources = [inputs[i] if i < plan.size else totals[i - plan.size][home] for i in result.sources]
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
        shape, rule = parts[0].shape, self._rule(parts[0].dtype)
        outputs: list[View] = []
        lies: dict[int, View] = {}
        lacking: list[int] = []
        for taker, (number, ordinal) in enumerate(zip(which, takers, strict=True)):
            result = plan.results[number]
            if ordinal != HOST and _folds(plan, result) == fold:
                outputs.append(self._result(leaf, taker, ordinal, shape, rule.result))
                lies.setdefault(ordinal, outputs[-1])
            elif plan.size + fold in result.sources:
                lacking.append(ordinal if ordinal != HOST else inputs[0].place.device)
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
        buffer = None if self._buffers is None else self._buffers.known(index, taker, self._inputs)
        if buffer is not None and self._buffers is not None and self._buffers.straight and has_no_gaps(buffer):
            return buffer
        if ordinal == HOST:
            self._landing.append((shape, dtype))
            self._results[index][taker] = -len(self._landing)
            begin, self._landed = self._landed, self._landed + room(shape, dtype)
            return whole(Place(HOST, symbol(self._host) + begin), shape, dtype)
        made = self._make(leaf.mark, ordinal, shape, dtype)
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
        return whole(Place(ordinal, symbol(self._host + self._total)), shape, dtype)


def _folds(plan: LeafPlan, result: Result) -> int | None:
    """Return which fold a result is, if it is nothing else."""
    (first, *others), cut, _ = result
    return None if others or cut is not None or first < plan.size else first - plan.size


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


def room(shape: Sequence[int], dtype: DType) -> int:
    """Return the bytes that an array takes in a piece of the host's memory."""
    return -(-math.prod(shape) * dtype.itemsize // APART) * APART
