"""Schedules: all that can be known of a piece of work before it is known where its arrays lie.

A training step's collectives are the same again and again; what differs is, at most, addresses. So steps are made for
arrays that have numbers: the address of a byte in an array is `symbol` of the array's number, plus its offset. A
schedule is such steps, with kernels chosen, sizes counted and tables laid out; `Schedule.bind` puts addresses in. Array
0 of a schedule that nobody numbers begins at address 0: its steps have addresses as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiodist._gpu import steps
from aiodist._gpu.driver import Driver, Memory
from aiodist._gpu.steps import Copy, Job, Launch, Meet, Move, Moving, Rows, Together
from aiodist_kernels.cuda import forms
from aiodist_kernels.cuda.forms import Form, Leaf
from aiodist_kernels.rules import Rule, components

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
    """

    rule: Rule
    jobs: Sequence[Job]


Call: TypeAlias = Callable[[], object]


class Bound(NamedTuple):
    """A schedule with its addresses put in: what is left to enqueue.

    Attributes:
        devices: on whose streams.
        calls: in this order.
        keeps: tables and scratch memory that they use.
        lasts: whether it serves again; scratch memory serves one time only.
    """

    devices: Sequence[int]
    calls: Sequence[Call]
    keeps: Sequence[Memory]
    lasts: bool


_At: TypeAlias = tuple[int, int]
"""The number of an array, and an offset in it."""


class _Step(Protocol):
    """A step of a schedule."""

    def bind(self, begins: Sequence[int], numbers: NDArray[np.int64], keeps: list[Memory]) -> Call:
        """Return it with its addresses put in.

        Args:
            begins: where each array begins.
            numbers: the same, for those that take many.
            keeps: takes the memory that it needs.
        """
        ...


_NO_NUMBERS: Final = np.zeros(0, np.int64)


