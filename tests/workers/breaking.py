"""Faults of one simulated worker's engine, or of its memory: at a given call, and from then on as often as wanted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest

from aiodist.workers.simulated import SimulatedCommunicator
from aiodist_kernels.pool import Pool

_worker: ContextVar[int | None] = ContextVar("worker", default=None)


class BadRequest:
    """A request of whose operation the engine says nothing but that it has failed, though it may be complete elsewhere.

    Args:
        begun: that operation.
        error: what is raised.
    """

    def __init__(self, begun: Any, error: Exception) -> None:
        self._error = error
        self.result = getattr(begun, "result", None)

    def test(self) -> bool:
        """Fail."""
        raise self._error

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Call it at once."""
        fn()


class Fault:
    """What goes wrong on one worker.

    Args:
        patch: takes its place in the engine, and in memory.
        victim: the worker.

    Attributes:
        at: the call that fails, from 0; None for none.
        times: how many do, from there.
        how: ``begin``, the operation is not begun; ``test``, it is, and its end is never known; ``memory``, there is
            none.
        error: what is raised.
        happened: that it has.
    """

    def __init__(self, patch: pytest.MonkeyPatch, victim: int = 0) -> None:
        self.victim = victim
        self.at: int | None = None
        self.times, self.how = 1, "begin"
        self.error: Exception = RuntimeError("the engine is broken")
        self.happened = False
        self._calls = 0
        begin, empty = SimulatedCommunicator._begin, Pool.empty

        def begin_or_fail(communicator: Any, *operation: Any) -> Any:
            strikes = self.how != "memory" and self._strikes()
            if strikes and self.how == "begin":
                raise self.error
            begun = begin(communicator, *operation)
            return BadRequest(begun, self.error) if strikes else begun

        def empty_or_fail(pool: Any, *what: Any, **how: Any) -> Any:
            if self.how == "memory" and self._strikes():
                raise self.error
            return empty(pool, *what, **how)

        patch.setattr(SimulatedCommunicator, "_begin", begin_or_fail)
        patch.setattr(Pool, "empty", empty_or_fail)

    def strike(self, at: int | None, how: str = "begin", error: Exception | None = None, times: int = 1) -> None:
        """Let it happen at a call from now on."""
        self.at, self.how, self.times = at, how, times
        self.error = error or RuntimeError("the engine is broken")
        self._calls, self.happened = 0, False

    def _strikes(self) -> bool:
        if _worker.get() != self.victim or self.at is None:
            return False
        self._calls += 1
        strikes = self.at < self._calls <= self.at + self.times
        self.happened |= strikes
        return strikes

    async def on(self, rank: int, operation: Awaitable[Any]) -> Any:
        """Await what a worker does: all that it begins counts as its own."""
        _worker.set(rank)
        return await operation
