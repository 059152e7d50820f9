"""The device executor: plans carried out over arrays on GPUs, enqueued by the last arrival, awaited by nobody's thread.

The event loop's thread only enqueues, some microseconds for the whole nest; only where a kernel has to be compiled
first does a worker thread do both. Then the loop looks a few times whether the work is done, as small values nearly
always are, and a worker thread sleeps until it is. Results are made in each replica's own framework, on its device, or
written into its own buffers; leaves on the host are the host executor's meanwhile.

What a collective comes to is worked out once, as a `DevicePlan`, and kept. What is left to do each time is to gather
addresses, to make results, and to enqueue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate as running_sums
from operator import attrgetter
from typing import Any, Final

import numpy as np

from aiodist._arrays.device import DeviceArray, DeviceType, DType, Spec
from aiodist._arrays.frameworks import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark
from aiodist._arrays.leaves import Spec as NestSpec
from aiodist._collectives import plan as plans
from aiodist._collectives.device_plan import BYTE, Buffers, Column, DevicePlan, Leaf, Planner, room
from aiodist._collectives.host import HostExecutor
from aiodist._collectives.kinds import Collective
from aiodist._collectives.out import Outs
from aiodist._collectives.plan import Folded, LeafPlan, Result
from aiodist._collectives.work import Work
from aiodist._gpu import enqueue
from aiodist._gpu.cuda_core import array_of
from aiodist._gpu.enqueue import Completion
from aiodist._gpu.steps import HOST
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import Rule, part_of, rule_for

Array = np.ndarray[Any, Any]

KEPT: Final = 256
"""How many plans are kept."""

_ADDRESS, _ORDINAL, _STREAM = map(attrgetter, ("address", "ordinal", "stream"))


def _on_host(specs: Sequence[Spec]) -> tuple[int, list[DeviceArray]]:
    """Make arrays in the host's memory that devices copy to and from; return where they begin, and each of them.

    To lock pages takes a driver some tens of microseconds, so all that is contributed together is in one piece.
    """
    begins = [0, *running_sums(room(*spec) for spec in specs)]
    driver, size = enqueue.queue().driver, max(1, begins.pop())
    with enqueue.enqueuing, driver.using():
        memory = driver.host_memory(size)
    piece = array_of(memory, (size,), BYTE)
    arrays = []
    for (shape, dtype), begin in zip(specs, begins, strict=True):
        part = piece[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        arrays.append(DeviceArray(memory.address + begin, tuple(shape), dtype, HOST, 0, part))
    return memory.address, arrays


def staged(leaves: Sequence[Array]) -> list[DeviceArray]:
    """Return copies of arrays in memory that devices copy from; in any thread."""
    _, made = _on_host([(leaf.shape, leaf.dtype) for leaf in leaves])
    for array, leaf in zip(made, leaves, strict=True):
        array.owner[...] = leaf
    return made


@dataclass(frozen=True, slots=True, eq=False)
class LeafExecutor:
    """What becomes of some leaves on devices, again and again: it stands for their plans."""

    leaves: Sequence[Leaf]
    op: ReduceOp | None = None
    accumulate: Accumulate = "native"
    devices: Sequence[str] = ()  # on whose streams inputs may have been made
    partial: bool = False  # folds are parts of larger ones: they stay in the accumulator
    ragged: bool = False  # inputs of one leaf may differ in shape

    def rule(self, dtype: DType) -> Rule:
        """Return the rule by which leaves of a dtype are folded."""
        assert self.op is not None
        rule = rule_for(self.op, dtype, self.accumulate)
        return part_of(rule) if self.partial else rule


class DeviceRun:
    """Leaves on devices, on their way.

    There are, by leaf, the inputs, and the GPU, or the host, of each who gets a result (None for those where the inputs
    are); and by leaf and taker a buffer for the result, None where the taker passed none.
    """

    def __init__(
        self,
        executor: LeafExecutor,
        columns: Sequence[Column],
        takers: Sequence[Sequence[int]] | None = None,
        outs: Sequence[Sequence[DeviceArray | None]] | None = None,
    ) -> None:
        self._queue = enqueue.queue()
        self._executor = executor
        self._arrays = [array for column in columns for array in column]
        specs = tuple([(array.shape, array.dtype) for array in self._arrays]) if executor.ragged else None
        buffers = None if outs is None else Buffers(outs, columns)
        layout = None if buffers is None else buffers.layout()
        self._arrays += [] if buffers is None else buffers.arrays
        self._ordinals = tuple(map(_ORDINAL, self._arrays))
        key = executor, self._ordinals, specs, None if takers is None else tuple(map(tuple, takers)), layout
        known = self._queue.known
        found: DevicePlan | None = known.get(key)
        if found is None:
            takers = takers or [list(map(_ORDINAL, column)) for column in columns]
            found = known[key] = Planner(executor.leaves, columns, takers, executor.rule, buffers).plan()
            if len(known) > KEPT:
                del known[next(iter(known))]
        self._plan = found
        self._made: list[Any] = []
        self._landing, self._landed = _on_host(self._plan.landing) if self._plan.landing else (0, [])

    def landed(self) -> list[list[Array]]:
        """Return what comes to the host, by leaf and taker; it is there when the work is done."""
        return [[self._landed[-1 - n].owner for n in numbers if n is not None] for numbers in self._plan.results]

    def work(self, result: Callable[[list[list[Any]]], Any]) -> Work:
        """Enqueue it, or return it as work where a kernel must be compiled first.

        ``result`` makes the result, in the event loop's thread, of those by leaf and taker: the frameworks' arrays,
        NumPy's in the host's memory, and None for who passed a buffer.
        """
        schedule = self._plan.schedule
        if not schedule.is_loaded() and PER_THREAD_DEFAULT_STREAM in map(_STREAM, self._arrays):
            self._queue.load(schedule)  # a worker thread would have another stream of that name
        if schedule.is_loaded():
            completion = self._enqueue()
            return Work([[completion.wait]], lambda: result(self._results()), completion.is_done)
        return Work([[self._load_and_enqueue]], lambda: result(self._results()))

    def _load_and_enqueue(self) -> None:
        self._queue.load(self._plan.schedule)
        self._enqueue().wait()

    def _enqueue(self) -> Completion:
        begins = list(map(_ADDRESS, self._arrays))
        foreign = set(zip(self._ordinals, map(_STREAM, self._arrays), strict=True)) | self._make(begins)
        named = sorted({(ordinal, handle or LEGACY_DEFAULT_STREAM) for ordinal, handle in foreign if ordinal != HOST})
        driver = self._queue.driver
        with enqueue.enqueuing, driver.using():
            streams = [driver.foreign_stream(ordinal, handle) for ordinal, handle in named]
            streams += [stream for name in self._executor.devices if (stream := driver.used_stream(name)) is not None]
            keeps = [self._arrays, self._made, self._landed]
            return self._queue.run(self._plan.schedule, streams, keeps, tuple(begins))

    def _make(self, begins: list[int]) -> set[tuple[int, int]]:
        """Make the arrays that results need, and append where they begin; return the streams that they are made on."""
        plan = self._plan
        made: list[Any] = [None] * plan.total
        addresses = [0] * plan.total
        for mark, ordinal, specs, places in plan.makes:
            for place, (array, address) in zip(places, mark.make(specs, ordinal, self._allocate), strict=True):
                made[place], addresses[place] = array, address
        begins += [self._landing, *addresses]
        self._made = made
        return {(ordinal, mark.stream(ordinal)) for mark, ordinal, _, _ in plan.makes}

    def _allocate(self, ordinal: int, nbytes: int) -> Any:
        driver = self._queue.driver
        with enqueue.enqueuing, driver.using():
            return driver.allocate(ordinal, nbytes)

    def _results(self) -> list[list[Any]]:
        """Return results by leaf and taker; for the event loop's thread, when the devices are done."""
        made, landed = self._made, self._landed
        for mark, _, _, places in self._plan.makes:
            if mark.finishes:
                for place, array in zip(places, mark.finish([made[place] for place in places]), strict=True):
                    made[place] = array
        self._arrays = []
        return [
            [None if n is None else made[n] if n >= 0 else landed[-1 - n].owner for n in numbers]
            for numbers in self._plan.results
        ]


