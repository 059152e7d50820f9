"""Carrying out a plan: on streams, ordered by events, without holding up the host.

    what replicas enqueued ──▶ event ──▶ each device's own stream: launches, copies ──▶ event ──▶ the replicas' streams

So a replica's next kernel sees the result, and may write to what it brought, with no further care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from aiodist.gpu import moves, plan
from aiodist.gpu.driver import Driver, Event, Memory, Stream
from aiodist.gpu.moves import Move, Rows
from aiodist.gpu.plan import Copy, Job, Launch, Meet
from aiodist_kernels.cuda import forms, tables
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.recipes import components
from aiodist_kernels.rules import Rule

PREPARED = 64
"""How much of what was prepared is kept."""

LARGEST_TABLES = 1 << 16
"""Bytes of its tables up to which it is: what they describe takes long enough for new ones beyond."""


@cache
def _forms(rule: Rule, count: int, *, several: bool) -> tuple[Form, ...]:
    """Return the kernels for one leaf, and for several where there are: of those, all but one may be empty."""
    return tuple(dict.fromkeys(forms.form_for(rule, count, leaves=leaves) for leaves in (1, 1 + several)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Leaves that one rule reduces."""

    rule: Rule
    jobs: Sequence[Job]


Call: TypeAlias = "tuple[Callable[..., object], *tuple[Any, ...]]"
"""A function of the driver's, and its arguments."""


class Prepared(NamedTuple):
    """What is left to enqueue.

    Attributes:
        devices: on whose streams.
        calls: in this order.
        keeps: tables and scratch memory that they use.
        lasting: they may be made again and again.
    """

    devices: Sequence[int]
    calls: Sequence[Call]
    keeps: Sequence[Memory]
    lasting: bool


class Completion:
    """Work that was enqueued, and all memory that it uses.

    Attributes:
        keeps: what must live until it is done: inputs, results, tables, scratch memory.
    """

    def __init__(self, driver: Driver, events: Sequence[Event], keeps: list[Any]) -> None:
        self._driver = driver
        self._events = list(events)
        self.keeps = keeps

    def is_done(self) -> bool:
        """Return whether it is done, without waiting."""
        while self._events and self._driver.is_done(self._events[0]):
            self._events.pop(0)
        return not self._events

    def wait(self) -> None:
        """Wait until it is done; for a worker thread."""
        for event in self._events:
            self._driver.wait_for(event)


