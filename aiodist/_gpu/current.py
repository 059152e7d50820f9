"""A replica's device and stream as those of a thread, for the frameworks that the program has loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from aiodist._arrays import gpus
from aiodist._arrays.frameworks import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, TYPES
from aiodist._gpu import enqueue
from aiodist._gpu.cuda_core import CudaCore, DeviceStream

T = TypeVar("T")


def streams(device: str) -> frozenset[int]:
    """Return the streams on which this thread's frameworks work now on a replica's GPU, by their handles."""
    ordinal = gpus.logical.ordinal(device)
    loaded = [name for name, module in (("torch", "torch"), ("cupy", "cupy"), ("numba", "numba.cuda")) if _has(module)]
    handles = {TYPES[name].stream(ordinal) or LEGACY_DEFAULT_STREAM for name in loaded}
    return frozenset(handles - {PER_THREAD_DEFAULT_STREAM})  # in another thread, that is another stream


def _has(module: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and (module != "torch" or found.cuda.is_available())


def call_on(device: str, callers: frozenset[int], fn: Callable[..., T], *args: Any) -> T:
    """Return ``fn(*args)``, called with a GPU as the current device, and its stream as the current one.

    What it enqueues comes behind what its caller's streams had been given, and before what they are given afterwards:
    values go in and out as if there were one stream.

    Without cuda.core there are no streams of ours: the frameworks' own default streams serve. `callers` are the
    caller's `streams`.
    """
    ordinal = gpus.logical.ordinal(device)
    with ExitStack() as stack:
        stream = _stream(device, ordinal, callers, stack)
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and torch.cuda.is_available():
            stack.enter_context(torch.cuda.device(ordinal))
            if stream is not None:
                own = torch.cuda.ExternalStream(int(stream.handle), device=ordinal)
                stack.enter_context(torch.cuda.stream(own))
        if cupy is not None:
            stack.enter_context(cupy.cuda.Device(ordinal))
            if stream is not None:
                stack.enter_context(_of_cupy(cupy, stream, ordinal))
        if (numba := sys.modules.get("numba.cuda")) is not None:
            with enqueue.enqueuing:  # Numba lists its devices at the first look, which two threads may not take at once
                found = numba.gpus[ordinal]
            stack.enter_context(found)
        return fn(*args)


def _of_cupy(cupy: Any, stream: DeviceStream, ordinal: int) -> Any:
    """Return a stream as CuPy's; from its version 14 on it takes any object that says which stream it is."""
    take = getattr(cupy.cuda.Stream, "from_external", None)
    return cupy.cuda.ExternalStream(int(stream.handle), ordinal) if take is None else take(stream.stream)


def _stream(device: str, ordinal: int, callers: frozenset[int], stack: ExitStack) -> DeviceStream | None:
    """Return the replica's stream, which waits for the caller's, and on the way out they for it."""
    try:
        driver = enqueue.queue().driver
    except ImportError:
        return None
    with enqueue.enqueuing, driver.using():
        own = driver.replica_stream(device, ordinal)
        others = [driver.foreign_stream(ordinal, handle) for handle in sorted(callers)]
    _order(driver, others, [own])
    stack.callback(_order, driver, [own], others)
    return own


def _order(driver: CudaCore, first: Sequence[DeviceStream], then: Sequence[DeviceStream]) -> None:
    """Let streams wait for what others have been given so far."""
    with enqueue.enqueuing, driver.using():
        for stream in first:
            event = driver.record(stream)
            for other in then:
                driver.wait(other, event)
            driver.release(event)
