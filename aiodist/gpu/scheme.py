"""Schemes: all that can be known of a piece of work before it is known where its arrays lie.

A training step's collectives are the same again and again; what differs is, at most, addresses. So plans are made of
arrays that have numbers: the address of a byte in an array is `symbol` of the array's number, plus its offset. A scheme
is such a plan, with kernels chosen, sizes counted and tables laid out; `Scheme.bind` puts addresses in. Array 0 of a
scheme that nobody numbers begins at address 0: its plan has addresses as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from aiodist.gpu import moves, plan
from aiodist.gpu.driver import Driver, Memory
from aiodist.gpu.moves import Move, Rows
from aiodist.gpu.plan import Copy, Job, Launch, Meet
from aiodist_kernels.cuda import forms, tables
from aiodist_kernels.cuda.forms import Form
from aiodist_kernels.recipes import components
from aiodist_kernels.rules import Rule

_OFFSET: Final = 56
"""Bits of an offset, and of an address."""


def symbol(number: int) -> int:
    """Return where an array of that number begins."""
    return number << _OFFSET


def number_of(address: int) -> int:
    """Return the number of the array that holds a byte."""
    return address >> _OFFSET


@dataclass(frozen=True, slots=True)
class Batch:
    """Leaves that one rule reduces.

    Attributes:
        rule: the rule.
        jobs: the leaves.
        replicas: by how many a mean divides, where each leaf is one buffer that stands for them all; None: by the
            number of buffers.
    """

    rule: Rule
    jobs: Sequence[Job]
    replicas: int | None = None


Call: TypeAlias = Callable[[], object]


class Bound(NamedTuple):
    """A scheme with its addresses put in: what is left to enqueue.

    Attributes:
        devices: on whose streams.
        calls: in this order.
        keeps: tables and scratch memory that they use.
        table_bytes: how many bytes the tables have; None where there is scratch memory, which serves one time only.
    """

    devices: Sequence[int]
    calls: Sequence[Call]
    keeps: Sequence[Memory]
    table_bytes: int | None


class _Binding:
    """Addresses by number, and what binding makes."""

    def __init__(self, driver: Driver, begins: list[int]) -> None:
        self.driver = driver
        self.begins = begins
        self.tables: list[tuple[Memory, int]] = []

    def at(self, place: _At) -> int:
        """Return an address."""
        return self.begins[place[0]] + place[1]


_At: TypeAlias = tuple[int, int]
"""The number of an array, and an offset in it."""


class _Step(Protocol):
    """A step of a scheme."""

    def bind(self, to: _Binding) -> Call:
        """Return it with its addresses put in."""
        ...


class Scheme:
    """Reductions and moves behind them, ready for addresses.

    Args:
        driver: the driver.
        batches: what to reduce.
        then: what to move, when all is reduced.
        arrays: how many arrays have numbers.

    Attributes:
        kernels: what its launches need, each with a device.
    """

    def __init__(self, driver: Driver, batches: Sequence[Batch], then: Sequence[Move], arrays: int) -> None:
        self._driver = driver
        self._arrays = arrays
        self._scratch: list[tuple[int, int]] = []
        self.kernels: dict[tuple[int, Form], None] = {}
        self._loaded = False
        devices = {place.device for batch in batches for place in (*batch.jobs[0].inputs, *batch.jobs[0].outputs)}
        self._devices = tuple(sorted(devices | moves.devices(then)))
        self._steps = [
            self._launch(step, batch) if isinstance(step, Launch) else self._move(step)
            for batch in batches
            for step in plan.make(batch.jobs, driver.reaches, self._allocate)
        ]
        if batches and then and len(self._devices) > 1:
            self._steps.append(_Meet(self._devices))
        self._steps += [self._move(step) for step in moves.make(then, self._allocate)]

    def is_loaded(self) -> bool:
        """Return whether all its kernels can be launched at once."""
        self._loaded = self._loaded or all(self._driver.is_loaded(device, form) for device, form in self.kernels)
        return self._loaded

    def bind(self, begins: Sequence[int]) -> Bound:
        """Put in where each array begins; its kernels are loaded."""
        scratch = [self._driver.allocate(device, nbytes) for device, nbytes in self._scratch]
        to = _Binding(self._driver, [*begins, *[memory.address for memory in scratch]])
        calls = [step.bind(to) for step in self._steps]
        table_bytes = None if scratch else sum(nbytes for _, nbytes in to.tables)
        return Bound(self._devices, calls, [*scratch, *(memory for memory, _ in to.tables)], table_bytes)

    def _allocate(self, device: int, nbytes: int) -> int:
        self._scratch.append((device, nbytes))
        return symbol(self._arrays + len(self._scratch) - 1)

    def _launch(self, launch: Launch, batch: Batch) -> _Step:
        rule, count = batch.rule, len(launch.leaves[0].buffers)
        form = forms.form_for(rule, count, leaves=len(launch.leaves))
        self.kernels[launch.device, form] = None
        lanes = components(rule.dtype)
        if form.tabled:
            return _Tabled(launch, form, lanes, batch.replicas)
        leaf = launch.leaves[0]
        addresses = (_split(leaf.out), *map(_split, leaf.buffers))
        return _Direct(launch.device, form, addresses, leaf.elements * lanes)

    def _move(self, step: Copy | Rows | Meet) -> _Step:
        match step:
            case Rows():
                return _Rows(step)
            case Copy(device, target, source, nbytes):
                return _Copy(
                    device, target.device, _split(target.address), source.device, _split(source.address), nbytes
                )
            case Meet(devices):
                return _Meet(devices)


def _split(address: int) -> _At:
    return number_of(address), address & ((1 << _OFFSET) - 1)


class _Direct(NamedTuple):
    """A launch with addresses as arguments."""

    device: int
    form: Form
    places: tuple[_At, ...]
    lanes: int

    def bind(self, to: _Binding) -> Call:
        begins = to.begins
        addresses = [begins[number] + offset for number, offset in self.places]
        vectors = self.lanes // self.form.width if tables.allow_vectors(addresses) else 0
        arguments = *addresses, vectors, self.lanes
        return to.driver.launcher(self.device, self.form, vectors or self.lanes, arguments)


class _Tabled:
    """A launch with a table in the device's memory."""

    def __init__(self, launch: Launch, form: Form, lanes: int, replicas: int | None) -> None:
        places = [_split(address) for leaf in launch.leaves for address in (leaf.out, *leaf.buffers)]
        shape = len(launch.leaves), 1 + len(launch.leaves[0].buffers)
        self._numbers = np.array([number for number, _ in places], np.intp).reshape(shape)
        self._offsets = np.array([offset for _, offset in places], np.int64).reshape(shape)
        self._layout = tables.Layout(form, [leaf.elements * lanes for leaf in launch.leaves])
        self._device, self._form, self._count, self._replicas = launch.device, form, shape[1] - 1, replicas

    def bind(self, to: _Binding) -> Call:
        rows = np.array(to.begins, np.int64)[self._numbers] + self._offsets
        words, chunks = self._layout.fill(rows), self._layout.chunks
        memory = to.driver.upload(self._device, words)
        to.tables.append((memory, words.nbytes))
        arguments = forms.tabled_arguments(self._form, memory.address, chunks, self._count, self._replicas)
        return to.driver.launcher(self._device, self._form, chunks * forms.THREADS, arguments)


