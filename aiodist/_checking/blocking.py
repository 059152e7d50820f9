"""Replicas that hold up the event loop: a thread looks now and then at what the loop's thread is doing.

While a replica computes, or calls something that blocks, no other replica goes on. The thread costs the loop nothing:
it reads the frames of a running turn, and tells by the step in them whether that has changed since the last look.
"""

from __future__ import annotations

import sys
import threading
import time
from traceback import walk_stack
from types import TracebackType
from typing import NamedTuple, Self

from aiodist._checking.explore import who
from aiodist._checking.loop import Step, step_of
from aiodist._core.report import Location
from aiodist._runtime.stacks import is_plumbing, place_of

_PAUSE = 0.1
_LONG = 1.0


class HeldUp(NamedTuple):
    """A step of a task that held up the event loop for more than a second: about how long, who, and at what line."""

    seconds: float
    who: str
    location: Location


class BlockingWatch(threading.Thread):
    """Watches the thread that makes it, while it is entered; keeps the longest step of each task and line."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.found: dict[tuple[str, Location], HeldUp] = {}
        self._watched = threading.get_ident()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Look until the watch is left."""
        step: Step | None = None
        since = time.monotonic()
        place: Location | None = None
        while not self._over.wait(_PAUSE):
            innermost = sys._current_frames().get(self._watched)  # noqa: SLF001  (documented)
            frames = [frame for frame, _ in walk_stack(innermost)] if innermost is not None else []
            now = next((found for found in map(step_of, frames) if found is not None), None)
            if now is not step:
                step, since, place = now, time.monotonic(), None
            seconds = time.monotonic() - since
            if step is not None and seconds >= _LONG:
                own = next((frame for frame in frames if not is_plumbing(frame)), None)
                place = place or (None if own is None else place_of(own))
                self._note(seconds, step, place)

    def _note(self, seconds: float, step: Step, place: Location | None) -> None:
        if place is not None:
            key = who(step), place
            if key not in self.found or self.found[key].seconds < seconds:
                self.found[key] = HeldUp(seconds, *key)
