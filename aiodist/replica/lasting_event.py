"""Events that outlive the event loop in which somebody began to wait for them.

A strategy of several workers serves one event loop after the other, of asyncio or of trio: a program may call
`asyncio.run` for each epoch. anyio's events, and asyncio's own, belong to the loop in which they were first waited for.
"""

from __future__ import annotations

from contextlib import suppress

import anyio


class LastingEvent:
    """An event for which tasks of any event loop can wait; it is set in the one in which somebody does, or in none."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[anyio.Event] = []

    def is_set(self) -> bool:
        """Return whether it has been set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake who waits."""
        self._set = True
        while self._waiting:
            with suppress(RuntimeError):  # who waited was left behind in a loop that is closed
                self._waiting.pop().set()

    async def wait(self) -> None:
        """Wait until it is set; return at once where it is."""
        if self._set:
            return
        here = anyio.Event()
        self._waiting.append(here)
        try:
            await here.wait()
        finally:
            if here in self._waiting:
                self._waiting.remove(here)
