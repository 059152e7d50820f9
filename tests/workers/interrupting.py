"""Interruptions: a coroutine is cancelled, or gets an exception, at a given one of its suspensions."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import anyio
import sniffio

Interrupt = Callable[[], object]


class Caller:
    """A caller that is interrupted at one of its suspensions.

    Args:
        at: which one, from 0.
        how: ``scope``, a cancel scope around it; ``task``, as `asyncio.timeout` and Ctrl-C do it, which no shield keeps
            out.

    Attributes:
        suspensions: how many there have been.
        interrupted: it has come to that one.
    """

    def __init__(self, at: int, how: str) -> None:
        self._at = at
        self._how = how
        self.suspensions = 0
        self.interrupted = False

    async def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns; None where it was cancelled."""
        with anyio.CancelScope() as scope:
            task = asyncio.current_task() if sniffio.current_async_library() == "asyncio" else None
            try:
                return await self._driven(coroutine, self._interrupt(scope, task))
            except asyncio.CancelledError:
                if task is None or self._how == "scope":
                    raise
                task.uncancel()
        return None

    def _interrupt(self, scope: anyio.CancelScope, task: asyncio.Task[Any] | None) -> Interrupt:
        if task is None or self._how == "scope":
            return scope.cancel
        return task.cancel

    @types.coroutine
    def _driven(self, coroutine: Coroutine[Any, Any, Any], interrupt: Interrupt) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                trap = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as end:
                return end.value
            if self.suspensions == self._at:
                self.interrupted = True
                interrupt()
            self.suspensions += 1
            error = None
            try:
                value = yield trap
            except BaseException as thrown:  # noqa: BLE001  (it is for the coroutine)
                error = thrown