class Schedule:
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
        self._devices = tuple(sorted(devices | steps.devices_of(then)))
        self._steps: list[_Step] = [
            self._launch(step, batch) if isinstance(step, Launch) else self._other(step)
            for batch in batches
            for step in steps.reduce_steps(batch.jobs, driver.reaches, self._allocate)
        ]
        if batches and then and len(self._devices) > 1:
            self._steps.append(_Meet(driver, self._devices))
        self._steps += [self._other(step) for step in steps.move_steps(then, self._allocate)]
        self._has_tables = any(isinstance(step, _Tabled) for step in self._steps)

    def is_loaded(self) -> bool:
        """Return whether all its kernels can be launched at once."""
        self._loaded = self._loaded or all(self._driver.is_loaded(device, form) for device, form in self.kernels)
        return self._loaded

    def bind(self, begins: Sequence[int]) -> Bound:
        """Put in where each array begins; its kernels are loaded."""
        keeps = [self._driver.allocate(device, nbytes) for device, nbytes in self._scratch]
        if keeps:
            begins = *begins, *[memory.address for memory in keeps]
        numbers = np.array(begins, np.int64) if self._has_tables else _NO_NUMBERS
        calls = [step.bind(begins, numbers, keeps) for step in self._steps]
        return Bound(self._devices, calls, keeps, not self._scratch)

    def _allocate(self, device: int, nbytes: int) -> int:
        self._scratch.append((device, nbytes))
        return symbol(self._arrays + len(self._scratch) - 1)

    def _launch(self, launch: Launch, batch: Batch) -> _Step:
        rule, count = batch.rule, len(launch.leaves[0].buffers)
        form = forms.form_for(rule, count, leaves=len(launch.leaves))
        self.kernels[launch.device, form] = None
        lanes = components(rule.dtype)
        if form.tabled:
            return _Tabled(self._driver, launch.device, form, launch.leaves, lanes)
        leaf = launch.leaves[0]
        return _Direct(self._driver, launch.device, form, (leaf.out, *leaf.buffers), leaf.elements * lanes)

    def _other(self, step: Moving) -> _Step:
        driver = self._driver
        match step:
            case Rows():
                return _Rows(driver, step)
            case Copy():
                return _Copy(driver, step)
            case Together(device, leaves, size):
                form = forms.copying(size)
                self.kernels[device, form] = None
                return _Tabled(driver, device, form, leaves, size // form.recipe.storage.size)
            case Meet(devices):
                return _Meet(driver, devices)


def _split(address: int) -> _At:
    return number_of(address), address & ((1 << _OFFSET) - 1)


class _Direct:
    """A launch with addresses as arguments."""

    def __init__(self, driver: Driver, device: int, form: Form, addresses: Sequence[int], lanes: int) -> None:
        self._driver, self._device, self._form, self._lanes = driver, device, form, lanes
        self._places = [_split(address) for address in addresses]
        self._launchers: dict[int, Callable[..., object]] = {}  # by the number of vectors: all that there are, or none

    def bind(self, begins: Sequence[int], numbers: NDArray[np.int64], keeps: list[Memory]) -> Call:  # noqa: ARG002
        lanes = self._lanes
        addresses = [begins[number] + offset for number, offset in self._places]
        vectors = lanes // self._form.width if forms.allow_vectors(addresses) else 0
        launch = self._launchers.get(vectors)
        if launch is None:
            launch = self._launchers[vectors] = self._driver.launcher(self._device, self._form, vectors or lanes)
        return partial(launch, *addresses, vectors, lanes)


class _Tabled:
    """A launch with tables in the device's memory."""

    def __init__(self, driver: Driver, device: int, form: Form, leaves: Sequence[Leaf], lanes: int) -> None:
        places = [_split(address) for leaf in leaves for address in (leaf.out, *leaf.buffers)]
        self._count = len(leaves[0].buffers)
        shape = len(leaves), 1 + self._count
        self._numbers = np.array([number for number, _ in places], np.intp).reshape(shape)
        self._offsets = np.array([offset for _, offset in places], np.int64).reshape(shape)
        self._layout = forms.Layout(form, [leaf.elements * lanes for leaf in leaves], self._count)
        self._driver, self._device, self._form = driver, device, form
        self._heads: Memory | None = None
        self._launcher: Callable[..., object] | None = None

    def bind(self, begins: Sequence[int], numbers: NDArray[np.int64], keeps: list[Memory]) -> Call:  # noqa: ARG002
        driver, chunks = self._driver, self._layout.chunks
        if self._heads is None or self._launcher is None:
            self._heads = driver.upload(self._device, self._layout.heads)
            self._launcher = driver.launcher(self._device, self._form, chunks * forms.THREADS)
        rows = driver.upload(self._device, self._layout.rows(numbers[self._numbers] + self._offsets))
        keeps += [self._heads, rows]
        return partial(self._launcher, self._heads.address, rows.address, chunks, self._count)


class _Copy:
    """A copy without gaps."""

    def __init__(self, driver: Driver, copy: Copy) -> None:
        self._comes = copy.target.device == copy.device
        self._copy: Callable[..., object] = driver.copy if self._comes else driver.copy_out
        self._device, self._nbytes = copy.device, copy.nbytes
        self._target_device, self._source_device = copy.target.device, copy.source.device
        self._target, self._source = _split(copy.target.address), _split(copy.source.address)

    def bind(self, begins: Sequence[int], numbers: NDArray[np.int64], keeps: list[Memory]) -> Call:  # noqa: ARG002
        number, offset = self._target
        target = begins[number] + offset
        number, offset = self._source
        source = begins[number] + offset
        if self._comes:
            return partial(self._copy, self._device, target, self._source_device, source, self._nbytes)
        return partial(self._copy, self._device, self._target_device, target, source, self._nbytes)


class _Rows:
    """A copy of rows."""

    def __init__(self, driver: Driver, rows: Rows) -> None:
        self._driver, self._rows = driver, rows
        self._target, self._source = _split(rows.target), _split(rows.source)

    def bind(self, begins: Sequence[int], numbers: NDArray[np.int64], keeps: list[Memory]) -> Call:  # noqa: ARG002
        (to, to_offset), (by, by_offset) = self._target, self._source
        rows = self._rows._replace(target=begins[to] + to_offset, source=begins[by] + by_offset)
        return partial(self._driver.copy_rows, *rows)


class _Meet:
    """Each device's stream waits for the others'."""

    def __init__(self, driver: Driver, devices: Sequence[int]) -> None:
        self._call = partial(meet, driver, devices)

    def bind(self, begins: Sequence[int], numbers: NDArray[np.int64], keeps: list[Memory]) -> Call:  # noqa: ARG002
        return self._call


def meet(driver: Driver, devices: Sequence[int]) -> None:
    """Let each device's stream wait for what the others' have been given so far."""
    events: dict[int, Any] = {device: driver.record(driver.stream(device)) for device in devices}
    for device in devices:
        for other in devices:
            if other != device:
                driver.wait(driver.stream(device), events[other])
    for event in events.values():
        driver.release(event)
