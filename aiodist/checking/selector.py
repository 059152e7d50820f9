"""The selector of a controlled loop: where the loop goes when nothing is ready to run.

asyncio asks its selector ``select(timeout)``: 0 when callbacks are ready, the time to the next timer when there is one,
None when there is nothing at all. That is the whole of what a virtual clock and a proof of deadlock need, and it is a
documented interface: `asyncio.SelectorEventLoop` takes any selector.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Collection
from typing import Any, Protocol

from aiodist.checking.outside import alarm_handler, alarm_is_set
from aiodist.checking.threads import busy_threads

Events = list[tuple[selectors.SelectorKey, int]]

_POLL_SECONDS = 0.05
_BEFORE_A_JUMP = 0.0002
_BEFORE_A_PROOF = 0.005


class Idle(Protocol):
    """What a selector needs of its loop."""

    def pass_time(self, seconds: float) -> None:
        """Put the loop's clock forward."""

    def open_inbox(self) -> bool:
        """Take in what other threads have sent; return whether there was anything."""
        ...

    def listens_to_signals(self) -> bool:
        """Return whether the program has set handlers of signals."""
        ...

    def check_limit(self) -> None:
        """End the run when it has taken too long, in real time."""

    def stand_still(self) -> None:
        """End the run: nothing can ever run again."""


class ControlledSelector(selectors.DefaultSelector):
    """A selector that jumps over time in which nothing happens, and knows when nothing can happen any more."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: Idle | None = None
        self._own: Collection[Any] = ()
        self._alarm_handler: Any = None

    def begin(self, loop: Idle) -> None:
        """Serve a loop; what it has registered up to now, its wake-up pipe, is its own."""
        self.loop = loop
        self._own = tuple(self.get_map())
        self._alarm_handler = alarm_handler()

    def watches(self) -> bool:
        """Return whether file descriptors of the program's are watched."""
        return len(self.get_map()) > len(self._own)

    def select(self, timeout: float | None = None) -> Events:
        """Return what is ready; with nothing ready, wait, or let the clock jump, or prove that nothing can be."""
        assert self.loop is not None
        self.loop.check_limit()
        if timeout is not None and timeout <= 0:
            return self._poll() if self.watches() else []
        ready = self._poll()
        if ready or self.loop.open_inbox():
            return ready
        if self._outside_may_act(_BEFORE_A_JUMP):
            return self._wait(timeout)
        ready = self._poll()
        if ready or self.loop.open_inbox():  # of a thread that has sent something and gone since the first look
            return ready
        if timeout is not None:
            self.loop.pass_time(timeout)
            return []
        return self._stand_still(self.loop)

    def _poll(self) -> Events:
        return super().select(0)

    def _outside_may_act(self, pause: float) -> bool:
        assert self.loop is not None
        if self.watches() or self.loop.listens_to_signals():
            return True
        if alarm_is_set() and alarm_handler() is not self._alarm_handler:  # an older one is of whoever runs the check
            return True
        return bool(busy_threads(pause=pause))

    def _wait(self, timeout: float | None) -> Events:
        """Wait in real time, which the loop's clock follows; not for long, for a thread may end without a word."""
        assert self.loop is not None
        began = time.monotonic()
        ready = super().select(_POLL_SECONDS if timeout is None else min(timeout, _POLL_SECONDS))
        self.loop.pass_time(time.monotonic() - began)
        return ready

    def _stand_still(self, loop: Idle) -> Events:
        if self._outside_may_act(_BEFORE_A_PROOF):
            return []
        ready = self._poll()  # who called in before it went idle has written to the pipe
        if not ready and not loop.open_inbox():
            loop.stand_still()
        return ready
