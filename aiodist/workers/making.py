"""Making communicators that an engine can only make by blocking: in a thread, one after the other.

What is made has members that are known to make it, too, in the same order for all that have members in common (the
lane book sees to both): so each is complete as soon as the slowest of its members has got to it, and none waits for one
behind it. A member that dies in the midst leaves the thread waiting for ever. Nobody waits for the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist.workers.communicator import Communicator


class Making:
    """A communicator in the making.

    Args:
        make: makes it, and blocks meanwhile. It is called when all that was to be made before has been.
    """

    def __init__(self, make: Callable[[], Communicator]) -> None:
        self._make = make
        self._made: Communicator | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._over = False
        _to_make().put(self)

    def carry_out(self) -> None:
        """Make it, in the thread that does."""
        try:
            self._made = self._make()
        except Exception as error:  # noqa: BLE001  (it is for who waits)
            self._error = error
        with self._lock:
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def test(self) -> bool:
        """Return whether it is complete.

        Raises:
            Exception: what went wrong in the engine.
        """
        if self._error is not None:
            raise self._error
        return self._made is not None

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Call a function, in the thread, when it is complete; at once where it is."""
        with self._lock:
            if not self._over:
                self._callbacks.append(fn)
                return
        fn()

    def result(self) -> Communicator:
        """Return it; it is complete."""
        assert self._made is not None
        return self._made


_queue: SimpleQueue[Making] | None = None


def _to_make() -> SimpleQueue[Making]:
    """Return what the thread is to make; the first use starts it."""
    global _queue  # noqa: PLW0603  (one thread a process, as engines have one order)
    if _queue is None:
        _queue = SimpleQueue()
        threading.Thread(target=_serve, args=(_queue,), name="aiodist communicators", daemon=True).start()
    return _queue


def _serve(queue: SimpleQueue[Making]) -> None:
    while True:
        queue.get().carry_out()
