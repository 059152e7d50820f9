"""The thread of a device: the one in which a replica's blocking work runs while its run lasts."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio import CancelScope, get_cancelled_exc_class

from aiodist._runtime import threads

T = TypeVar("T")


class DeviceThread:
    """The thread of one device, taken with the first work.

    Args:
        device: the device's name, which the thread bears.
        call_soon_threadsafe: calls a function in the event loop, from any thread.
    """

    def __init__(self, device: str, call_soon_threadsafe: Callable[..., object]) -> None:
        self._device = device
        self._worker: threads.Worker | None = None
        self._call_soon_threadsafe = call_soon_threadsafe

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Return ``fn(*args)``, called in the worker thread, in the caller's context variables.

        A thread cannot be stopped: when the caller is cancelled, the cancellation is raised once ``fn`` has returned.
        """
        if self._worker is None:
            self._worker = threads.take(f"aiodist {self._device}")
        call = self._on_gpu(fn) if self._device.startswith("GPU:") else fn
        finished = anyio.Event()
        result: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                result.append(context.run(call, *args))
            except BaseException as error:  # noqa: BLE001  (whatever it is, it is for the caller)
                errors.append(error)
            with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._call_soon_threadsafe(finished.set)

        context = contextvars.copy_context()
        self._worker.submit(work)
        await _outwait(finished)
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # an exception keeps this frame, which keeps the exception
        return result[0]

    def _on_gpu(self, fn: Callable[..., T]) -> Callable[..., T]:
        from aiodist._gpu import current

        return partial(current.call_on, self._device, current.streams(self._device), fn)

    def close(self) -> None:
        """Give the thread back. Its work is done by then."""
        if self._worker is not None:
            self._worker.release()


async def _outwait(finished: anyio.Event) -> None:
    """Wait until the work is done, whatever is cancelled meanwhile, and be cancelled then."""
    cancelled: BaseException | None = None
    with CancelScope(shield=True):
        while not finished.is_set():
            try:
                await finished.wait()
            except get_cancelled_exc_class() as error:  # asyncio's own, which no shield keeps out
                cancelled = error
    if cancelled is not None:
        raise cancelled
    await anyio.lowlevel.checkpoint_if_cancelled()