class _Copy(NamedTuple):
    """A copy without gaps."""

    device: int
    target_device: int
    target: _At
    source_device: int
    source: _At
    nbytes: int

    def bind(self, to: _Binding) -> Call:
        target, source = to.at(self.target), to.at(self.source)
        if self.target_device == self.device:
            return partial(to.driver.copy, self.device, target, self.source_device, source, self.nbytes)
        return partial(to.driver.copy_out, self.device, self.target_device, target, source, self.nbytes)


class _Rows:
    """A copy of rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._target, self._source = _split(rows.target), _split(rows.source)

    def bind(self, to: _Binding) -> Call:
        rows = self._rows._replace(target=to.at(self._target), source=to.at(self._source))
        return partial(to.driver.copy_rows, *rows)


class _Meet(NamedTuple):
    """Each device's stream waits for the others'."""

    devices: Sequence[int]

    def bind(self, to: _Binding) -> Call:
        return partial(meet, to.driver, self.devices)


def meet(driver: Driver, devices: Sequence[int]) -> None:
    """Let each device's stream wait for what the others' have been given so far."""
    events: dict[int, Any] = {device: driver.record(driver.stream(device)) for device in devices}
    for device in devices:
        for other in devices:
            if other != device:
                driver.wait(driver.stream(device), events[other])
    for event in events.values():
        driver.release(event)