class Executor:
    """Enqueues reductions and moves on a driver, for one thread at a time.

    Args:
        driver: the driver.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._prepared: dict[Any, Prepared] = {}

    def kernels(self, batches: Iterable[Batch]) -> list[tuple[int, Form]]:
        """Return the kernels that reducing these may need, each with a device."""
        return [
            (device, form)
            for batch in batches
            for device in {place.device for place in batch.jobs[0].inputs}
            for form in _forms(batch.rule, len(batch.jobs[0].inputs), several=len(batch.jobs) > 1)
        ]

    def run(
        self, batches: Sequence[Batch], streams: Iterable[Stream], keeps: list[Any], then: Sequence[Move] = ()
    ) -> Completion:
        """Enqueue reductions; their kernels are loaded.

        Args:
            batches: what to reduce.
            streams: those on which inputs were made and results will be used.
            keeps: owners of the inputs and results.
            then: what to move, when all is reduced.
        """
        with self.driver.using():
            prepared = self.prepare(batches, then)
            keeps += prepared.keeps
            return self.enqueue(prepared, streams, keeps)

    def prepare(self, batches: Sequence[Batch], then: Sequence[Move] = ()) -> Prepared:
        """Return all that can be known before anything is enqueued, the same as before where all lies where it lay.

        That is the rule, not the exception: frameworks give a step's arrays the memory of the last one's.
        """
        key = tuple([(batch.rule, *batch.jobs) for batch in batches]), tuple(then)
        found = self._prepared.get(key)
        if found is None:
            found = self._prepare(batches, then)
            if found.lasting:
                self._prepared[key] = found
                if len(self._prepared) > PREPARED:
                    del self._prepared[next(iter(self._prepared))]
        return found

    def _prepare(self, batches: Sequence[Batch], then: Sequence[Move]) -> Prepared:
        devices = {place.device for batch in batches for place in batch.jobs[0].inputs} | moves.devices(then)
        scratch: list[Memory] = []
        uploads: list[tuple[Memory, int]] = []
        allocate = self._allocate(scratch)
        calls = [
            self._launch(step, batch.rule, uploads) if isinstance(step, Launch) else self._copy(step)
            for batch in batches
            for step in plan.make(batch.jobs, self.driver.reaches, allocate)
        ]
        if batches and then and len(devices) > 1:
            calls.append(self._copy(Meet(tuple(sorted(devices)))))
        calls += [self._copy(step) for step in moves.make(then, allocate)]
        lasting = not scratch and sum(nbytes for _, nbytes in uploads) <= LARGEST_TABLES
        return Prepared(sorted(devices), calls, [*scratch, *(memory for memory, _ in uploads)], lasting)

    def enqueue(self, prepared: Prepared, streams: Iterable[Stream], keeps: list[Any]) -> Completion:
        """Enqueue what is prepared, between what streams were given before and what they will be given."""
        driver, streams, devices = self.driver, list(streams), prepared.devices
        with driver.using(), self._settled_on_error(devices):
            ready = [driver.record(stream) for stream in streams]
            for device in devices:
                for event in ready:
                    driver.wait(driver.stream(device), event)
            for call in prepared.calls:
                call[0](*call[1:])
            done = [driver.record(driver.stream(device)) for device in devices]
            for stream in streams:
                for event in done:
                    driver.wait(stream, event)
        return Completion(driver, done, keeps)

    @contextmanager
    def _settled_on_error(self, devices: Sequence[int]) -> Iterator[None]:
        """Wait for what was enqueued before an error, as nobody will keep its memory afterwards."""
        try:
            yield
        except BaseException:
            for device in devices:
                self.driver.wait_for(self.driver.record(self.driver.stream(device)))
            raise

    def _allocate(self, keeps: list[Memory]) -> Callable[[int, int], int]:
        def allocate(device: int, nbytes: int) -> int:
            memory = self.driver.allocate(device, nbytes)
            keeps.append(memory)
            return memory.address

        return allocate

    def _copy(self, step: Copy | Rows | Meet) -> Call:
        match step:
            case Rows():
                return self.driver.copy_rows, *step
            case Copy(device, target, source, nbytes) if target.device == device:
                return self.driver.copy, device, target.address, source.device, source.address, nbytes
            case Copy(device, target, source, nbytes):
                return self.driver.copy_out, device, target.device, target.address, source.address, nbytes
            case Meet(devices):
                return self._meet, devices

    def _meet(self, devices: Sequence[int]) -> None:
        driver = self.driver
        events = {device: driver.record(driver.stream(device)) for device in devices}
        for device in devices:
            for other in devices:
                if other != device:
                    driver.wait(driver.stream(device), events[other])

    def _launch(self, launch: Launch, rule: Rule, uploads: list[tuple[Memory, int]]) -> Call:
        first = launch.leaves[0]
        form = forms.form_for(rule, len(first.buffers), leaves=len(launch.leaves))
        lanes = components(rule.dtype)
        if form.tabled:
            table = tables.pack(form, launch.leaves, lanes)
            memory = self.driver.upload(launch.device, table.words)
            uploads.append((memory, table.words.nbytes))
            arguments = [memory.address, table.chunks, len(first.buffers)]
            work = table.chunks * forms.THREADS
        else:
            count = first.elements * lanes
            vectors = tables.vectors(form, first, count)
            arguments = [first.out, *first.buffers, vectors, count]
            work = vectors or count
        return self.driver.launch, launch.device, form, work, arguments
