"""Worker threads whose work a test lets go on when it wants to: no clock, no luck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodist._runtime import threads
from aiodist_kernels import policy

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class HeldThreads:
    """Stands in for a run's worker threads: keeps what they are given until the test lets it go.

    Attributes:
        given: what is held.
        taken: how many threads are taken and not released.
    """

    def __init__(self) -> None:
        self.given: list[Callable[[], Any]] = []
        self.taken = 0

    def __call__(self, name: str) -> HeldThreads:
        self.taken += 1
        return self

    def submit(self, fn: Callable[[], Any]) -> None:
        self.given.append(fn)

    def release(self) -> None:
        assert not self.given, "the run has ended before its work"
        self.taken -= 1

    def go_on(self) -> None:
        """Do all that is held, also what comes of it."""
        while self.given:
            self.given.pop(0)()


def hold(monkeypatch: pytest.MonkeyPatch) -> HeldThreads:
    """Let every all_reduce of 256 KiB and more go to worker threads, which are held."""
    held = HeldThreads()
    monkeypatch.setattr(threads, "take", held)
    monkeypatch.setattr(policy, "BLOCKING_FROM_MOVED", 1)
    return held
