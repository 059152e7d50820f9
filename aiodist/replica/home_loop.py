"""The event loop that the workers of a strategy are driven by here: one after the other, if the program runs several.

Calls come from other threads, the control plane's above all. One that a loop has taken, but not come to before it was
closed or left, is not lost: it is made in the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from aiodist.replica.engine import current_loop


class HomeLoop:
    """An event loop, and the calls that are to be made in it."""

    def __init__(self) -> None:
        self._loop: Any = None
        self._call: Callable[[Callable[[], object]], object] = lambda fn: fn()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def move_in(self) -> bool:
        """Let the loop that runs here be the one; return whether it was another."""
        loop, call_soon = current_loop()
        if loop is self._loop:
            return False
        self._loop, self._call = loop, call_soon
        if self._calls:
            call_soon(self._make_calls)
        return True

    def call_soon_threadsafe(self, fn: Callable[..., object], *args: Any) -> None:
        """Call a function in the loop; now, where none runs any more."""
        self._calls.append((fn, args))
        try:
            self._call(self._make_calls)
        except RuntimeError:
            self._make_calls()

    def _make_calls(self) -> None:
        while self._calls:
            try:
                fn, args = self._calls.popleft()
            except IndexError:  # another thread has made it
                return
            fn(*args)
