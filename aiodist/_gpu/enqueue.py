"""Enqueueing reductions and moves on streams, ordered by events, without blocking the host.

    replicas' streams ──▶ event ──▶ each device's own stream: launches, copies ──▶ event ──▶ replicas' streams

So a replica's next kernel sees the result, and may overwrite its contribution, without further care.

A training step issues the same collectives again and again, and at most their addresses differ. So steps are made for
numbered arrays: the address of a byte in an array is `symbol` of the array's number, plus its offset. A `Schedule` is a
sequence of such steps, and `Schedule.bind` puts addresses in. A schedule of a single array, which begins at address 0,
has addresses as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from threading import RLock
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiodist._gpu import steps
from aiodist._gpu.cuda_core import CudaCore, DeviceEvent, DeviceMemory, DeviceStream
from aiodist._gpu.steps import Copy, Job, Launch, Move, Place, Step, StreamBarrier
from aiodist_kernels import Plan
from aiodist_kernels.cuda import forms
from aiodist_kernels.rules import Rule

MAX_BOUND: Final = 64  # the number of schedules with addresses that are cached
_SPAN: Final = 1 << 56  # more than any offset or address

# Schedules.


def symbol(number: int) -> int:
    """Return the symbolic address at which a numbered array begins."""
    return number * _SPAN


class Batch(NamedTuple):
    """Leaves that are reduced by the same rule."""

    rule: Rule
    jobs: Sequence[Job]


Call: TypeAlias = Callable[[], object]


Bound: TypeAlias = tuple[list[Call], list[DeviceMemory]]
"""A schedule with addresses: the calls that enqueue it, and the tables and scratch memory that they use."""


class Schedule:
    """Reductions of numbered arrays, followed by moves, ready for addresses."""

    def __init__(self, driver: CudaCore, batches: Sequence[Batch], then: Sequence[Move], arrays: int) -> None:
        self._driver = driver
        self._arrays = arrays
        self._scratch: list[tuple[int, int]] = []
        self._launchers: dict[tuple[int, int], Callable[..., None]] = {}  # by index of the step, and work
        self._tables: dict[int, tuple[forms.Layout, DeviceMemory, NDArray[np.int64]]] = {}  # by index of the step
        self._loaded = False
        devices = {place.device for batch in batches for place in (*batch.jobs[0].inputs, *batch.jobs[0].outputs)}
        self.devices = tuple(sorted(devices | steps.devices_of(then)))  # on whose streams it is enqueued
        found = [s for b in batches for s in steps.reduce_steps(b.rule, b.jobs, driver.reaches, self._allocate)]
        if batches and then and len(self.devices) > 1:
            found.append(StreamBarrier(self.devices))
        self._steps = [*found, *steps.move_steps(then, self._allocate)]
        self.kernels = dict.fromkeys((step.device, step.form) for step in self._steps if isinstance(step, Launch))
        self.has_scratch = bool(self._scratch)  # it is allocated for each run

    def is_loaded(self) -> bool:
        """Return whether all its kernels are loaded."""
        self._loaded = self._loaded or all(self._driver.is_loaded(device, form) for device, form in self.kernels)
        return self._loaded

    def bind(self, begins: Sequence[int]) -> Bound:
        """Put in the addresses at which the arrays begin; the kernels must be loaded."""
        keeps = [self._driver.allocate(device, nbytes) for device, nbytes in self._scratch]
        begins = *begins, *[memory.address for memory in keeps]
        return [self._bind(number, step, begins, keeps) for number, step in enumerate(self._steps)], keeps

    def _allocate(self, device: int, nbytes: int) -> int:
        self._scratch.append((device, nbytes))
        return symbol(self._arrays + len(self._scratch) - 1)

    def _bind(self, number: int, step: Step, begins: Sequence[int], keeps: list[DeviceMemory]) -> Call:
        """Return a step with addresses put in; memory that it needs is added to ``keeps``."""
        driver = self._driver
        match step:
            case Copy(_, target, source):
                there = Place(target.device, _put(target.address, begins))
                here = Place(source.device, _put(source.address, begins))
                return partial(driver.copy, step._replace(target=there, source=here))
            case Launch(_, form, leaves, lanes):
                if form.tabled:
                    return self._tabled(number, step, begins, keeps)
                (leaf,) = leaves
                addresses = [_put(address, begins) for address in (leaf.out, *leaf.buffers)]
                lanes *= leaf.elements
                vectors = lanes // form.width if forms.allow_vectors(addresses) else 0
                return partial(self._launcher(number, step, vectors or lanes), *addresses, vectors, lanes)
            case StreamBarrier(devices):
                own = [driver.stream(device) for device in devices]
                return partial(order, driver, own, own)

    def _tabled(self, number: int, step: Launch, begins: Sequence[int], keeps: list[DeviceMemory]) -> Call:
        """Return a launch with tables in device memory; all but the addresses is prepared only once."""
        device, form, leaves, lanes = step
        count = len(leaves[0].buffers)
        if number not in self._tables:
            layout = forms.Layout(form, [leaf.elements * lanes for leaf in leaves], count)
            places = np.array([[divmod(each, _SPAN) for each in (leaf.out, *leaf.buffers)] for leaf in leaves])
            self._tables[number] = layout, self._driver.upload(device, layout.heads), places
        layout, heads, places = self._tables[number]
        rows = self._driver.upload(device, layout.rows(np.array(begins, np.int64)[places[..., 0]] + places[..., 1]))
        keeps += [heads, rows]
        launch = self._launcher(number, step, layout.chunks * forms.THREADS)
        return partial(launch, heads.address, rows.address, layout.chunks, count)

    def _launcher(self, number: int, step: Launch, work: int) -> Callable[..., None]:
        found = self._launchers.get((number, work))
        if found is None:
            found = self._launchers[number, work] = self._driver.launcher(step.device, step.form, work)
        return found


def _put(address: int, begins: Sequence[int]) -> int:
    """Return the address of a byte in a numbered array."""
    number, offset = divmod(address, _SPAN)
    return begins[number] + offset


# Streams.


def order(driver: CudaCore, first: Iterable[DeviceStream], then: Sequence[DeviceStream]) -> None:
    """Let the streams ``then`` wait for everything that is on ``first`` so far."""
    for stream in first:
        event = driver.record(stream)
        for other in then:
            if other is not stream:
                driver.wait(other, event)
        driver.release(event)


class Completion:
    """Enqueued work, and what must live until it is done: inputs, results, tables, scratch memory.

    If its waiter is cancelled and drops it, it blocks until the work is done: page-locked memory in its ``keeps`` would
    otherwise be reused while devices still access it, because no stream orders what the host does.
    """

    def __init__(self, driver: CudaCore, events: list[DeviceEvent], keeps: list[Any]) -> None:
        self._driver = driver
        self._events = events
        self._keeps = keeps

    def __del__(self) -> None:
        with suppress(Exception):  # a waiter has already raised a device's error
            self.wait()

    def is_done(self) -> bool:
        """Return whether it is done, without waiting."""
        events = self._events
        while events and self._driver.is_done(events[-1]):
            self._driver.release(events.pop())
        return not events

    def wait(self) -> None:
        """Wait until it is done; for a worker thread."""
        while self._events:
            self._driver.wait_for(self._events[-1])
            self._driver.release(self._events.pop())


class Queue:
    """Enqueues reductions and moves on a driver, for one thread at a time. ``known`` is a cache for its callers."""

    def __init__(self, driver: CudaCore) -> None:
        self.driver = driver
        self.known: dict[Any, Any] = {}
        self._bound: dict[tuple[Schedule, Sequence[int]], Bound] = {}

    def schedule(self, batches: Sequence[Batch], then: Sequence[Move] = (), arrays: int = 1) -> Schedule:
        """Return the schedule of reductions of numbered arrays, followed by moves."""
        with self.driver.using():
            return Schedule(self.driver, batches, then, arrays)

    def load(self, schedule: Schedule) -> None:
        """Compile and load a schedule's kernels; others may enqueue meanwhile."""
        for device, form in schedule.kernels:
            self.driver.load(device, form)

    def run(
        self, schedule: Schedule, streams: Iterable[DeviceStream], keeps: list[Any], begins: tuple[int, ...] = (0,)
    ) -> Completion:
        """Enqueue a schedule whose kernels are loaded, for arrays at some addresses; within `CudaCore.using`.

        Inputs were made, and results will be used, on ``streams``; ``keeps`` are the owners of the arrays.
        """
        driver = self.driver
        # Addresses are usually the same as before: frameworks reuse the memory of the previous step's arrays.
        bound = self._bound.get((schedule, begins))
        if bound is None:
            bound = schedule.bind(begins)
            if not schedule.has_scratch:
                self._bound[schedule, begins] = bound
                if len(self._bound) > MAX_BOUND:
                    del self._bound[next(iter(self._bound))]
        own = [driver.stream(device) for device in schedule.devices]
        others = [stream for stream in streams if stream not in own]
        order(driver, others, own)
        calls, memory = bound
        for call in calls:
            call()
        done = [driver.record(stream) for stream in own]
        for stream in others:
            for event in done:
                driver.wait(stream, event)
        return Completion(driver, done, [keeps, memory])


enqueuing: Final = RLock()  # held while enqueueing, because worker threads that have loaded kernels enqueue, too


@cache
def queue() -> Queue:
    """Return the process's queue, which all runs share; an ImportError if cuda.core is missing, or does not fit."""
    return Queue(CudaCore())


def load(plans: Iterable[Plan], devices: Sequence[int]) -> None:
    """Load, on each device, the kernels for one leaf, for several leaves, and for copies of results."""
    driver = queue().driver
    for plan in plans:
        size = plan.rule.result.itemsize
        kernels = [*(forms.form_for(plan.rule, plan.count, leaves=leaves) for leaves in (1, 2)), forms.copying(size)]
        for form in dict.fromkeys(kernels):
            for device in devices:
                driver.load(device, form)
