"""Ctrl-C, as the command line takes it: the first ends the run in order, a second changes nothing, a third ends all.

asyncio takes the first one so, too, but raises KeyboardInterrupt at the second, wherever the program is: in the midst
of unwinding, or of the interpreter's end, where nobody can catch it.
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
_MOST: Final = 2
_SHOW_CURSOR: Final = b"\x1b[?25h\n"


class Interruptions:
    """Counts the Ctrl-Cs of this process.

    Attributes:
        taken: how many there were.
        cancel: ends what an event loop runs; None where none does, and KeyboardInterrupt is raised.
    """

    def __init__(self) -> None:
        self._installed = False
        self.taken = 0
        self.cancel: Callable[[], object] | None = None

    def install(self) -> None:
        """Take them from now on, to the end of the process, where nobody else does."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, lambda *_: self.take())
            self._installed = True

    def note(self) -> None:
        """Note one that somebody else has taken, who ends the run: more of them change nothing."""
        if self._installed:
            self.taken = max(self.taken, 1)

    def take(self) -> None:
        """Take one.

        Raises:
            KeyboardInterrupt: it is the first, and no event loop runs.
        """
        self.taken += 1
        if self.taken > _MOST:
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(1, _SHOW_CURSOR)
            os._exit(_INTERRUPTED)
        if self.taken == 1:
            if self.cancel is None:
                raise KeyboardInterrupt
            self.cancel()


INTERRUPTIONS: Final = Interruptions()


def run(fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run a coroutine function in an event loop of its own, which the first Ctrl-C cancels.

    Raises:
        KeyboardInterrupt: it was.
        Exception: what the function raises.
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
    if INTERRUPTIONS.taken or not found:
        raise KeyboardInterrupt
    return found[0]
