"""The device executor: carries out plans over arrays on GPUs. The last arrival enqueues the work, and blocks no thread.

The event loop's thread only enqueues, which takes some microseconds for the whole nest; a worker thread does so only
if a kernel must be compiled first. Then the loop checks a few times whether the work is done, as it nearly always is
for small values; if not, a worker thread sleeps until it is. Results are made in each replica's own framework, on its
device, or written into its own buffers. Meanwhile the host executor handles leaves on the host.

The work of a collective is planned once, as a `DevicePlan`, and kept. The plan depends on shapes, dtypes, devices and
the existence of buffers, but on no address. Each call then only collects addresses, makes results, and enqueues.

    inputs ── folds ──▶ totals ── moves ──▶ results ── moves ──▶ callers' buffers

What all replicas on one device get is moved there once, for the first of them, and then copied. Host memory counts as a
device: values go through it on their way to other workers, or through NumPy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from aiodist._arrays.device import (
    LEGACY_DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    Allocate,
    DeviceArray,
    DeviceType,
    DType,
    Spec,
)
from aiodist._arrays.leaves import Spec as ValueSpec
from aiodist._collectives.host import HostExecutor, given
from aiodist._collectives.kinds import Collective, LeafPlan, Result
from aiodist._collectives.out import NO_OUTS, Outs, entangled, span
from aiodist._collectives.work import Work
from aiodist._gpu import enqueue
from aiodist._gpu.enqueue import Batch, Completion, symbol
from aiodist._gpu.steps import HOST, Job, Move, Place, View, whole
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import rule_for

Column: TypeAlias = Sequence[DeviceArray]
"""One leaf of all that contribute it, in order."""

Where: TypeAlias = tuple[int, int]
"""A leaf, and a taker of results."""

KEPT: Final = 256
"""How many plans are kept."""

Array = np.ndarray[Any, Any]

_ADDRESS, _ORDINAL, _STREAM = map(attrgetter, ("address", "ordinal", "stream"))


# Plans.


class PageLocked(DeviceType):
    """NumPy arrays in host memory that devices can copy to and from."""

    name = "NumPy"

    def make(self, specs: Sequence[Spec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:  # noqa: ARG002
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        arrays = [
            allocate(HOST, max(1, size))[:size].view(dtype).reshape(shape)
            for size, (shape, dtype) in zip(sizes, specs, strict=True)
        ]
        return [(array, array.ctypes.data) for array in arrays]

    def stream(self, ordinal: int) -> int:  # noqa: ARG002
        return 0  # a stream that nobody looks at


PAGE_LOCKED: Final = PageLocked()


class Leaf(NamedTuple):
    """A leaf on devices: the framework and devices of its arrays, and its plan."""

    mark: DeviceType
    plan: LeafPlan


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """A key for the plans of some leaves on devices, which are used again and again."""

    leaves: Sequence[Leaf]
    op: ReduceOp | None = None
    accumulate: Accumulate = "native"
    devices: Sequence[str] = ()  # on whose streams inputs may have been made
    ragged: bool = False  # inputs of one leaf may differ in shape


class DevicePlan:
    """The planned work for leaves on devices; for the arguments see `DeviceRun`.

    Arrays have numbers: first inputs, then buffers, then those that are made. Buffers are ``straight`` where results
    may be written into them while inputs are read.

    Attributes:
        makes: arrays to be made: by framework and GPU those of shapes and dtypes, with places among all that are made.
        total: how many are made.
        results: by leaf and taker, which it gets; None: has a buffer.
        schedule: what is enqueued.
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
        self.makes: dict[tuple[DeviceType, int], tuple[list[Spec], list[int]]] = {}
        self.total = 0
        self.results: list[list[int | None]] = []
        self._group, self._straight = group, straight
        numbers = itertools.count()
        inputs = [[self._view(next(numbers), array) for array in column] for column in columns]
        self._buffers = {where: self._view(next(numbers), buffer) for where, buffer in buffers.items()}
        self._first_made = next(numbers)
        self._jobs: dict[Any, list[Job]] = {}
        self._moves: list[Move] = []
        self._last: list[Move] = []
        for leaf, column, ordinals in zip(group.leaves, inputs, takers, strict=True):
            self._add(leaf, column, ordinals)
        batches = [Batch(rule, jobs) for (rule, *_), jobs in self._jobs.items()]
        with enqueue.enqueuing:
            arrays = self._first_made + self.total
            self.schedule = enqueue.queue().schedule(batches, [*self._moves, *self._last], arrays)

    @staticmethod
    def _view(number: int, array: DeviceArray) -> View:
        return whole(Place(array.ordinal, symbol(number)), tuple(array.shape), array.dtype)

    def _add(self, leaf: Leaf, inputs: Sequence[View], takers: Sequence[int]) -> None:
        """Plan a leaf's results: those that are folds, then those that are moved, what is alike once a device."""
        plan = leaf.plan
        which = range(len(takers)) if len(plan.results) > 1 else [0] * len(takers)
        self.results.append([None] * len(takers))
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
        for taker, (number, ordinal) in enumerate(zip(which, takers, strict=True)):
            result = plan.results[number]
            if plan.size + fold not in result.sources:
                continue
            if _is_fold(plan, result):
                outputs.append(self._result(leaf, taker, ordinal, shape, rule.result))
            elif ordinal not in lies:
                outputs.append(self._make(leaf.mark, ordinal, shape, rule.result))
            lies.setdefault(ordinal, outputs[-1])
        job = Job(tuple([p.place for p in parts]), tuple([o.place for o in outputs]), math.prod(shape))
        alike = rule, tuple([place.device for place in job.inputs]), tuple([place.device for place in job.outputs])
        self._jobs.setdefault(alike, []).append(job)
        return lies

    def _result(self, leaf: Leaf, taker: int, ordinal: int, shape: tuple[int, ...], dtype: DType) -> View:
        """Plan the memory of a result; one that is wanted in a buffer gets there behind all else, if not straight."""
        index = len(self.results) - 1
        buffer = self._buffers.get((index, taker))
        if buffer is not None and self._straight:
            return buffer
        made = self._make(PAGE_LOCKED if ordinal == HOST else leaf.mark, ordinal, shape, dtype)
        if buffer is None:
            self.results[index][taker] = self.total - 1
        else:
            self._last.append(Move(buffer, made))
        return made

    def _make(self, mark: DeviceType, ordinal: int, shape: tuple[int, ...], dtype: DType) -> View:
        specs, places = self.makes.setdefault((mark, ordinal), ([], []))
        specs.append((shape, dtype))
        places.append(self.total)
        self.total += 1
        return whole(Place(ordinal, symbol(self._first_made + self.total - 1)), shape, dtype)