def _columns(single: bool, values: Sequence[Any], positions: Sequence[int]) -> list[Sequence[Any]]:
    """Return by leaf what those at some positions contribute."""
    rows = [values[position] for position in positions]
    return [rows] if single else list(zip(*rows, strict=True))


def _nests(single: bool, columns: Sequence[Sequence[Any]], positions: Sequence[int], size: int) -> list[Any]:
    """Return by position, with None for all others, what those at some positions get of every leaf."""
    nests: list[Any] = [None] * size
    rows = columns[0] if single else map(list, zip(*columns, strict=True))
    for position, row in zip(positions, rows, strict=True):
        nests[position] = row
    return nests


def _buffers(outs: Outs | None, positions: Sequence[int], there: Sequence[int]) -> list[list[Any]] | None:
    """Return by leaf on devices the buffers of those at some positions, None for who passed none."""
    if not outs:
        return None
    passed = [outs.get(position) for position in positions]
    return [[None if found is None else found[place] for found in passed] for place in there]


def _there(spec: NestSpec) -> dict[int, DeviceType]:
    """Return the places of leaves on devices, and whose they are."""
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
        there, of_leaves = _there(spec), collective.plans(len(self._positions))
        leaves = [Leaf(mark, of_leaves[place]) for place, mark in there.items()]
        ragged = any(None in shape for shape in spec.shapes)
        self._leaves = LeafExecutor(leaves, collective.op, accumulate, devices, ragged=ragged)
        self._there = list(there)
        self._here = [place for place in range(len(of_leaves)) if place not in there]
        self._host = None
        if self._here:
            self._host = HostExecutor(collective.of(self._here), len(self._positions), (), accumulate)

    def run(self, values: Sequence[Any], outs: Outs | None = None) -> Work:
        """Carry it out; what it takes and gives is as `HostExecutor.general` says."""
        columns = _columns(self._single, values, self._positions)
        there = [columns[place] for place in self._there]
        takers = None if self._targets is None else [self._targets] * len(there)
        on_host = self._run_host(columns, outs or {})

        def result(by_leaf: Sequence[Sequence[Any]]) -> list[Any]:
            if self._here:
                here = self._columns_here(on_host.result() if type(on_host) is Work else on_host)
                made = dict(zip(self._there, by_leaf, strict=True)) | dict(zip(self._here, here, strict=True))
                by_leaf = [made[place] for place in range(len(made))]
            return _nests(self._single, by_leaf, self._takers, self._size)

        work = DeviceRun(self._leaves, there, takers, _buffers(outs, self._positions, self._there)).work(result)
        return Work([*on_host.phases, *work.phases], work.result) if type(on_host) is Work else work

    def _run_host(self, columns: Sequence[Sequence[Any]], outs: Outs) -> Any:
        """Carry out the leaves on the host."""
        if self._host is None:
            return None
        passed = [(taker, outs.get(position)) for taker, position in enumerate(self._positions)]
        buffers = {taker: [found[place] for place in self._here] for taker, found in passed if found is not None}
        return self._host.run(list(zip(*[columns[place] for place in self._here], strict=True)), buffers or None)

    def _columns_here(self, result: Any) -> list[Sequence[Any]]:
        """Return by leaf on the host what each taker gets: None where it passed a buffer."""
        assert self._host is not None
        if self._host.shared:
            return [[leaf] * len(self._takers) for leaf in result]
        nothing = [None] * len(self._here)
        return list(zip(*[nothing if row is None else row for row in result], strict=True))


