"""The thread of a device: the one in which a replica's blocking work runs while its run lasts."""

from __future__ import annotations

import contextvars
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from anyio import CancelScope, get_cancelled_exc_class, move_on_after

from aiodist._core.text import ids
from aiodist._runtime import threads

T = TypeVar("T")

_PATIENCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.1


class DeviceThread:
    """The thread of one device, taken with the first work.

    Args:
        device: the device's name, which the thread bears.
        replica_id: whose work it does.
        loop: the event loop.
        siblings: the threads of all replicas of the run.
    """

    def __init__(self, device: str, replica_id: int, loop: Any, siblings: Sequence[DeviceThread]) -> None:
        self._device = device
        self._replica_id = replica_id
        self._loop = loop
        self._siblings = siblings
        self._worker: threads.Worker | None = None
        self._left: dict[Any, str] = {}  # work that nobody waits for any more, unless it ends at once

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Return ``fn(*args)``, called in the worker thread, in the caller's context variables.

        A thread cannot be stopped: when the caller is cancelled, the cancellation is raised once ``fn`` has returned;
        after a Ctrl-C, once a second has gone by.
        """
        if self._worker is None:
            self._worker = threads.take(f"aiodist {self._device}")
        call = self._on_gpu(fn) if self._device.startswith("GPU:") else fn
        finished = self._loop.new_event()
        result: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                result.append(context.run(call, *args))
            except BaseException as error:  # noqa: BLE001  (whatever it is, it is for the caller)
                errors.append(error)
            with suppress(RuntimeError):  # the loop is closed: nobody is left to notify
                self._loop.call_soon_threadsafe(finished.set)

        context = contextvars.copy_context()
        self._worker.submit(work)
        try:
            await finished.wait()
        except get_cancelled_exc_class():
            self._left[finished] = _name(fn)
            with CancelScope(shield=True):
                await self._outwait(finished)
            raise
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # an exception keeps this frame, which keeps the exception
        return result[0]

    async def _outwait(self, finished: Any) -> None:
        """Wait until the work is done, whatever is cancelled meanwhile, or until a Ctrl-C has been for a second."""
        until: float | None = None
        while not finished.is_set():
            with suppress(get_cancelled_exc_class()), move_on_after(_PAUSE_SECONDS):  # asyncio's own: no shield helps
                await finished.wait()
            if until is None:
                until = time.monotonic() + _PATIENCE_SECONDS if self._loop.interrupted else None
            elif time.monotonic() >= until and not finished.is_set():
                _tell_of_those_left(self._siblings)
                return
        del self._left[finished]

    def working(self) -> list[str]:
        """Return the functions that run here although their callers have been cancelled, and forget them."""
        functions = [name for finished, name in self._left.items() if not finished.is_set()]
        self._left.clear()
        return functions

    @property
    def replica_id(self) -> int:
        """The replica whose work it does."""
        return self._replica_id

    def _on_gpu(self, fn: Callable[..., T]) -> Callable[..., T]:
        from aiodist._gpu import current

        return partial(current.call_on, self._device, current.streams(self._device), fn)

    def close(self) -> None:
        """Give the thread back, once its work is done."""
        if self._worker is not None:
            self._worker.release()


def _name(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return f"{getattr(fn, '__qualname__', type(fn).__qualname__).rpartition('<locals>.')[2]}()"


def _tell_of_those_left(siblings: Sequence[DeviceThread]) -> None:
    """Tell, in one line for the whole run, what goes on in threads after a Ctrl-C."""
    working: dict[str, list[int]] = {}
    for thread in siblings:
        for name in thread.working():
            working.setdefault(name, []).append(thread.replica_id)
    if working:
        functions = ", ".join(f"{name} of {ids(replicas)}" for name, replicas in working.items())
        with suppress(Exception):  # nobody may be left to notify
            sys.stderr.write(f"aiodist: interrupted while run_sync still runs {functions}\n")
