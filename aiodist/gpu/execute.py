"""Carrying out a plan: on streams, ordered by events, without holding up the host.

    what replicas enqueued ──▶ event ──▶ each device's own stream: launches, copies ──▶ event ──▶ the replicas' streams

So a replica's next kernel sees the result, and may write to what it brought, with no further care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from aiodist.gpu import moves, plan
from aiodist.gpu.driver import Driver, Event, Memory, Stream
from aiodist.gpu.moves import Move, Rows
from aiodist.gpu.plan import Copy, Job, Launch, Meet
from aiodist_kernels.cuda import forms, tables
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.recipes import components
from aiodist_kernels.rules import Rule

TABLES = 64
LARGEST_TABLE = 1 << 16


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
    """

    devices: Sequence[int]
    calls: Sequence[Call]


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
        self._tables: dict[tuple[int, bytes], Memory] = {}

    def kernels(self, batches: Iterable[Batch]) -> set[tuple[int, Form]]:
        """Return the kernels that reducing these may need, each with a device."""
        needed = set()
        for batch in batches:
            count = len(batch.jobs[0].inputs)
            for device in {place.device for place in batch.jobs[0].inputs}:
                needed |= {(device, forms.form_for(batch.rule, count, leaves=many)) for many in (1, len(batch.jobs))}
        return needed

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
            return self.enqueue(self.prepare(batches, keeps, then), streams, keeps)

    def prepare(self, batches: Sequence[Batch], keeps: list[Any], then: Sequence[Move] = ()) -> Prepared:
        """Return all that can be known before anything is enqueued, with tables and scratch memory in ``keeps``."""
        devices = {place.device for batch in batches for place in batch.jobs[0].inputs} | moves.devices(then)
        calls = [
            self._launch(step, batch.rule, keeps) if isinstance(step, Launch) else self._copy(step)
            for batch in batches
            for step in plan.make(batch.jobs, self.driver.reaches, self._allocate(keeps))
        ]
        if batches and then and len(devices) > 1:
            calls.append(self._copy(Meet(tuple(sorted(devices)))))
        calls += [self._copy(step) for step in moves.make(then, self._allocate(keeps))]
        return Prepared(sorted(devices), calls)

    def enqueue(self, prepared: Prepared, streams: Iterable[Stream], keeps: list[Any]) -> Completion:
        """Enqueue what is prepared, between what streams were given before and what they will be given."""
        driver, streams, devices = self.driver, list(streams), prepared.devices
        with driver.using(), self._settled_on_error(devices):
            ready = [driver.record(stream) for stream in streams]
            for device in devices:
                for event in ready:
                    driver.wait(driver.stream(device), event)
            for function, *arguments in prepared.calls:
                function(*arguments)
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

    def _allocate(self, keeps: list[Any]) -> Callable[[int, int], int]:
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

    def _launch(self, launch: Launch, rule: Rule, keeps: list[Any]) -> Call:
        first = launch.leaves[0]
        form = forms.form_for(rule, len(first.buffers), leaves=len(launch.leaves))
        lanes = components(rule.dtype)
        if form.tabled:
            table = tables.pack(form, launch.leaves, lanes)
            memory = self._uploaded(launch.device, table)
            keeps.append(memory)
            arguments = [memory.address, table.chunks, len(first.buffers)]
            work = table.chunks * forms.THREADS
        else:
            count = first.elements * lanes
            vectors = tables.vectors(form, first, count)
            arguments = [first.out, *first.buffers, vectors, count]
            work = vectors or count
        return self.driver.launch, launch.device, form, work, arguments

    def _uploaded(self, device: int, table: tables.Table) -> Memory:
        """Return a table on a device, the same one as before where all lies where it lay."""
        if table.words.nbytes > LARGEST_TABLE:
            return self.driver.upload(device, table.words)
        key = device, table.words.tobytes()
        memory = self._tables.pop(key, None) or self.driver.upload(device, table.words)
        self._tables[key] = memory
        if len(self._tables) > TABLES:
            del self._tables[next(iter(self._tables))]
        return memory