# Between devices and the host.


def bring_down(
    marks: Sequence[DeviceType],
    columns: Sequence[Column],
    taken: Sequence[int] | None,
    devices: Sequence[str] = (),
    op: ReduceOp | None = None,
    accumulate: Accumulate = "native",
) -> DeviceRun:
    """Bring arrays down to page-locked memory of the host: by leaf, whose they are, and the inputs.

    ``taken`` are the places of those that are needed, which come one by one; None is for one fold of all, in the
    accumulator's dtype, so that nothing is rounded before the end. ``devices`` are logical ones on whose streams inputs
    may have been made.
    """
    size = len(columns[0])
    plan = plans.all_reduce(size) if taken is None else LeafPlan(size, (), tuple([Result((n,)) for n in taken]))
    made = _leaves_between(tuple([Leaf(mark, plan) for mark in marks]), tuple(devices), op, accumulate)
    return DeviceRun(made, columns, [[HOST] * len(plan.results)] * len(columns))


def bring_up(
    marks: Sequence[DeviceType],
    columns: Sequence[Column],
    takers: Sequence[Sequence[int]],
    devices: Sequence[str] = (),
    outs: Sequence[Sequence[DeviceArray | None]] | None = None,
) -> DeviceRun:
    """Bring results up to GPUs: by leaf, whose arrays they become, and one for all who take it, or one for each.

    All come from one call of `staged`. The rest is as in `bring_down` and `DeviceRun`.
    """
    each = [LeafPlan(len(column), (), tuple([Result((n,)) for n in range(len(column))])) for column in columns]
    return DeviceRun(
        _leaves_between(tuple(map(Leaf, marks, each)), tuple(devices), None, "native"), columns, takers, outs
    )


