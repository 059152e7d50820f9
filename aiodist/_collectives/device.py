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
from aiodist._collectives import plan as plans
from aiodist._collectives.device_plan import BYTE, Buffers, Column, DevicePlan, Leaf, Planner, room
from aiodist._collectives.host import HostExecutor
from aiodist._collectives.kinds import Collective
from aiodist._collectives.out import Outs
from aiodist._collectives.plan import Folded, LeafPlan, Result
from aiodist._collectives.work import Work
from aiodist._gpu import enqueue
from aiodist._gpu.enqueue import Completion
from aiodist._gpu.pinned import array_of
from aiodist._gpu.steps import HOST
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import Rule, part_of, rule_for

Array = np.ndarray[Any, Any]

KEPT: Final = 256
"""How many plans are kept."""

_SITE = attrgetter("ordinal", "stream")


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

    There are, by leaf, the inputs, and the GPU, or the host, of each who gets a result; and by leaf and taker a buffer
    for the result, None where the taker passed none.
    """

    def __init__(
        self,
        executor: LeafExecutor,
        columns: Sequence[Column],
        takers: Sequence[Sequence[int]],
        outs: Sequence[Sequence[DeviceArray | None]] | None = None,
    ) -> None:
        self._queue = enqueue.queue()
        self._executor = executor
        self._columns = columns
        self._buffers = None if outs is None else Buffers(outs, columns)
        self._inputs = [array for column in columns for array in column]
        self._plan = self._known_plan(takers)
        self._made: list[Any] = []
        self._landing, self._landed = _on_host(self._plan.landing) if self._plan.landing else (0, [])

    def _known_plan(self, takers: Sequence[Sequence[int]]) -> DevicePlan:
        executor, known, buffers = self._executor, self._queue.known, self._buffers
        specs = tuple([(array.shape, array.dtype) for array in self._inputs]) if executor.ragged else None
        layout = None if buffers is None else buffers.layout()
        key = executor, tuple([array.ordinal for array in self._inputs]), specs, tuple(map(tuple, takers)), layout
        found: DevicePlan | None = known.get(key)
        if found is None:
            found = known[key] = Planner(executor.leaves, self._columns, takers, executor.rule, buffers).plan()
            if len(known) > KEPT:
                del known[next(iter(known))]
        return found

    def landed(self) -> list[list[Array]]:
        """Return what comes to the host, by leaf and taker; it is there when the work is done."""
        return [[self._landed[-1 - n].owner for n in numbers if n is not None] for numbers in self._plan.results]

    def work(self, result: Callable[[list[list[Any]]], Any]) -> Work:
        """Enqueue it, or return it as work where a kernel must be compiled first.

        ``result`` makes the result, in the event loop's thread, of those by leaf and taker: the frameworks' arrays,
        NumPy's in the host's memory, and None for who passed a buffer.
        """
        schedule = self._plan.schedule
        if not schedule.is_loaded() and any(array.stream == PER_THREAD_DEFAULT_STREAM for array in self._inputs):
            self._queue.load(schedule)  # a worker thread would have another stream of that name
        if schedule.is_loaded():
            completion = self._enqueue()
            return Work([[completion.wait]], lambda: result(self._results()), completion.is_done)
        return Work([[self._load_and_enqueue]], lambda: result(self._results()))

    def _load_and_enqueue(self) -> None:
        self._queue.load(self._plan.schedule)
        self._enqueue().wait()

    def _enqueue(self) -> Completion:
        begins = [array.address for array in self._inputs]
        foreign = set(map(_SITE, self._inputs))
        if self._buffers is not None:
            begins += [buffer.address for buffer in self._buffers.arrays]
            foreign |= set(map(_SITE, self._buffers.arrays))
        foreign |= self._make(begins)
        named = sorted({(ordinal, handle or LEGACY_DEFAULT_STREAM) for ordinal, handle in foreign if ordinal != HOST})
        driver = self._queue.driver
        with enqueue.enqueuing, driver.using():
            streams = [driver.foreign_stream(ordinal, handle) for ordinal, handle in named]
            streams += [stream for name in self._executor.devices if (stream := driver.used_stream(name)) is not None]
            keeps = [self._inputs, self._buffers, self._made, self._landed]
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
        self._inputs, self._columns = [], []
        return [
            [None if n is None else made[n] if n >= 0 else landed[-1 - n].owner for n in numbers]
            for numbers in self._plan.results
        ]


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
        marks = spec.marks
        self._positions = [position for position in range(size) if position not in absent]
        self._size, self._targets, self._single = size, targets, spec.single
        self._there = [place for place, mark in enumerate(marks) if isinstance(mark, DeviceType)]
        self._here = [place for place, mark in enumerate(marks) if not isinstance(mark, DeviceType)]
        of_leaves = collective.without(absent).plans(len(self._positions))
        leaves = [Leaf(mark, of_leaves[place]) for place, mark in enumerate(marks) if isinstance(mark, DeviceType)]
        ragged = any(None in shape for shape in spec.shapes)
        self._leaves = LeafExecutor(leaves, collective.op, accumulate, devices, ragged=ragged)
        self._host = HostExecutor(collective.of(self._here), size, absent, accumulate) if self._here else None

    def run(self, values: Sequence[Any], outs: Outs | None = None) -> Work:
        """Carry it out; what it takes and gives is as `HostExecutor.general` says."""
        rows = [[value] for value in values] if self._single else values
        present = [rows[position] for position in self._positions]
        columns = [[row[place] for row in present] for place in self._there]
        takers = [self._targets or [array.ordinal for array in column] for column in columns]
        wanted = None
        if outs:
            buffers = [outs.get(position) for position in self._positions]
            wanted = [[None if found is None else found[place] for found in buffers] for place in self._there]
        on_host = self._run_host(rows, outs or {})
        work = DeviceRun(self._leaves, columns, takers, wanted).work(self._collected)
        if on_host is None:
            return work
        phases = on_host.phases if type(on_host) is Work else []
        there, ready = work.result, None if phases else work.ready
        return Work(
            [*phases, *work.phases],
            lambda: self._joined(there(), on_host.result() if type(on_host) is Work else on_host),
            ready,
        )

    def _run_host(self, rows: Sequence[Any], outs: Outs) -> Any:
        """Carry out the leaves on the host."""
        if self._host is None:
            return None
        some = [[row[place] for place in self._here] if row is not None else None for row in rows]
        buffers = {position: [found[place] for place in self._here] for position, found in outs.items()}
        return self._host.run(some, buffers or None)

    def _collected(self, by_leaf: list[list[Any]]) -> list[Any]:
        """Return results by target, or by position."""
        found = [list(row) for row in zip(*by_leaf, strict=True)]
        if self._single:
            found = [row[0] for row in found]
        if self._targets is not None:
            return found
        results: list[Any] = [None] * self._size
        for position, row in zip(self._positions, found, strict=True):
            results[position] = row
        return results

    def _joined(self, there: list[Any], here: Any) -> list[Any]:
        """Return results with leaves on devices and on the host."""
        assert self._host is not None
        joined: list[Any] = [None] * len(there)
        for position, row in enumerate(there):
            if row is not None:
                own = here if self._host.shared else here[position]
                leaves = dict(zip(self._there, row, strict=True))
                leaves |= dict(zip(self._here, own if own is not None else [None] * len(self._here), strict=True))
                joined[position] = [leaves[place] for place in range(len(leaves))]
        return joined


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
    there = [place for place, mark in enumerate(spec.marks) if isinstance(mark, DeviceType)]
    present = [position for position, value in enumerate(values) if value is not None]
    rows = [[values[position]] if spec.single else list(values[position]) for position in present]
    columns = [[row[place] for row in rows] for place in there]
    taken = None
    if not folded:
        taken = [place for place, position in enumerate(present) if needed is None or position in needed]
    marks = [mark for mark in spec.marks if isinstance(mark, DeviceType)]

    def landed(by_leaf: list[list[Any]]) -> list[Any]:
        for place, column, found in zip(there, columns, by_leaf, strict=True):
            for row in rows:
                row[place] = None
            if taken is None:
                rows[0][place] = Folded(found[0], column[0].dtype)
            for source, array in zip(taken or (), found, strict=False):
                rows[source][place] = array
        results: list[Any] = [None] * len(values)
        for position, row in zip(present, rows, strict=True):
            results[position] = row[0] if spec.single else row
        return results

    return bring_down(marks, columns, taken, devices, collective.op, accumulate).work(landed)


def from_host(
    collective: Collective, values: Sequence[Any], result: Any, devices: Sequence[str] = (), outs: Outs | None = None
) -> Work:
    """Return the work that gives each replica its result, on the GPUs that its own arrays came from.

    The result on the host is a leaf or a list of leaves for all, or a list of such by position.
    """
    spec, shared = collective.spec, collective.kind.shared
    assert spec is not None
    there = [place for place, mark in enumerate(spec.marks) if isinstance(mark, DeviceType)]
    present = [position for position, value in enumerate(values) if value is not None]
    results = [result] if shared else [result[position] for position in present]
    columns = list(zip(*([row] if spec.single else row for row in results), strict=True))
    copies = iter(staged([np.asarray(leaf) for place in there for leaf in columns[place]]))
    sources = [[next(copies) for _ in columns[place]] for place in there]
    brought = [[values[position]] if spec.single else values[position] for position in present]
    takers = [[row[place].ordinal for row in brought] for place in there]
    buffers = [(outs or {}).get(position) for position in present]
    wanted = [[None if found is None else found[place] for found in buffers] for place in there] if outs else None
    marks = [mark for mark in spec.marks if isinstance(mark, DeviceType)]

    def launched(by_leaf: list[list[Any]]) -> list[Any]:
        found: dict[int, Sequence[Any]] = dict(zip(there, by_leaf, strict=True))
        for place, mark in enumerate(spec.marks):
            if place not in found:
                found[place] = _given(mark, columns[place], shared, [b if b is None else b[place] for b in buffers])
        rows: list[Any] = [None] * len(values)
        for taker, position in enumerate(present):
            row = [found[place][taker] for place in range(len(found))]
            rows[position] = row[0] if spec.single else row
        return rows

    return bring_up(marks, sources, takers, devices, wanted).work(launched)


def _given(mark: LeafMark, column: Sequence[Any], shared: bool, buffers: Sequence[Any]) -> Sequence[Any]:
    """Return each replica's result of a leaf on the host, which is in its buffer where it passed one."""
    if shared:
        count = len(buffers)
        column = mark.give_each(column[0], count) if isinstance(mark, HostType) else [column[0]] * count
    elif isinstance(mark, HostType):
        column = [mark.give(leaf) for leaf in column]
    for leaf, buffer in zip(column, buffers, strict=True):
        if buffer is not None:
            np.copyto(buffer, leaf)
    return column
