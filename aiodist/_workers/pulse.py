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
    def is_silent(self) -> bool:
        """Whether the loop has been asked, and has not answered."""
        return self._asked and time.monotonic() - self._heard > 2 * PULSE_SECONDS

    def silence(self) -> str:
        """Return what is to be told of a loop that does not answer: for how long, and what its thread is at."""
        seconds = time.monotonic() - self._heard
        text = f"its event loop has been silent for {seconds:.1f} s: something blocks it."
        frame = sys._current_frames().get(self._thread or 0)  # noqa: SLF001  (CPython has no other way)
        return text if frame is None else f"{text} Its thread is at\n{_chain(frame)}"


def _chain(frame: FrameType) -> str:
    """Return the innermost calls of a thread, without those of event loops and of our own, innermost first."""
    frames: list[FrameType] = []
    here: FrameType | None = frame
    while here is not None:
        if not frames or here.f_globals.get("__name__", "").partition(".")[0] not in _MACHINERY:
            frames.append(here)
        here = here.f_back
    shown = [
        f"    {summary.filename}:{summary.lineno} in {summary.name}" + (f"    {summary.line}" if summary.line else "")
        for summary in traceback.StackSummary.extract((f, f.f_lineno) for f in frames[:_MOST_FRAMES])
    ]
    return "\n".join(shown)
