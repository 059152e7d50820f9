"""The pulse of a worker's event loop, felt from another thread: for how long it has been silent, and where it hangs."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Final

PULSE_SECONDS: Final = 0.5
_MOST_FRAMES: Final = 6
_MACHINERY: Final = ("asyncio", "trio", "anyio", "uvloop", "aiodist")


class Pulse:
    """Asks an event loop now and then whether it still turns.

    Args:
        ask_loop: has the loop call a function; returns whether there is a loop.
    """

    def __init__(self, ask_loop: Callable[[Callable[[], object]], bool]) -> None:
        self._ask_loop = ask_loop
        self._asked = False
        self._heard = time.monotonic()
        self._thread = threading.main_thread().ident

    def beat(self, now: float) -> None:
        """Ask again, if the last question has been answered."""
        if not self._asked and now - self._heard >= PULSE_SECONDS:
            self._asked = True
            if not self._ask_loop(self._answer):
                self._asked, self._heard = False, now

    def _answer(self) -> None:
        self._heard = time.monotonic()
        self._asked = False
        self._thread = threading.get_ident()

    @property
    def silent_seconds(self) -> float:
        """For how long the loop has been asked, and has not answered."""
        return time.monotonic() - self._heard if self._asked else 0.0

    @property
    def is_silent(self) -> bool:
        """Whether the loop does not answer."""
        return self.silent_seconds > 2 * PULSE_SECONDS

    def silence(self) -> str:
        """Return what is to be told of a loop that does not answer: for how long, and what its thread is at."""
        text = f"its event loop has been silent for {self.silent_seconds:.1f} s: something blocks it."
        frames = self._frames()
        shown = [
            f"    {summary.filename}:{summary.lineno} in {summary.name}" + (f"    {summary.line}" * bool(summary.line))
            for summary in traceback.StackSummary.extract((f, f.f_lineno) for f in frames)
        ]
        return "\n".join([f"{text} Its thread is at" if shown else text, *shown])

    def place(self) -> tuple[str, int]:
        """Return the file and line that the loop's thread is at; an empty name where nothing is known."""
        return next(((frame.f_code.co_filename, frame.f_lineno) for frame in self._frames()), ("", 0))

    def _frames(self) -> list[FrameType]:
        """Return the innermost calls of the thread, without those of event loops and our own, innermost first."""
        frames: list[FrameType] = []
        here = sys._current_frames().get(self._thread or 0)  # noqa: SLF001  (CPython has no other way)
        while here is not None:
            if not frames or here.f_globals.get("__name__", "").partition(".")[0] not in _MACHINERY:
                frames.append(here)
            here = here.f_back
        return frames[:_MOST_FRAMES]
