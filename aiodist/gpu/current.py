"""A replica's device and stream as those of a thread, for the frameworks that the program has loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from aiodist._arrays import gpus
from aiodist.gpu import process

T = TypeVar("T")


def call_on(device: str, fn: Callable[..., T], *args: Any) -> T:
    """Return ``fn(*args)``, called with a GPU as the current device, and its stream as the current one.

    Without cuda.core there are no streams of ours: the frameworks' own default streams serve.

    Args:
        device: its canonical name.
        fn: the function.
        *args: its arguments.
    """
    ordinal = gpus.logical.ordinal(device)
    handle = _stream(device, ordinal)
    with ExitStack() as stack:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and torch.cuda.is_available():
            stack.enter_context(torch.cuda.device(ordinal))
            if handle is not None:
                stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(handle, device=ordinal)))
        if cupy is not None:
            stack.enter_context(cupy.cuda.Device(ordinal))
            if handle is not None:
                stack.enter_context(cupy.cuda.ExternalStream(handle, ordinal))
        if (numba := sys.modules.get("numba.cuda")) is not None:
            stack.enter_context(numba.gpus[ordinal])
        return fn(*args)


def _stream(device: str, ordinal: int) -> int | None:
    try:
        driver = process.executor().driver
    except ImportError:
        return None
    with process.enqueuing, driver.using():
        return int(driver.replica_stream(device, ordinal).stream.handle)
