"""The device executor: plans carried out over arrays on GPUs, enqueued by the last arrival, awaited by nobody's thread.

The event loop's thread only enqueues, some microseconds for the whole nest; only where a kernel has to be compiled
first does a worker thread do that. Then the loop looks a few times whether the work is done, as small values nearly
always are, and a worker thread sleeps until it is. Results are made in each replica's own framework, on its device, or
written into its own buffers; leaves on the host are the host executor's meanwhile.

What a collective comes to is worked out once, as a `DevicePlan`, and kept. What is left to do each time is to gather
addresses, to make results, and to enqueue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import numpy as np

from aiodist._arrays.device import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, DeviceArray, DeviceType
from aiodist._arrays.leaves import Spec
from aiodist._collectives.device_plan import PAGE_LOCKED, Column, Leaf, Leaves, Planner, Where
from aiodist._collectives.host import HostExecutor, given
from aiodist._collectives.kinds import Collective, LeafPlan, Result
from aiodist._collectives.out import NO_OUTS, Outs, entangled, span
from aiodist._collectives.work import Work
from aiodist._gpu import enqueue
from aiodist._gpu.enqueue import Completion
from aiodist._gpu.steps import HOST
from aiodist_kernels import Accumulate

Array = np.ndarray[Any, Any]

KEPT: Final = 256
"""How many plans are kept."""

_ADDRESS, _ORDINAL, _STREAM = map(attrgetter, ("address", "ordinal", "stream"))


def _allocate(ordinal: int, nbytes: int) -> Any:
    driver = enqueue.queue().driver
    with enqueue.enqueuing, driver.using():
        return driver.host_memory(nbytes) if ordinal == HOST else driver.allocate(ordinal, nbytes)


class DeviceRun:
    """Leaves on devices, on their way.

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
        buffers: dict[Where, DeviceArray] = {}
        straight = True
        if outs:
            found = [((leaf, taker), each) for leaf, row in enumerate(outs) for taker, each in enumerate(row)]
            buffers = {where: buffer for where, buffer in found if buffer is not None}
            straight = _straight(columns, buffers)
        self._arrays = [*inputs, *buffers.values()]
        self._ordinals = tuple(map(_ORDINAL, self._arrays))
        specs = tuple([(array.shape, array.dtype) for array in inputs]) if group.ragged else None
        layout = (straight, tuple(buffers)) if buffers else None
        key = group, self._ordinals, specs, None if takers is None else tuple(map(tuple, takers)), layout
        known = self._queue.known
        plan = known.get(key)
        if plan is None:
            takers = takers or [list(map(_ORDINAL, column)) for column in columns]
            plan = known[key] = Planner(group, columns, takers, buffers, straight=straight).plan()
            if len(known) > KEPT:
                del known[next(iter(known))]
        self._plan = plan
        self._made: list[Any] = [None] * plan.total
        addresses = [0] * plan.total
        self._streams = set(zip(self._ordinals, map(_STREAM, self._arrays), strict=True))
        for mark, ordinal, made_specs, places in plan.makes:
            for place, (array, address) in zip(places, mark.make(made_specs, ordinal, _allocate), strict=True):
                self._made[place], addresses[place] = array, address
            self._streams.add((ordinal, mark.stream(ordinal)))
        self._begins = (*map(_ADDRESS, self._arrays), *addresses)

    def results(self) -> list[list[Any]]:
        """Return results by leaf and taker: the frameworks' arrays, NumPy's on the host, and None for a buffer.

        They are there when the devices are done; some frameworks' only then, in the event loop's thread.
        """
        return [[None if n is None else self._made[n] for n in numbers] for numbers in self._plan.results]

    def work(self, result: Callable[[list[list[Any]]], Any]) -> Work:
        """Enqueue it, or return it as work where a kernel must be compiled first.

        ``result`` makes the result of `results`, in the event loop's thread.
        """
        schedule = self._plan.schedule
        if not schedule.is_loaded() and any(stream == PER_THREAD_DEFAULT_STREAM for _, stream in self._streams):
            self._queue.load(schedule)  # a worker thread would have another stream of that name
        if schedule.is_loaded():
            completion = self._enqueue()
            return Work([[completion.wait]], lambda: result(self._finished()), completion.is_done)
        return Work([[self._load_and_enqueue]], lambda: result(self._finished()))

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

    def _finished(self) -> list[list[Any]]:
        made = self._made
        for mark, _, _, places in self._plan.makes:
            if mark.finishes:
                for place, array in zip(places, mark.finish([made[place] for place in places]), strict=True):
                    made[place] = array
        self._arrays = []
        return self.results()


def _straight(columns: Sequence[Column], buffers: dict[Where, DeviceArray]) -> bool:
    """Return whether results may be written into buffers while inputs are read."""
    inputs = {span(array, leaf) for leaf, column in enumerate(columns) for array in column}
    written = [span(buffer, leaf) for (leaf, _), buffer in buffers.items()]
    if len({array.ordinal for column in columns for array in column}) == 1:  # else another device may still read it
        inputs.difference_update(written)
    return not entangled(inputs, written)


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


def _of_leaves(passed: Sequence[Sequence[Any] | None], places: Sequence[int]) -> list[list[Any]]:
    """Return by leaf the buffers that were passed, None for who passed none."""
    return [[None if found is None else found[place] for found in passed] for place in places]


def _there(spec: Spec) -> dict[int, DeviceType]:
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
        on_host = self._run_host(columns, passed)

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

    def _run_host(self, columns: Sequence[Sequence[Any]], passed: Sequence[Any]) -> Any:
        """Carry out the leaves on the host."""
        if self._host is None:
            return None
        outs = {taker: [each[place] for place in self._here] for taker, each in enumerate(passed) if each is not None}
        return self._host.run_into(list(zip(*[columns[place] for place in self._here], strict=True)), outs)

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
    """Return copies of arrays in memory that devices copy from; in any thread."""
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
