"""Making communicators that an engine can only make by blocking: in a thread, one after the other.

What is made has members that are known to make it, too, in the same order for all that have members in common (the
lane book sees to both): so each is complete as soon as the slowest of its members has got to it, and none waits for one
behind it. That holds within a strategy, so each has a thread of its own: of two strategies, workers may begin to make
what they need in any order. A member that dies in the midst leaves the thread waiting for ever. Nobody waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist.workers.communicator import Communicator


class Maker:
    """Makes the communicators of a strategy, in a thread while there is anything to make."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._to_make: deque[Making] = deque()

    def begin(self, make: Callable[[], Communicator]) -> Making:
        """Begin to make one.

        Args:
            make: makes it, and blocks meanwhile. It is called when all that was to be made before has been.
        """
        making = Making(make)
        with self._lock:
            self._to_make.append(making)
            first = len(self._to_make) == 1
        if first:
            threading.Thread(target=self._serve, name="aiodist communicators", daemon=True).start()
        return making

    def _serve(self) -> None:
        while True:
            self._to_make[0].carry_out()
            with self._lock:
                self._to_make.popleft()
                if not self._to_make:
                    return


class Making:
    """A communicator in the making.

    Args:
        make: makes it, and blocks meanwhile.
    """

    def __init__(self, make: Callable[[], Communicator]) -> None:
        self._make = make
        self._made: Communicator | None = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._over = False
        self._lock = threading.Lock()

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
