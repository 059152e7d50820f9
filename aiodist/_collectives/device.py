"""The device executor: carries out plans over arrays on GPUs. The last replica to post enqueues the work.

The event loop's thread only enqueues, which takes some microseconds for the whole nest; a worker thread does it if a
kernel must be compiled first. Then the loop checks a few times whether the work is done, as it nearly always is for
small values; if not, a worker thread waits for it. Results are made in each replica's own framework, on its device, or
written into its own buffers. The host executor handles the leaves on the host meanwhile.

A collective's work is planned once, as a `DevicePlan`, and cached. The plan depends on shapes, dtypes, devices and
which buffers there are, but on no address. Each call then only collects addresses, allocates results, and enqueues.

    inputs ── folds ──▶ totals ── moves ──▶ results ── moves ──▶ callers' buffers

What all replicas on one device get is moved there once and then copied. Host memory counts as a device: values pass
through it on their way to other workers, or through NumPy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from aiodist._arrays.device import (
    LEGACY_DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    Allocate,
    ArraySpec,
    DeviceArray,
    DeviceType,
)
from aiodist._arrays.leaves import Spec
from aiodist._collectives.host import HostExecutor, in_framework
from aiodist._collectives.kinds import Collective, LeafPlan, Result
from aiodist._collectives.out import NO_OUTS, Outs, bounds, conflicting
from aiodist._collectives.work import Work
from aiodist._gpu import enqueue
from aiodist._gpu.enqueue import Batch, Completion, symbol
from aiodist._gpu.steps import HOST, Job, Move, Place, View, contiguous
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import DType, rule_for

Column: TypeAlias = Sequence[DeviceArray]  # one leaf of every replica that contributes it, in order

MAX_PLANS: Final = 256

_ADDRESS, _ORDINAL, _STREAM = map(attrgetter, ("address", "ordinal", "stream"))


# Plans.


class PageLocked(DeviceType):
    """NumPy arrays in host memory that devices can copy to and from."""

    name = "NumPy"

    def make(self, specs: Sequence[ArraySpec], ordinal: int, allocate: Allocate) -> list[tuple[Any, int]]:  # noqa: ARG002
        made = []
        for shape, dtype in specs:
            size = math.prod(shape) * dtype.itemsize
            array = allocate(HOST, max(1, size))[:size].view(dtype).reshape(shape)
            made.append((array, array.ctypes.data))
        return made

    def stream(self, ordinal: int) -> int:  # noqa: ARG002
        return 0  # never used


PAGE_LOCKED: Final = PageLocked()


class Leaf(NamedTuple):
    """A leaf on devices: the framework of its arrays, and its plan."""

    mark: DeviceType
    plan: LeafPlan


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """Some leaves on devices, the same object in each call: the key of their cached plans."""

    leaves: Sequence[Leaf]
    op: ReduceOp | None = None
    accumulate: Accumulate = "native"
    devices: Sequence[str] = ()  # logical devices on whose streams inputs may have been made
    ragged: bool = False  # the inputs of one leaf may differ in shape


class DevicePlan:
    """The planned work for leaves on devices; see `DeviceRun` for the arguments.

    Arrays are numbered: first the inputs, then the buffers, then the arrays to be made. With ``direct`` results may be
    written into buffers while inputs are read.
    """

    def __init__(
        self,
        group: Leaves,
        columns: Sequence[Column],
        receivers: Sequence[Sequence[int]],
        buffers: Mapping[tuple[int, int], DeviceArray],
        *,
        direct: bool,
    ) -> None:
        # By framework and GPU, the arrays to be made: shapes and dtypes, and indices among all that are made.
        self.makes: dict[tuple[DeviceType, int], tuple[list[ArraySpec], list[int]]] = {}
        self.total = 0  # of the arrays to be made
        self.results: list[list[int | None]] = []  # by leaf and receiver, an index of these; None if it has a buffer
        self._group, self._direct = group, direct
        numbers = itertools.count()
        inputs = [[self._view(next(numbers), array) for array in column] for column in columns]
        self._buffers = {key: self._view(next(numbers), buffer) for key, buffer in buffers.items()}
        self._first_made = next(numbers)
        self._jobs: dict[Any, list[Job]] = {}
        self._moves: list[Move] = []
        self._last: list[Move] = []
        for leaf, column, ordinals in zip(group.leaves, inputs, receivers, strict=True):
            self._add(leaf, column, ordinals)
        batches = [Batch(rule, jobs) for (rule, *_), jobs in self._jobs.items()]
        with enqueue.enqueuing:
            arrays = self._first_made + self.total
            self.schedule = enqueue.queue().schedule(batches, [*self._moves, *self._last], arrays)

    @staticmethod
    def _view(number: int, array: DeviceArray) -> View:
        return contiguous(Place(array.ordinal, symbol(number)), tuple(array.shape), array.dtype)

    def _add(self, leaf: Leaf, inputs: Sequence[View], receivers: Sequence[int]) -> None:
        """Plan a leaf's results: first the folds, then those that are moved."""
        plan = leaf.plan
        results = plan.results if len(plan.results) > 1 else plan.results * len(receivers)
        wanted = list(zip(receivers, results, strict=True))
        self.results.append([None] * len(receivers))
        totals = [self._fold(leaf, fold, inputs, wanted) for fold in range(len(plan.folds))]
        firsts: dict[tuple[int, Result], View] = {}
        for receiver, (ordinal, result) in enumerate(wanted):
            if _is_fold(plan, result):
                continue
            parts = [inputs[i] if i < plan.size else totals[i - plan.size][ordinal] for i in result.sources]
            if cut := result.cut:
                parts = [part.part(cut.axis, *cut.bounds(part.shape[cut.axis])) for part in parts]
            shape, axis, end = parts[0].shape, result.axis or 0, 0
            if len(parts) > 1:
                shape = (*shape[:axis], sum([part.shape[axis] for part in parts]), *shape[axis + 1 :])
            target = self._result(leaf, receiver, ordinal, shape, parts[0].dtype)
            first = firsts.setdefault((ordinal, result), target)
            if first is not target:
                self._moves.append(Move(target, first))
            elif len(parts) == 1:
                self._moves.append(Move(target, parts[0]))
            else:
                for part in parts:
                    begin, end = end, end + part.shape[axis]
                    self._moves.append(Move(target.part(axis, begin, end), part))

    def _fold(
        self, leaf: Leaf, fold: int, inputs: Sequence[View], wanted: Sequence[tuple[int, Result]]
    ) -> dict[int, View]:
        """Plan a fold into the results that equal it, and those that are made from it; return one total per device."""
        plan, parts = leaf.plan, [inputs[i] for i in leaf.plan.folds[fold]]
        assert self._group.op is not None
        shape, rule = parts[0].shape, rule_for(self._group.op, parts[0].dtype, self._group.accumulate)
        outputs: list[View] = []
        totals: dict[int, View] = {}
        for receiver, (ordinal, result) in enumerate(wanted):
            if plan.size + fold not in result.sources:
                continue
            if _is_fold(plan, result):
                outputs.append(self._result(leaf, receiver, ordinal, shape, rule.result))
            elif ordinal not in totals:
                outputs.append(self._make(leaf.mark, ordinal, shape, rule.result))
            totals.setdefault(ordinal, outputs[-1])
        job = Job(tuple([p.place for p in parts]), tuple([o.place for o in outputs]), math.prod(shape))
        key = rule, tuple([place.device for place in job.inputs]), tuple([place.device for place in job.outputs])
        self._jobs.setdefault(key, []).append(job)
        return totals

    def _result(self, leaf: Leaf, receiver: int, ordinal: int, shape: tuple[int, ...], dtype: DType) -> View:
        """Plan the memory of a result; unless ``direct``, a result with a buffer is copied there at the very end."""
        index = len(self.results) - 1
        buffer = self._buffers.get((index, receiver))
        if buffer is not None and self._direct:
            return buffer
        made = self._make(PAGE_LOCKED if ordinal == HOST else leaf.mark, ordinal, shape, dtype)
        if buffer is None:
            self.results[index][receiver] = self.total - 1
        else:
            self._last.append(Move(buffer, made))
        return made

    def _make(self, mark: DeviceType, ordinal: int, shape: tuple[int, ...], dtype: DType) -> View:
        specs, indices = self.makes.setdefault((mark, ordinal), ([], []))
        specs.append((shape, dtype))
        indices.append(self.total)
        self.total += 1
        return contiguous(Place(ordinal, symbol(self._first_made + self.total - 1)), shape, dtype)


