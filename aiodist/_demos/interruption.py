"""Ctrl-C on the command line: the first one ends the run in order, a second changes nothing, a third ends the process.

asyncio handles the first one in the same way, but raises KeyboardInterrupt at the second wherever the program is: in
the middle of unwinding, or of the interpreter's shutdown, where nobody can catch it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

_INTERRUPTED: Final = 128 + signal.SIGINT
_SHOW_CURSOR: Final = b"\x1b[?25h\n"


class InterruptedRun(Exception):  # noqa: N818 - no error: a person asked for it
    """Ctrl-C came in the middle of a run; the text says at which step."""


class Interruptions:
    """Counts this process's Ctrl-Cs.

    Attributes:
        count: how many there have been.
        cancel: cancels what the event loop runs; None where no loop runs, and KeyboardInterrupt is raised.
    """

    def __init__(self) -> None:
        self._installed = False
        self.count = 0
        self.cancel: Callable[[], object] | None = None

    def install(self) -> None:
        """Handle SIGINT until the process ends, unless somebody else does."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, lambda *_: self.handle())
            self._installed = True

    def note(self) -> None:
        """Note a Ctrl-C that somebody else has handled, who ends the run: more of them change nothing."""
        if self._installed:
            self.count = max(self.count, 1)

    def handle(self) -> None:
        """Handle a Ctrl-C.

        Raises:
            KeyboardInterrupt: it is the first, and no event loop runs.
        """
        self.count += 1
        if self.count > 2:
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(1, _SHOW_CURSOR)
            os._exit(_INTERRUPTED)
        if self.count == 1:
            if self.cancel is None:
                raise KeyboardInterrupt
            self.cancel()


INTERRUPTIONS: Final = Interruptions()


def run(fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run a coroutine function in an event loop of its own, which the first Ctrl-C cancels.

    Raises:
        KeyboardInterrupt: it was cancelled.
        Exception: whatever the function raises.
    """
    import asyncio  # both only where a demo runs

    import anyio

    async def cancellable() -> list[T]:
        found: list[T] = []
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            INTERRUPTIONS.cancel = lambda: loop.call_soon_threadsafe(scope.cancel)
            try:
                found.append(await fn(*args))
            finally:
                INTERRUPTIONS.cancel = None
        return found

    found = anyio.run(cancellable)
    if INTERRUPTIONS.count or not found:
        raise KeyboardInterrupt
    return found[0]
