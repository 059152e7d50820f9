"""A driver over host memory that runs its work in any order that streams and events allow.

Devices are only labels of memory, but a kernel fails if it accesses memory that its device cannot reach. Freed memory
is poisoned: if results are right, memory was kept alive, and events enforced the order.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from aiodist._gpu.cuda_core import CudaCore, DeviceEvent
from aiodist._gpu.steps import HOST, Copy
from aiodist_kernels.cuda.forms import Form
from tests.gpu.problem import POISON
from tests.kernels.cuda import on_host


@dataclass(eq=False)
class Mark:
    """One record of an event."""

    done: bool = False


class FakeEvent(DeviceEvent):
    """An event; a stream that waits for it waits for its latest record."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self.released = False


@dataclass(eq=False)
class FakeMemory:
    """Memory of a device. It is poisoned after its last reference is gone, in stream order."""

    array: np.ndarray
    address: int


@dataclass
class FakeDriver(CudaCore):
    """Work stays in its streams until they are drained, or an event is waited for.

    Args:
        seed: the seed for the order in which streams advance.
        walls: pairs of devices that cannot read each other's memory.
        unloaded: whether kernels must be loaded first.
    """

    seed: int = 0
    walls: set[frozenset[int]] = field(default_factory=set)
    unloaded: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queues: dict[Any, deque[Callable[[], bool]]] = defaultdict(deque)
        self.regions: dict[int, tuple[int, int]] = {}
        self.log: list[tuple[Any, ...]] = []
        self.loaded: set[tuple[int, Form]] = set()
        self.spare: list[FakeEvent] = []
        self.replicas: dict[str, Any] = {}
        self.entered = False
        self.host_waits = 0
        self.waited_for = threading.Event()
        self.eager = False
        self.gate: threading.Event | None = None
        self.lock = threading.RLock()

    # The interface of the driver.

    @contextmanager
    def using(self) -> Iterator[None]:
        with self.lock:
            assert not self.entered, "nested"
            self.entered = True
            try:
                yield
            finally:
                self.entered = False

    def stream(self, device: int, name: str = "") -> Any:
        if not name:
            return ("own", device)
        self.replicas[name] = ("replica", name, device)
        return self.replicas[name]

    def used_stream(self, name: str) -> Any:
        return self.replicas.get(name)

    def foreign_stream(self, device: int, handle: int) -> Any:
        return ("foreign", device, handle)

    def record(self, stream: Any) -> FakeEvent:
        assert self.entered
        mark = Mark()
        event = self.spare.pop() if self.spare else FakeEvent(mark)
        event.mark, event.released = mark, False
        self.log.append(("record", stream, mark))

        def reach() -> bool:
            mark.done = True
            return True

        self.queues[stream].append(reach)
        return event

    def release(self, event: Any) -> None:
        assert not event.released
        event.released = True
        self.spare.append(event)

    def wait(self, stream: Any, event: Any) -> None:
        assert self.entered
        assert not event.released
        mark = event.mark
        self.log.append(("wait", stream, mark))
        self.queues[stream].append(lambda: mark.done)

    def is_done(self, event: Any) -> bool:
        assert not event.released
        if self.eager:
            self.drain()
        return bool(event.mark.done)

    def wait_for(self, event: Any) -> None:
        assert not event.released
        self.host_waits += 1
        self.waited_for.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        while not event.mark.done:
            self.step()

    def allocate(self, device: int, nbytes: int) -> Any:
        raw = np.full(nbytes + 16, POISON, np.uint8)
        array = raw[-raw.__array_interface__["data"][0] % 16 :][:nbytes]
        address = array.__array_interface__["data"][0]
        memory = FakeMemory(array, address)
        self.regions[address] = (nbytes, device)
        weakref.finalize(memory, self._free, array, address, device)
        return memory

    def host_memory(self, nbytes: int) -> np.ndarray:
        memory = self.allocate(HOST, nbytes)
        return np.asarray(SimpleNamespace(memory=memory, __array_interface__=memory.array.__array_interface__))

    def upload(self, device: int, words: np.ndarray) -> Any:
        memory = self.allocate(device, words.nbytes)
        given = words.tobytes()
        address = memory.address
        self._enqueue(("upload", device), device, lambda: ctypes.memmove(address, given, len(given)))
        return memory

    def copy(self, copy: Copy) -> None:
        device, (to, target), (by, source), nbytes, rows, *pitches = copy
        assert rows == 1 or (to == by and min(pitches) >= nbytes)

        def work() -> None:
            for row in range(rows):
                there, here = (begin + row * pitch for begin, pitch in zip((target, source), pitches, strict=True))
                self._check(to, there, nbytes, exactly=True)
                self._check(by, here, nbytes, exactly=True)
                ctypes.memmove(there, here, nbytes)

        self._enqueue(("copy", to, by), device, work)

    def is_loaded(self, device: int, form: Form) -> bool:
        return not self.unloaded or (device, form) in self.loaded

    def load(self, device: int, form: Form) -> None:
        self.loaded.add((device, form))

    def launcher(self, device: int, form: Form, work: int) -> Callable[..., None]:
        assert self.is_loaded(device, form)
        return partial(self.launch, device, form, work)

    def launch(self, device: int, form: Form, work: int, *arguments: int) -> None:
        assert work > 0
        own, reachable = partial(self._check, device, exactly=True), partial(self._check, device)
        self._enqueue(("launch", device), device, lambda: on_host.launch(form, arguments, own, reachable))

    def reaches(self, device: int, other: int) -> bool:
        return device == other or frozenset({device, other}) not in self.walls

    # The work of devices.

    def step(self) -> bool:
        """Run one item of work on one stream; return whether there was any."""
        with self.lock:
            return self._step()

    def _step(self) -> bool:
        streams = [stream for stream, queue in self.queues.copy().items() if queue]
        self.random.shuffle(streams)
        for stream in streams:
            if self.queues[stream][0]():
                self.queues[stream].popleft()
                return True
        assert not streams, "all streams wait for events that no stream reaches"
        return False

    def enqueue(self, stream: Any, work: Callable[[], object]) -> None:
        """Enqueue a replica's own work."""

        def run() -> bool:
            work()
            return True

        self.queues[stream].append(run)

    def drain(self) -> None:
        while self.step():
            pass

    def _enqueue(self, entry: tuple[Any, ...], device: int, work: Callable[[], object]) -> None:
        assert self.entered
        self.log.append(entry)
        self.enqueue(self.stream(device), work)

    def _check(self, device: int, address: int, nbytes: int, *, exactly: bool = False) -> None:
        for start, (size, owner) in self.regions.copy().items():  # the collector may free some meanwhile
            if start <= address and address + nbytes <= start + size:
                assert owner == device if exactly else self.reaches(device, owner), f"device {device} reads {owner}"
                return
        raise AssertionError(f"device {device} accesses {nbytes} bytes that are not allocated")

    def _free(self, array: np.ndarray, address: int, device: int) -> None:
        def poison() -> bool:
            array[...] = POISON
            return True

        del self.regions[address]
        self.queues[self.stream(device)].append(poison)


def placed(driver: FakeDriver, device: int, values: np.ndarray) -> FakeMemory:
    """Return device memory with these values."""
    memory: FakeMemory = driver.allocate(device, values.nbytes)
    memory.array[...] = np.frombuffer(values.tobytes(), np.uint8)
    return memory