def _is_fold(plan: LeafPlan, result: Result) -> bool:
    """Return whether a result equals a fold."""
    return len(result.sources) == 1 and result.cut is None and result.sources[0] >= plan.size


# Carrying them out.


def _allocate(ordinal: int, nbytes: int) -> Any:
    driver = enqueue.queue().driver
    with enqueue.enqueuing, driver.using():
        return driver.host_memory(nbytes) if ordinal == HOST else driver.allocate(ordinal, nbytes)


class DeviceRun:
    """One execution of a device plan.

    There are, by leaf, the inputs, and the GPU, or the host, of each receiver of a result (None: where the inputs are);
    and by leaf and receiver a buffer for the result, or None if the receiver passed none.
    """

    def __init__(
        self,
        group: Leaves,
        columns: Sequence[Column],
        receivers: Sequence[Sequence[int]] | None = None,
        outs: Sequence[Sequence[DeviceArray | None]] = (),
    ) -> None:
        self._queue, self._group = enqueue.queue(), group
        inputs = [array for column in columns for array in column]
        passed = [((leaf, receiver), each) for leaf, row in enumerate(outs) for receiver, each in enumerate(row)]
        buffers = {key: buffer for key, buffer in passed if buffer is not None}
        direct = not buffers or _may_write_while_reading(columns, buffers)
        self._arrays = [*inputs, *buffers.values()]
        ordinals = tuple(map(_ORDINAL, self._arrays))
        specs = tuple([(array.shape, array.dtype) for array in inputs]) if group.ragged else None
        key = group, ordinals, specs, None if receivers is None else tuple(map(tuple, receivers)), direct, (*buffers,)
        known = self._queue.known
        plan = known.get(key)
        if plan is None:
            receivers = receivers or [list(map(_ORDINAL, column)) for column in columns]
            plan = known[key] = DevicePlan(group, columns, receivers, buffers, direct=direct)
            if len(known) > MAX_PLANS:
                del known[next(iter(known))]
        self._plan = plan
        self._made: list[Any] = [None] * plan.total
        addresses = [0] * plan.total
        self._streams = set(zip(ordinals, map(_STREAM, self._arrays), strict=True))
        for (mark, ordinal), (made_specs, indices) in plan.makes.items():
            for index, (array, address) in zip(indices, mark.make(made_specs, ordinal, _allocate), strict=True):
                self._made[index], addresses[index] = array, address
            self._streams.add((ordinal, mark.stream(ordinal)))
        self._begins = (*map(_ADDRESS, self._arrays), *addresses)

    def work(self, result: Callable[[list[list[Any]]], Any]) -> Work:
        """Enqueue it, or return it as work for a thread if a kernel must be compiled first.

        ``result``, called in the event loop's thread, makes the result of the arrays by leaf and receiver: the
        framework's, NumPy's on the host, and None for a buffer.
        """
        schedule = self._plan.schedule
        if not schedule.is_loaded():
            if all(stream != PER_THREAD_DEFAULT_STREAM for _, stream in self._streams):
                return Work([[self._load_and_enqueue]], lambda: result(self._results()))
            self._queue.load(schedule)  # here, because a worker thread would have another stream of that name
        completion = self._enqueue()
        return Work([[completion.wait]], lambda: result(self._results()), completion.is_done)

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
        for (mark, _), (_, indices) in self._plan.makes.items():
            if mark.finishes:
                for index, array in zip(indices, mark.finish([made[index] for index in indices]), strict=True):
                    made[index] = array
        self._arrays = []
        return [[None if n is None else made[n] for n in numbers] for numbers in self._plan.results]


