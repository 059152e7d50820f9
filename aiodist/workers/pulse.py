"""The pulse of a worker's event loop, felt from another thread: for how long it has been silent, and where it hangs."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType
from typing import Final

from aiodist.workers.tribunal import Listener

PULSE_SECONDS: Final = 1.0
_MOST_FRAMES: Final = 6
_MACHINERY: Final = ("asyncio", "trio", "anyio", "uvloop", "aiodist")


class Pulse:
    """Asks an event loop every second whether it still turns."""

    def __init__(self) -> None:
        self._asked = False
        self._heard = time.monotonic()
        self._loop_thread = threading.main_thread().ident

    def beat(self, listener: Listener | None, now: float) -> None:
        """Ask again, if the last question has been answered."""
        if listener is not None and not self._asked and now - self._heard >= PULSE_SECONDS:
            self._asked = True
            listener.call_soon_threadsafe(self._answer, threading.get_ident(), listener)

    def _answer(self, asker: int, listener: Listener) -> None:
        self._heard = time.monotonic()
        self._asked = False
        thread = threading.get_ident()
        if thread != asker:  # else no event loop runs, and the question came straight back
            self._loop_thread = thread
            listener.warn_in_time()

    def silence(self) -> str:
        """Return what is to be told of a loop that does not answer: for how long, and what its thread is at."""
        seconds = time.monotonic() - self._heard
        text = f"its event loop has been silent for {seconds:.1f} s: something blocks it."
        frame = sys._current_frames().get(self._loop_thread or 0)
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
