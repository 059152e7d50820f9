"""Work on device arrays: enqueued at once by the last arrival, awaited without holding up the event loop.

The event loop's thread only enqueues, some microseconds for the whole nest; only where a kernel has to be compiled
first does a worker thread do both. Then the loop looks a few times whether the work is done, as small values nearly
always are, and a worker thread sleeps until it is. Results are made in each replica's own framework, on its device;
leaves that are no device arrays are worked on by the host meanwhile.

What a collective comes to depends on shapes, dtypes and devices, and on nothing else: that is worked out once, as a
`Course`, and kept. What is left to do each time is to gather addresses, to make results, and to enqueue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from aiodist._arrays.device import DeviceArray, DeviceType, DType
from aiodist._arrays.frameworks import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM
from aiodist._arrays.leaves import LeafMark
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import Detail
from aiodist._collectives.work import Work
from aiodist.collective.brought import Brought, OutBuffers
from aiodist.collective.device_course import Course, Known, Make, alike
from aiodist.collective.device_out import Outs
from aiodist.collective.kinds import collective_of
from aiodist.collective.signature import DETAIL, DTYPES, OP, SHAPES, STRUCTURE, TYPES
from aiodist.gpu import process
from aiodist.gpu.execute import Completion, Executor
from aiodist.gpu.moves import Move
from aiodist.gpu.plan import HOST, Job, Place
from aiodist.gpu.scheme import Batch, number_of, symbol
from aiodist_kernels.rules import Rule

Column: TypeAlias = "tuple[Any, ...]"
"""What the replicas brought of one leaf, in replica order."""

COURSES = 256
"""How many courses are kept."""

_SITE = attrgetter("ordinal", "stream")


class DeviceWork:
    """The leaves of one meeting: those on devices, enqueued together, and the others.

    Kinds of collectives say what becomes of a leaf on devices, by adding reductions and moves, and of one on the host.

    Args:
        brought: what the replicas ask for, and bring.
        outs: by position, the buffers that they want the result in.
        targets: the GPUs that get a result each; None: each replica's for itself, leaf by leaf.

    Raises:
        ImportError: what compiles or launches kernels is not installed.
    """

    def __init__(
        self,
        brought: Brought,
        outs: Mapping[int, OutBuffers] | None = None,
        targets: tuple[int, ...] | None = None,
    ) -> None:
        signature, values, self.options, self.positions, self._names = brought
        self.signature = signature
        self.targets = targets
        self.single = signature[STRUCTURE] is None
        self.columns: list[Column] = [tuple(values)] if self.single else list(zip(*values, strict=True))
        self.marks: Sequence[LeafMark] = [signature[TYPES]] if self.single else signature[TYPES]
        self._executor: Executor = process.executor()
        self._places = [place for place, mark in enumerate(self.marks) if isinstance(mark, DeviceType)]
        self.arrays: list[DeviceArray] = [array for place in self._places for array in self.columns[place]]
        self.arrays += self.staging()
        self.outs = None if outs is None else Outs(outs, self.positions, self._places, self.columns)
        self._course = self._known_course()
        self._made: list[Any] = []
        self.begins: Sequence[int] = ()  # where all arrays lie, once that is known

    # What a kind of collective says of itself.

    def plan(self, place: int, mark: DeviceType, arrays: Sequence[Known]) -> None:
        """Plan the results of a leaf on devices, and how they get their values."""
        raise NotImplementedError

    def on_host(self, place: int) -> list[Any]:
        """Return each replica's result of a leaf that is on no device."""
        collective, column = collective_of(self.signature).of([place]), self.columns[place]
        if collective.kind.detail is Detail.SOURCE:
            collective = collective._replace(detail=self.positions.index(collective.detail))
        found = executor(collective, len(column), (), self.options.accumulate)
        result = found.run([[leaf] for leaf in column])
        if type(result) is Work:
            result = result.carry_out()
        return [result[0]] * len(column) if found.shared else [row[0] for row in result]

    # What it has for that.

    def detail(self, place: int) -> Any:
        """Return the axis or axes of a leaf."""
        return self.signature[DETAIL] if self.single else self.signature[DETAIL][place]

    def fresh(self, mark: DeviceType, shape: tuple[int, ...], dtype: DType, ordinals: Sequence[int]) -> list[Known]:
        """Plan arrays of a framework's, which live until the work is done."""
        made = []
        for ordinal in ordinals:
            made.append(Known(Place(ordinal, symbol(self._first + len(self._makes))), shape, dtype))
            self._makes.append(Make(mark, shape, dtype, ordinal))
        return made

    def results(self, place: int, mark: DeviceType, shape: tuple[int, ...], dtype: DType) -> list[Known]:
        """Plan the results of a leaf, in replica order; one that is wanted in a buffer gets there behind all else."""
        ordinals = self.targets or self.ordinals(place)
        if self.outs is None:
            found = self.fresh(mark, shape, dtype, ordinals)
            self._results[place] = [self._number(known) for known in found]
            return found
        found, numbers = [], []
        for position, ordinal in zip(self.positions, ordinals, strict=True):
            buffer = self.outs.known(position, place, len(self.arrays))
            if buffer is not None and self.outs.straight and buffer.strides is None:
                found.append(buffer)
            else:
                found += self.fresh(mark, shape, dtype, [ordinal])
            numbers.append(self._number(found[-1]) if buffer is None else None)
            if buffer is not None and found[-1] is not buffer:
                self._last.append(Move(buffer.view(), found[-1].view()))
        self._results[place] = numbers
        return found

    def ordinals(self, place: int) -> Sequence[int]:
        """Return the GPUs that get a leaf's results, in replica order."""
        return [array.ordinal for array in self.columns[place]]

    def staging(self) -> list[DeviceArray]:
        """Return further arrays, which have numbers behind those that the replicas brought: in the host's memory."""
        return []

    def reduce(self, rule: Rule, job: Job) -> None:
        """Add a reduction. Those of one rule that lie alike are made together."""
        alike = rule, tuple([p.device for p in job.inputs]), tuple([p.device for p in job.outputs])
        self._jobs.setdefault(alike, []).append(job)

    def move(self, moves: Sequence[Move]) -> None:
        """Add moves, which come after all reductions."""
        self._moves += moves

    # The course.

    def layout(self) -> Any:
        """Return what of the arrays a plan depends on, beside their shapes in the signature."""
        return None

    def _known_course(self) -> Course:
        asked, courses = self.signature, self._executor.courses
        key = (
            type(self), asked[OP], self.options.accumulate, asked[DETAIL], self.single, asked[SHAPES], asked[DTYPES],
            asked[TYPES], tuple(self.positions), self.targets, tuple([array.ordinal for array in self.arrays]),
            None if self.outs is None else self.outs.layout(), self.layout(),
        )  # fmt: skip
        found: Course | None = courses.get(key)
        if found is None:
            found = courses[key] = self._new_course()
            if len(courses) > COURSES:
                del courses[next(iter(courses))]
        return found

    def _new_course(self) -> Course:
        self._first = len(self.arrays) + (0 if self.outs is None else len(self.outs.buffers))
        self._makes: list[Make] = []
        self._results: dict[int, Sequence[int | None]] = {}
        self._jobs: dict[Any, list[Job]] = {}
        self._moves: list[Move] = []
        self._last: list[Move] = []
        number = 0
        for place in self._places:
            arrays = []
            for array in self.columns[place]:
                arrays.append(Known(Place(array.ordinal, symbol(number)), tuple(array.shape), array.dtype))
                number += 1
            mark = self.marks[place]
            assert isinstance(mark, DeviceType)
            self.plan(place, mark, arrays)
        batches = [Batch(rule, jobs) for (rule, *_), jobs in self._jobs.items()]
        with process.enqueuing:
            scheme = self._executor.scheme(batches, [*self._moves, *self._last], self._first + len(self._makes))
        return Course(alike(self._makes), len(self._makes), self._results, scheme)

    def _number(self, known: Known) -> int:
        return number_of(known.place.address) - self._first

    # Carrying it out.

    def work(self) -> Work:
        """Return what is left to do."""
        scheme = self._course.scheme
        if not scheme.is_loaded() and any(array.stream == PER_THREAD_DEFAULT_STREAM for array in self.arrays):
            self._executor.load(scheme)  # a worker thread would have another stream of that name
        if scheme.is_loaded():
            completion = self._enqueue()
            return Work([[completion.wait]], self._collect, completion.is_done)
        return Work([[self._load_and_enqueue]], self._collect)

    def _load_and_enqueue(self) -> None:
        self._executor.load(self._course.scheme)
        self._enqueue().wait()

    def _enqueue(self) -> Completion:
        begins = [array.address for array in self.arrays]
        foreign = set(map(_SITE, self.arrays))
        if self.outs is not None:
            begins += self.outs.begins()
            foreign |= self.outs.streams()
        foreign |= self._make(begins)
        self.begins = begins
        named = sorted({(ordinal, handle or LEGACY_DEFAULT_STREAM) for ordinal, handle in foreign if ordinal != HOST})
        driver = self._executor.driver
        with process.enqueuing, driver.using():
            streams = [driver.foreign_stream(ordinal, handle) for ordinal, handle in named]
            streams += [stream for name in self._names if (stream := driver.used_stream(name)) is not None]
            return self._executor.run(
                self._course.scheme, streams, [self.columns, self._made, self.outs, self.arrays], tuple(begins)
            )

    def _make(self, begins: list[int]) -> set[tuple[int, int]]:
        """Make the arrays that results need, and append where they begin; return the streams that they are made on."""
        course = self._course
        made: list[Any] = [None] * course.total
        addresses = [0] * course.total
        for mark, ordinal, specs, places in course.makes:
            for place, (array, address) in zip(places, mark.make(specs, ordinal, self._allocate), strict=True):
                made[place], addresses[place] = array, address
        begins += addresses
        self._made = made
        return {(ordinal, mark.stream(ordinal)) for mark, ordinal, _, _ in course.makes}

    def _allocate(self, ordinal: int, nbytes: int) -> Any:
        driver = self._executor.driver
        with process.enqueuing, driver.using():
            return driver.allocate(ordinal, nbytes)

    def _collect(self) -> dict[int, Any]:
        """Return each replica's or target's result; for the event loop's thread, when the devices are done."""
        made = self._finished()
        by_leaf = []
        for place in range(len(self.columns)):
            numbers = self._course.results.get(place)
            if numbers is None:
                by_leaf.append(self._into_buffers(place, self.on_host(place)))
            else:
                by_leaf.append([None if number is None else made[number] for number in numbers])
        self.columns.clear()
        takers = self.positions if self.targets is None else range(len(self.targets))
        rows = zip(*by_leaf, strict=True)
        return {i: row[0] if self.single else list(row) for i, row in zip(takers, rows, strict=True)}

    def _finished(self) -> list[Any]:
        """Return the frameworks' arrays of what was made."""
        made = self._made
        for mark, _, _, places in self._course.makes:
            if mark.finishes:
                for place, array in zip(places, mark.finish([made[place] for place in places]), strict=True):
                    made[place] = array
        return made

    def _into_buffers(self, place: int, results: list[Any]) -> list[Any]:
        if self.outs is not None:
            for position, result in zip(self.positions, results, strict=True):
                buffer = self.outs.leaf(position, place)
                if buffer is not None:
                    np.copyto(buffer, result)
        return results
