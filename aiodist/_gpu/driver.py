"""What reductions need of a CUDA driver: streams, events, memory, launches. All that is asked of it is enqueued.

`cuda_core.CudaCore` is the real one. Nothing else in aiodist calls CUDA, so that everything else is tested without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from aiodist_kernels.cuda.forms import Form

Stream: TypeAlias = Any
Event: TypeAlias = Any


class Memory(Protocol):
    """Device memory, for as long as this object lives and the work on its stream that was enqueued before its end."""

    @property
    def address(self) -> int:
        """Where it begins."""
        ...


class Driver(Protocol):
    """Enqueues work; devices are the driver's ordinals. Only `wait_for` holds up the thread that calls it."""

    def using(self) -> AbstractContextManager[None]:
        """Leave the thread's current device as it was."""
        ...

    def stream(self, device: int) -> Stream:
        """Return the stream on which this device reduces: the same one always."""
        ...

    def replica_stream(self, name: str, device: int) -> Stream:
        """Return the stream of the logical device of that name: the same one always."""
        ...

    def used_stream(self, name: str) -> Stream | None:
        """Return the stream of a logical device, if anybody has asked for it: else there is nothing on it."""
        ...

    def foreign_stream(self, device: int, handle: int) -> Stream:
        """Return a stream that somebody else made, by its handle."""
        ...

    def record(self, stream: Stream) -> Event:
        """Mark what a stream has been given so far."""
        ...

    def release(self, event: Event) -> None:
        """Take an event back that nobody asks about any more; who waits for it by then still does."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream go on only when an event is done."""

    def is_done(self, event: Event) -> bool:
        """Return whether an event is done."""
        ...

    def wait_for(self, event: Event) -> None:
        """Hold up this thread until an event is done."""

    def allocate(self, device: int, nbytes: int) -> Memory:
        """Return memory for work on the device's own stream."""
        ...

    def host_memory(self, nbytes: int) -> Memory:
        """Return memory of the host that devices copy to and from without a detour, where the system has such."""
        ...

    def upload(self, device: int, words: np.ndarray[Any, Any]) -> Memory:
        """Return memory with a copy of an array, for work on the device's own stream."""
        ...

    def copy(self, device: int, target: int, source_device: int, source: int, nbytes: int) -> None:
        """Copy to this device's memory on its own stream, from the memory of any, or from the host's (`steps.HOST`)."""

    def copy_out(self, device: int, target_device: int, target: int, source: int, nbytes: int) -> None:
        """Copy from this device's memory on its own stream, to the memory of any, or to the host's."""

    def copy_rows(
        self, device: int, target: int, target_pitch: int, source: int, source_pitch: int, width: int, count: int
    ) -> None:
        """Copy rows of ``width`` bytes within this device's memory on its own stream.

        Args:
            device: the device.
            target: where the first goes.
            target_pitch: bytes from there to where the next goes.
            source: where the first lies.
            source_pitch: bytes from there to the next.
            width: bytes of a row.
            count: how many there are.
        """

    def is_loaded(self, device: int, form: Form) -> bool:
        """Return whether a kernel can be launched at once."""
        ...

    def load(self, device: int, form: Form) -> None:
        """Compile a kernel for a device and load it; it takes a few tenths of a second, in any thread.

        Raises:
            ImportError: what compiles or launches kernels is not installed.
        """

    def launcher(self, device: int, form: Form, work: int) -> Callable[..., object]:
        """Return what launches a loaded kernel on the device's own stream, with threads for so much work.

        It takes the kernel's arguments, one by one.
        """
        ...

    def reaches(self, device: int, other: int) -> bool:
        """Return whether kernels on a device can read the other's memory; from then on they do."""
        ...