def _is_fold(plan: LeafPlan, result: Result) -> bool:
    """Return whether a result is a fold and nothing more."""
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


# Carrying them out.


def _allocate(ordinal: int, nbytes: int) -> Any:
    driver = enqueue.queue().driver
    with enqueue.enqueuing, driver.using():
        return driver.host_memory(nbytes) if ordinal == HOST else driver.allocate(ordinal, nbytes)


class DeviceRun:
    """One execution of a device plan.

    There are, by leaf, the inputs, and the GPU, or the host, of each who gets a result (None for those where the inputs
    are); and by leaf and taker a buffer for the result, None where the taker passed none.
    """

    def __init__(
        self,
        group: Leaves,
        columns: Sequence[Column],
        takers: Sequence[Sequence[int]] | None = None,
        outs: Sequence[Sequence[DeviceArray | None]] = (),
    ) -> None:
        self._queue, self._group = enqueue.queue(), group
        inputs = [array for column in columns for array in column]
        found = [((leaf, taker), each) for leaf, row in enumerate(outs) for taker, each in enumerate(row)]
        buffers: dict[Where, DeviceArray] = {where: buffer for where, buffer in found if buffer is not None}
        straight = not buffers or _straight(columns, buffers)
        self._arrays = [*inputs, *buffers.values()]
        ordinals = tuple(map(_ORDINAL, self._arrays))
        specs = tuple([(array.shape, array.dtype) for array in inputs]) if group.ragged else None
        key = group, ordinals, specs, None if takers is None else tuple(map(tuple, takers)), straight, tuple(buffers)
        known = self._queue.known
        plan = known.get(key)
        if plan is None:
            takers = takers or [list(map(_ORDINAL, column)) for column in columns]
            plan = known[key] = DevicePlan(group, columns, takers, buffers, straight=straight)
            if len(known) > KEPT:
                del known[next(iter(known))]
        self._plan = plan
        self._made: list[Any] = [None] * plan.total
        addresses = [0] * plan.total
        self._streams = set(zip(ordinals, map(_STREAM, self._arrays), strict=True))
        for (mark, ordinal), (made_specs, places) in plan.makes.items():
            for place, (array, address) in zip(places, mark.make(made_specs, ordinal, _allocate), strict=True):
                self._made[place], addresses[place] = array, address
            self._streams.add((ordinal, mark.stream(ordinal)))
        self._begins = (*map(_ADDRESS, self._arrays), *addresses)

    def work(self, result: Callable[[list[list[Any]]], Any]) -> Work:
        """Enqueue it, or return it as work where a kernel must be compiled first.

        ``result`` makes the result, in the event loop's thread, of those by leaf and taker: the frameworks' arrays,
        NumPy's on the host, and None for a buffer.
        """
        schedule = self._plan.schedule
        if not schedule.is_loaded() and any(stream == PER_THREAD_DEFAULT_STREAM for _, stream in self._streams):
            self._queue.load(schedule)  # a worker thread would have another stream of that name
        if schedule.is_loaded():
            completion = self._enqueue()
            return Work([[completion.wait]], lambda: result(self._results()), completion.is_done)
        return Work([[self._load_and_enqueue]], lambda: result(self._results()))

    def _load_and_enqueue(self) -> None:
        self._queue.load(self._plan.schedule)
        self._enqueue().wait()

    def _enqueue(self) -> Completion:
        named = {(ordinal, handle or LEGACY_DEFAULT_STREAM) for ordinal, handle in self._streams if ordinal != HOST}
        driver = self._queue.driver
        with enqueue.enqueuing, driver.using():
            streams = [driver.foreign_stream(ordinal, handle) for ordinal, handle in sorted(named)]
            streams += [stream for name in self._group.devices if (stream := driver.used_stream(name)) is not None]
            return self._queue.run(self._plan.schedule, streams, [self._arrays, self._made], self._begins)

    def _results(self) -> list[list[Any]]:
        made = self._made
        for (mark, _), (_, places) in self._plan.makes.items():
            if mark.finishes:
                for place, array in zip(places, mark.finish([made[place] for place in places]), strict=True):
                    made[place] = array
        self._arrays = []
        return [[None if n is None else made[n] for n in numbers] for numbers in self._plan.results]


