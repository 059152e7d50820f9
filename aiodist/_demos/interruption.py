"""Ctrl-C in a demo: the first one ends the run in order, a second changes nothing, a third ends the process.

asyncio handles the first one in the same way, but raises KeyboardInterrupt at the second wherever the program is, for
example in the middle of unwinding.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

T = TypeVar("T")

_INTERRUPTED: Final = 128 + signal.SIGINT
_SHOW_CURSOR: Final = b"\x1b[?25h\n"


class InterruptedRun(Exception):  # noqa: N818 - no error: a person asked for it
    """Ctrl-C came in the middle of a run; the text says at which step."""


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
        with anyio.CancelScope() as scope, _handling(lambda: loop.call_soon_threadsafe(scope.cancel)) as interrupted:
            found.append(await fn(*args))
        return [] if interrupted else found

    found = anyio.run(cancellable)
    if not found:
        raise KeyboardInterrupt
    return found[0]


@contextmanager
def _handling(cancel: Callable[[], object]) -> Iterator[list[int]]:
    """Let the first Ctrl-C inside the block cancel, and a third end the process; give those that have come."""
    came: list[int] = []

    def handle(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 2:
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(1, _SHOW_CURSOR)
            os._exit(_INTERRUPTED)
        if len(came) == 1:
            cancel()

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