def _may_write_while_reading(columns: Sequence[Column], buffers: Mapping[tuple[int, int], DeviceArray]) -> bool:
    """Return whether results may be written into buffers while inputs are read."""
    inputs = {bounds(array, leaf) for leaf, column in enumerate(columns) for array in column}
    written = [bounds(buffer, leaf) for (leaf, _), buffer in buffers.items()]
    if len({array.ordinal for column in columns for array in column}) == 1:  # else another device may still read it
        inputs.difference_update(written)
    return not conflicting(inputs, written)


def _columns(spec: Spec, values: Sequence[Any], positions: Sequence[int]) -> list[Sequence[Any]]:
    """Return, by leaf, what the replicas at some positions contribute."""
    return spec.columns([values[position] for position in positions])


def _nests(spec: Spec, columns: Sequence[Sequence[Any]], positions: Sequence[int], size: int) -> list[Any]:
    """Return, by position, what replicas at some positions get of all leaves; None for other positions."""
    nests: list[Any] = [None] * size
    rows = columns[0] if spec.single else map(list, zip(*columns, strict=True))
    for position, row in zip(positions, rows, strict=True):
        nests[position] = row
    return nests


def _buffers(passed: Sequence[Sequence[Any] | None], indices: Iterable[int]) -> list[list[Any]]:
    """Return, by leaf, the buffers that were passed; None for replicas that passed none."""
    return [[None if each is None else each[index] for each in passed] for index in indices]