def _straight(columns: Sequence[Column], buffers: dict[Where, DeviceArray]) -> bool:
    """Return whether results may be written into buffers while inputs are read."""
    inputs = {span(array, leaf) for leaf, column in enumerate(columns) for array in column}
    written = [span(buffer, leaf) for (leaf, _), buffer in buffers.items()]
    if len({array.ordinal for column in columns for array in column}) == 1:  # else another device may still read it
        inputs.difference_update(written)
    return not entangled(inputs, written)


def _columns(single: bool, values: Sequence[Any], positions: Sequence[int]) -> list[Sequence[Any]]:
    """Return, by leaf, what the replicas at some positions contribute."""
    rows = [values[position] for position in positions]
    return [rows] if single else list(zip(*rows, strict=True))


def _nests(single: bool, columns: Sequence[Sequence[Any]], positions: Sequence[int], size: int) -> list[Any]:
    """Return, by position, what the replicas at some positions get of every leaf; None for other positions."""
    nests: list[Any] = [None] * size
    rows = columns[0] if single else map(list, zip(*columns, strict=True))
    for position, row in zip(positions, rows, strict=True):
        nests[position] = row
    return nests


def _of_leaves(passed: Sequence[Sequence[Any] | None], places: Sequence[int]) -> list[list[Any]]:
    """Return, by leaf, the buffers that were passed; None for replicas that passed none."""
    return [[None if found is None else found[place] for found in passed] for place in places]


