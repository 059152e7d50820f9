"""Worker threads whose work a test lets go on when it wants to: no clock, no luck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodist._runtime import pool
from aiodist_kernels import policy

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class HeldThreads:
    """Stands in for the executor of a run: keeps what it is given until the test releases it.

    Attributes:
        given: what is held.
        open: how many executors have been begun and not ended.
    """

    def __init__(self) -> None:
        self.given: list[Callable[[], Any]] = []
        self.open = 0

    def __call__(self, workers: int, thread_name_prefix: str) -> HeldThreads:
        self.open += 1
        return self

    def submit(self, fn: Callable[[], Any]) -> None:
        self.given.append(fn)

    def shutdown(self, *, wait: bool) -> None:
        assert wait
        assert not self.given, "the run has ended before its work"
        self.open -= 1

    def release(self) -> None:
        """Do all that is held, also what comes of it."""
        while self.given:
            self.given.pop(0)()


def hold(monkeypatch: pytest.MonkeyPatch) -> HeldThreads:
    """Let every all_reduce of 256 KiB and more go to worker threads, which are held."""
    held = HeldThreads()
    monkeypatch.setattr(pool, "ThreadPoolExecutor", held)
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1)
    return held