def _device_leaves(spec: Spec) -> dict[int, DeviceType]:
    """Return the indices of leaves on devices, and their frameworks."""
    return {index: mark for index, mark in enumerate(spec.marks) if isinstance(mark, DeviceType)}


class DeviceExecutor:
    """Carries out one collective with arrays on GPUs among its leaves; see `execution.executor` for the arguments.

    There is a result for each position, or for each target.
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
        self._spec = spec
        self._positions = sorted({*range(size)}.difference(absent))
        self._targets = targets
        self._receivers: Sequence[int] = self._positions if targets is None else range(len(targets))
        self._size = size if targets is None else len(targets)
        collective = collective.without(absent)
        on_devices, plans = _device_leaves(spec), collective.plans(len(self._positions))
        leaves = [Leaf(mark, plans[index]) for index, mark in on_devices.items()]
        ragged = any(None in shape for shape in spec.shapes)
        self._group = Leaves(leaves, collective.op, accumulate, devices, ragged)
        self._on_devices = list(on_devices)
        self._on_host = [index for index in range(len(plans)) if index not in on_devices]
        self._host: HostExecutor | None = None
        if self._on_host:
            self._host = HostExecutor(collective.of(self._on_host), len(self._positions), (), accumulate)

    def run_into(self, values: Sequence[Any], outs: Outs = NO_OUTS) -> Work:
        """Carry it out; for arguments and results see `HostExecutor.run_into`."""
        columns = _columns(self._spec, values, self._positions)
        on_devices = [columns[index] for index in self._on_devices]
        passed = [outs.get(position) for position in self._positions]
        host = self._host
        on_host: Any = None
        if host is not None:
            own = {i: [each[index] for index in self._on_host] for i, each in enumerate(passed) if each is not None}
            on_host = host.run_into(list(zip(*[columns[index] for index in self._on_host], strict=True)), own)

        def result(by_leaf: Sequence[Sequence[Any]]) -> list[Any]:
            if host is not None:
                found = on_host.result() if type(on_host) is Work else on_host
                if host.shared:
                    rest: Any = [[leaf] * len(self._receivers) for leaf in found]
                else:
                    nothing = [None] * len(self._on_host)  # for a replica that passed buffers
                    rest = zip(*[nothing if row is None else row for row in found], strict=True)
                made = dict(zip([*self._on_devices, *self._on_host], [*by_leaf, *rest], strict=True))
                by_leaf = [made[index] for index in range(len(made))]
            return _nests(self._spec, by_leaf, self._receivers, self._size)

        receivers = None if self._targets is None else [self._targets] * len(on_devices)
        buffers = _buffers(passed, self._on_devices) if outs else []
        work = DeviceRun(self._group, on_devices, receivers, buffers).work(result)
        return Work([*on_host.phases, *work.phases], work.result) if type(on_host) is Work else work

    run = run_into


# Between devices and the host.


def transfer(
    marks: Sequence[DeviceType],
    columns: Sequence[Column],
    receivers: Sequence[Sequence[int]],
    devices: Sequence[str] = (),
    outs: Sequence[Sequence[DeviceArray | None]] = (),
) -> DeviceRun:
    """Copy arrays from devices to the host, or from the host to devices, as arrays of the given frameworks.

    By leaf, there is one array for all receivers, or one for each. ``devices`` are logical devices on whose streams
    arrays may have been made. See `DeviceRun`.
    """
    return DeviceRun(_moves(tuple(marks), tuple(map(len, columns)), tuple(devices)), columns, receivers, outs)


@lru_cache(maxsize=MAX_PLANS)
def _moves(marks: tuple[DeviceType, ...], sizes: tuple[int, ...], devices: tuple[str, ...]) -> Leaves:
    plans = [LeafPlan(size, (), tuple([Result((n,)) for n in range(size)])) for size in sizes]
    return Leaves(list(map(Leaf, marks, plans)), devices=devices, ragged=True)


def staged(leaves: Sequence[np.ndarray[Any, Any]]) -> list[DeviceArray]:
    """Return copies of arrays in memory that devices can copy from. May be called in any thread."""
    copies = PAGE_LOCKED.make([(leaf.shape, leaf.dtype) for leaf in leaves], HOST, _allocate)
    for (array, _), leaf in zip(copies, leaves, strict=True):
        array[...] = leaf
    return [DeviceArray(address, array.shape, array.dtype, HOST, 0, array) for array, address in copies]


def to_host(collective: Collective, values: Sequence[Any], devices: Sequence[str] = ()) -> Work:
    """Return the work that copies values to the host; by position, None where a replica contributes nothing."""
    spec = collective.spec
    assert spec is not None
    on_devices = _device_leaves(spec)
    present = [position for position, value in enumerate(values) if value is not None]
    columns = _columns(spec, values, present)

    def landed(by_leaf: list[list[Any]]) -> list[Any]:
        for index, copies in zip(on_devices, by_leaf, strict=True):
            columns[index] = copies
        return _nests(spec, columns, present, len(values))

    arrays = [columns[index] for index in on_devices]
    return transfer(list(on_devices.values()), arrays, [[HOST] * len(present)] * len(arrays), devices).work(landed)


def from_host(
    collective: Collective, values: Sequence[Any], result: Any, devices: Sequence[str] = (), outs: Outs = NO_OUTS
) -> Work:
    """Return the work that gives each replica its result on the GPUs that its own arrays came from.

    ``result``, on the host, is a leaf or a list of leaves for all replicas, or a list of these by position.
    """
    spec, shared = collective.spec, collective.kind.shared
    assert spec is not None
    on_devices = _device_leaves(spec)
    present = [position for position, value in enumerate(values) if value is not None]
    columns = spec.columns([result]) if shared else _columns(spec, result, present)
    inputs, passed = _columns(spec, values, present), [outs.get(position) for position in present]
    copies = iter(staged([np.asarray(leaf) for index in on_devices for leaf in columns[index]]))
    sources = [[next(copies) for _ in columns[index]] for index in on_devices]
    receivers = [[array.ordinal for array in inputs[index]] for index in on_devices]

    def launched(by_leaf: list[list[Any]]) -> list[Any]:
        made = dict(zip(on_devices, by_leaf, strict=True))
        for index, column in enumerate(columns):
            if index not in made:
                leaves = in_framework(spec.marks[index], column[0] if shared else column, len(present), shared=shared)
                made[index] = list(leaves)
                for leaf, each in zip(leaves, passed, strict=True):
                    if each is not None:
                        np.copyto(each[index], leaf)
        return _nests(spec, [made[index] for index in range(len(made))], present, len(values))

    buffers = _buffers(passed, on_devices) if outs else []
    return transfer(list(on_devices.values()), sources, receivers, devices, buffers).work(launched)