def _there(spec: ValueSpec) -> dict[int, DeviceType]:
    """Return the indices of leaves on devices, and their frameworks."""
    return {place: mark for place, mark in enumerate(spec.marks) if isinstance(mark, DeviceType)}


class DeviceExecutor:
    """Carries out one collective with arrays on GPUs among its leaves; for the arguments see `execution.executor`.

    There is a result for each position, or target.
    """

    shared = False

    def __init__(
        self,
        collective: Collective,
        size: int,
        absent: Sequence[int] = (),
        accumulate: Accumulate = "native",
        devices: Sequence[str] = (),
        targets: Sequence[int] | None = None,
    ) -> None:
        spec = collective.spec
        assert spec is not None
        self._positions = [position for position in range(size) if position not in absent]
        self._targets, self._single = targets, spec.single
        self._takers: Sequence[int] = self._positions if targets is None else range(len(targets))
        self._size = size if targets is None else len(targets)
        collective = collective.without(absent)
        there, plans = _there(spec), collective.plans(len(self._positions))
        leaves = [Leaf(mark, plans[place]) for place, mark in there.items()]
        ragged = any(None in shape for shape in spec.shapes)
        self._group = Leaves(leaves, collective.op, accumulate, devices, ragged)
        self._there = list(there)
        self._here = [place for place in range(len(plans)) if place not in there]
        self._host = None
        if self._here:
            self._host = HostExecutor(collective.of(self._here), len(self._positions), (), accumulate)

    def run_into(self, values: Sequence[Any], outs: Outs = NO_OUTS) -> Work:
        """Carry it out; what it takes and gives is as `HostExecutor.run_into` says."""
        columns = _columns(self._single, values, self._positions)
        there = [columns[place] for place in self._there]
        passed = [outs.get(position) for position in self._positions]
        on_host: Any = None
        if self._host is not None:
            own = {i: [each[place] for place in self._here] for i, each in enumerate(passed) if each is not None}
            on_host = self._host.run_into(list(zip(*[columns[place] for place in self._here], strict=True)), own)

        def result(by_leaf: Sequence[Sequence[Any]]) -> list[Any]:
            if self._here:
                here = self._columns_here(on_host.result() if type(on_host) is Work else on_host)
                made = dict(zip(self._there, by_leaf, strict=True)) | dict(zip(self._here, here, strict=True))
                by_leaf = [made[place] for place in range(len(made))]
            return _nests(self._single, by_leaf, self._takers, self._size)

        takers = None if self._targets is None else [self._targets] * len(there)
        buffers = _of_leaves(passed, self._there) if outs else []
        work = DeviceRun(self._group, there, takers, buffers).work(result)
        return Work([*on_host.phases, *work.phases], work.result) if type(on_host) is Work else work

    run = run_into

    def _columns_here(self, result: Any) -> list[Sequence[Any]]:
        """Return by leaf on the host what each taker gets: None where it passed a buffer."""
        assert self._host is not None
        if self._host.shared:
            return [[leaf] * len(self._takers) for leaf in result]
        nothing = [None] * len(self._here)
        return list(zip(*[nothing if row is None else row for row in result], strict=True))