@lru_cache(maxsize=KEPT)
def _leaves_between(
    leaves: tuple[Leaf, ...], devices: tuple[str, ...], op: ReduceOp | None, accumulate: Accumulate
) -> LeafExecutor:
    return LeafExecutor(leaves, op, accumulate, devices, partial=True, ragged=True)


def to_host(
    collective: Collective,
    values: Sequence[Any],
    devices: Sequence[str] = (),
    accumulate: Accumulate = "native",
    *,
    folded: bool = False,
    needed: Sequence[int] | None = None,
) -> Work:
    """Return the work that gives values, by position, as on the host; None of those that contribute nothing.

    With ``folded``, arrays on GPUs become one, a `Folded` in the first place, with None in the others. ``needed`` are
    the positions of those whose arrays on GPUs are needed; None is for all.
    """
    spec = collective.spec
    assert spec is not None
    there, single = _there(spec), spec.single
    present = [position for position, value in enumerate(values) if value is not None]
    columns = _columns(single, values, present)
    taken = None
    if not folded:
        taken = [place for place, position in enumerate(present) if needed is None or position in needed]

    def landed(by_leaf: list[list[Any]]) -> list[Any]:
        for place, found in zip(there, by_leaf, strict=True):
            arrays: list[Any] = [None] * len(present)
            if taken is None:
                arrays[0] = Folded(found[0], columns[place][0].dtype)
            for source, array in zip(taken or (), found, strict=False):
                arrays[source] = array
            columns[place] = arrays
        return _nests(single, columns, present, len(values))

    arrays_there = [columns[place] for place in there]
    return bring_down(list(there.values()), arrays_there, taken, devices, collective.op, accumulate).work(landed)


def from_host(
    collective: Collective, values: Sequence[Any], result: Any, devices: Sequence[str] = (), outs: Outs | None = None
) -> Work:
    """Return the work that gives each replica its result, on the GPUs that its own arrays came from.

    The result on the host is a leaf or a list of leaves for all, or a list of such by position.
    """
    spec, shared = collective.spec, collective.kind.shared
    assert spec is not None
    there, single, marks = _there(spec), spec.single, spec.marks
    present = [position for position, value in enumerate(values) if value is not None]
    columns = _columns(single, [result], [0]) if shared else _columns(single, result, present)
    copies = iter(staged([np.asarray(leaf) for place in there for leaf in columns[place]]))
    sources = [[next(copies) for _ in columns[place]] for place in there]
    inputs = _columns(single, values, present)
    takers = [[array.ordinal for array in inputs[place]] for place in there]
    passed = [(outs or {}).get(position) for position in present]

    def launched(by_leaf: list[list[Any]]) -> list[Any]:
        made = dict(zip(there, by_leaf, strict=True))
        for place, column in enumerate(columns):
            if place not in made:
                made[place] = _given(marks[place], column, shared, [each and each[place] for each in passed])
        return _nests(single, [made[place] for place in range(len(made))], present, len(values))

    buffers = _buffers(outs, present, list(there))
    return bring_up(list(there.values()), sources, takers, devices, buffers).work(launched)


def _given(mark: LeafMark, column: Sequence[Any], shared: bool, buffers: Sequence[Any]) -> list[Any]:
    """Return each replica's result of a leaf on the host, which is in its buffer where it passed one."""
    if not isinstance(mark, HostType):
        found = [column[0]] * len(buffers) if shared else list(column)
    else:
        found = mark.give_each(column[0], len(buffers)) if shared else [mark.give(leaf) for leaf in column]
    for leaf, buffer in zip(found, buffers, strict=True):
        if buffer is not None:
            np.copyto(buffer, leaf)
    return found
