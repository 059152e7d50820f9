"""A replica's device and stream as those of a thread, for the frameworks that the program has loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from aiodist._arrays.device import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, TYPES
from aiodist._arrays.devices import gpu_number
from aiodist._gpu import enqueue
from aiodist._gpu.cuda_core import CudaCore, DeviceStream

T = TypeVar("T")


def streams(device: str) -> frozenset[int]:
    """Return the streams on which this thread's frameworks work now on a replica's GPU, by their handles."""
    ordinal = gpu_number(device)
    loaded = [name for name, module in (("torch", "torch"), ("cupy", "cupy"), ("numba", "numba.cuda")) if _has(module)]
    handles = {TYPES[name].stream(ordinal) or LEGACY_DEFAULT_STREAM for name in loaded}
    return frozenset(handles - {PER_THREAD_DEFAULT_STREAM})  # in another thread, that is another stream


def _has(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and (module != "torch" or found.cuda.is_available())


def call_on(device: str, callers: frozenset[int], fn: Callable[..., T], *args: Any) -> T:
    """Return ``fn(*args)``, called with a GPU as the current device, and its stream as the current one.

    What it enqueues comes behind what its caller's streams had been given, and before what they are given afterwards:
    values go in and out as if there were one stream. `callers` are the caller's `streams`.
    """
    ordinal = gpu_number(device)
    driver = enqueue.queue().driver
    with ExitStack() as stack:
        with enqueue.enqueuing, driver.using():
            own = driver.stream(ordinal, device)
            others = [driver.foreign_stream(ordinal, handle) for handle in sorted(callers)]
        _order(driver, others, [own])
        stack.callback(_order, driver, [own], others)
        if _has("torch"):
            torch = sys.modules["torch"]
            stack.enter_context(torch.cuda.device(ordinal))
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(int(own.handle), device=ordinal)))
        if _has("cupy"):
            cupy = sys.modules["cupy"]
            stack.enter_context(cupy.cuda.Device(ordinal))
            stack.enter_context(cupy.cuda.Stream.from_external(own.stream))
        if _has("numba.cuda"):
            with enqueue.enqueuing:  # Numba lists its devices at the first look, which two threads may not take at once
                found = sys.modules["numba.cuda"].gpus[ordinal]
            stack.enter_context(found)
        return fn(*args)


def _order(driver: CudaCore, first: Sequence[DeviceStream], then: Sequence[DeviceStream]) -> None:
    """Let streams wait for what others have been given so far."""
    with enqueue.enqueuing, driver.using():
        for stream in first:
            event = driver.record(stream)
            for other in then:
                driver.wait(other, event)
            driver.release(event)
