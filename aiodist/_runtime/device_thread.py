"""The thread of a device: the one in which a replica's blocking work runs while its run lasts."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio import CancelScope, get_cancelled_exc_class

T = TypeVar("T")


class DeviceThread:
    """The thread of one device; it starts with the first work.

    Args:
        device: the device's name, which the thread bears.
        call_soon_threadsafe: calls a function in the event loop, from any thread.
    """

    def __init__(self, device: str, call_soon_threadsafe: Callable[..., object]) -> None:
        self._device = device
        self._executor: ThreadPoolExecutor | None = None
        self._call_soon_threadsafe = call_soon_threadsafe

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Return ``fn(*args)``, called in the worker thread, in the caller's context variables.

        A thread cannot be stopped: when the caller is cancelled, the cancellation is raised once ``fn`` has returned.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"aiodist {self._device}")
        finished = anyio.Event()
        call = self._on_gpu(fn) if self._device.startswith("GPU:") else fn
        future = self._executor.submit(contextvars.copy_context().run, call, *args)
        future.add_done_callback(lambda _: self._call_soon_threadsafe(finished.set))
        await _outwait(future, finished)
        return future.result()

    def _on_gpu(self, fn: Callable[..., T]) -> Callable[..., T]:
        from aiodist._gpu import current

        return partial(current.call_on, self._device, current.streams(self._device), fn)

    def close(self) -> None:
        """End the thread. Its work is done by then."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)


async def _outwait(future: Future[Any], finished: anyio.Event) -> None:
    """Wait until the work is done, whatever is cancelled meanwhile, and be cancelled then."""
    cancelled: BaseException | None = None
    with CancelScope(shield=True):
        while not (
            finished.is_set() and future.done()
        ):  # work that is done at once waits, too: always in the same order
            try:
                await finished.wait()
            except get_cancelled_exc_class() as error:  # asyncio's own, which no shield keeps out
                cancelled = error
    if cancelled is not None:
        raise cancelled
    await anyio.lowlevel.checkpoint_if_cancelled()
