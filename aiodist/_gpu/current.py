"""A replica's GPU and stream, as the current ones of a thread in all frameworks that the program has loaded.

So what a function enqueues in a worker thread is ordered with the replica's own work, as collectives are.
"""

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


def current_streams(device: str) -> frozenset[int]:
    """Return the handles of this thread's frameworks' current streams on a replica's GPU."""
    ordinal = gpu_number(device)
    loaded = [name for name, module in (("torch", "torch"), ("cupy", "cupy"), ("numba", "numba.cuda")) if _has(module)]
    handles = {TYPES[name].stream(ordinal) or LEGACY_DEFAULT_STREAM for name in loaded}
    return frozenset(handles - {PER_THREAD_DEFAULT_STREAM})  # another stream in another thread


def _has(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and (module != "torch" or found.cuda.is_available())


def call_on(device: str, callers: frozenset[int], fn: Callable[..., T], *args: Any) -> T:
    """Return ``fn(*args)``, called with a replica's GPU and stream as the current ones.

    What it enqueues is ordered after everything on its caller's streams, and before everything that is enqueued there
    later, as if there were one stream. ``callers`` are the caller's `current_streams`.
    """
    ordinal = gpu_number(device)
    driver = enqueue.queue().driver
    with ExitStack() as stack:
        with enqueue.enqueuing, driver.using():
            own = driver.stream(ordinal, device)
            others = [driver.foreign_stream(ordinal, handle) for handle in sorted(callers)]
            enqueue.order(driver, others, [own])
        stack.callback(_order_callers, driver, own, others)
        if _has("torch"):
            torch = sys.modules["torch"]
            stack.enter_context(torch.cuda.device(ordinal))
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(int(own.handle), device=ordinal)))
        if _has("cupy"):
            cupy = sys.modules["cupy"]
            stack.enter_context(cupy.cuda.Device(ordinal))
            stack.enter_context(cupy.cuda.Stream.from_external(own.stream))
        if _has("numba.cuda"):
            with enqueue.enqueuing:  # Numba lists its devices on first use, which is not thread-safe
                found = sys.modules["numba.cuda"].gpus[ordinal]
            stack.enter_context(found)
        return fn(*args)


def _order_callers(driver: CudaCore, own: DeviceStream, others: Sequence[DeviceStream]) -> None:
    with enqueue.enqueuing, driver.using():
        enqueue.order(driver, [own], others)