# Between devices and the host.


def transfer(
    marks: Sequence[DeviceType],
    columns: Sequence[Column],
    takers: Sequence[Sequence[int]],
    devices: Sequence[str] = (),
    outs: Sequence[Sequence[DeviceArray | None]] = (),
) -> DeviceRun:
    """Copy arrays from devices to the host, or from there to devices, as the given frameworks' arrays.

    There are, by leaf, the inputs, one for all who take it or one for each, and the GPU, or `HOST`, of each who does.
    ``devices`` are logical ones on whose streams inputs may have been made.
    """
    return DeviceRun(_moves(tuple(marks), tuple(map(len, columns)), tuple(devices)), columns, takers, outs)


@lru_cache(maxsize=KEPT)
def _moves(marks: tuple[DeviceType, ...], sizes: tuple[int, ...], devices: tuple[str, ...]) -> Leaves:
    plans = [LeafPlan(size, (), tuple([Result((n,)) for n in range(size)])) for size in sizes]
    return Leaves(list(map(Leaf, marks, plans)), devices=devices, ragged=True)


def staged(leaves: Sequence[Array]) -> list[DeviceArray]:
    """Return copies of arrays in memory that devices can copy from. It may be called in any thread."""
    copies = PAGE_LOCKED.make([(leaf.shape, leaf.dtype) for leaf in leaves], HOST, _allocate)
    for (array, _), leaf in zip(copies, leaves, strict=True):
        array[...] = leaf
    return [DeviceArray(address, array.shape, array.dtype, HOST, 0, array) for array, address in copies]


def to_host(collective: Collective, values: Sequence[Any], devices: Sequence[str] = ()) -> Work:
    """Return the work that gives values, by position, as on the host; None of those that contribute nothing."""
    spec = collective.spec
    assert spec is not None
    there, single = _there(spec), spec.single
    present = [position for position, value in enumerate(values) if value is not None]
    columns = _columns(single, values, present)

    def landed(by_leaf: list[list[Any]]) -> list[Any]:
        for place, found in zip(there, by_leaf, strict=True):
            columns[place] = found
        return _nests(single, columns, present, len(values))

    arrays = [columns[place] for place in there]
    return transfer(list(there.values()), arrays, [[HOST] * len(present)] * len(there), devices).work(landed)


def from_host(
    collective: Collective, values: Sequence[Any], result: Any, devices: Sequence[str] = (), outs: Outs = NO_OUTS
) -> Work:
    """Return the work that gives each replica its result, on the GPUs that its own arrays came from.

    The result on the host is a leaf or a list of leaves for all, or a list of such by position.
    """
    spec = collective.spec
    assert spec is not None
    there, single = _there(spec), spec.single
    present = [position for position, value in enumerate(values) if value is not None]
    columns = _columns(single, [result], [0]) if collective.kind.shared else _columns(single, result, present)
    inputs, passed = _columns(single, values, present), [outs.get(position) for position in present]
    copies = iter(staged([np.asarray(leaf) for place in there for leaf in columns[place]]))
    sources = [[next(copies) for _ in columns[place]] for place in there]
    takers = [[array.ordinal for array in inputs[place]] for place in there]

    def launched(by_leaf: list[list[Any]]) -> list[Any]:
        made = dict(zip(there, by_leaf, strict=True))
        for place, column in enumerate(columns):
            if place not in made:
                shared = collective.kind.shared
                made[place] = list(
                    given(spec.marks[place], column[0] if shared else column, len(present), shared=shared)
                )
                for leaf, each in zip(made[place], passed, strict=True):
                    if each is not None:
                        np.copyto(each[place], leaf)
        return _nests(single, [made[place] for place in range(len(made))], present, len(values))

    buffers = _of_leaves(passed, list(there)) if outs else []
    return transfer(list(there.values()), sources, takers, devices, buffers).work(launched)
