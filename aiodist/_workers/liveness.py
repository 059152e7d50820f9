"""Liveness: whether a silent worker's process is stopped, and for how long its event loop has not turned.

A worker may be at a long call that holds the interpreter lock, which is no fault. On this machine the system knows.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from aiodist._workers.layout import Hello, this_machine

SUSPICIOUS_SECONDS: Final = 1.0
SILENT_SECONDS: Final = 60.0
PULSE_SECONDS: Final = 0.5
_MOST_FRAMES: Final = 6
_MACHINERY: Final = ("asyncio", "trio", "anyio", "uvloop", "aiodist")


def trouble(hello: Hello, silent: float, allowed: float) -> str | None:
    """Return why a worker counts as stopped that has been silent for so many seconds; None if it does not.

    ``allowed``: how long it may be, by the user, if that is longer than usual.
    """
    if silent < max(SUSPICIOUS_SECONDS, allowed):
        return None
    if hello.machine == this_machine():
        return "is stopped: the system has halted its process" if _is_stopped(hello.pid) else None
    if silent > max(SILENT_SECONDS, allowed):
        return f"has been silent for {silent:.0f} s, though its system answers: it is stopped"
    return None


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, as by SIGSTOP or a debugger."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in {"T", "t"}


class Pulse:
    """Asks this worker's event loop now and then whether it still turns, from another thread.

    ``ask_loop`` has the loop call a function, and returns whether there is a loop.
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

    def silence(self) -> tuple[str, str, int]:
        """Return what to report of a loop that does not answer: a text, and the file and line that its thread is at.

        The file is empty where nothing is known of the thread.
        """
        text = f"its event loop has been silent for {self.silent_seconds:.1f} s: something blocks it."
        frames = self._frames()
        if not frames:
            return text, "", 0
        shown = [
            f"    {summary.filename}:{summary.lineno} in {summary.name}" + (f"    {summary.line}" * bool(summary.line))
            for summary in traceback.StackSummary.extract((f, f.f_lineno) for f in frames)
        ]
        return "\n".join([f"{text} Its thread is at", *shown]), frames[0].f_code.co_filename, frames[0].f_lineno

    def _frames(self) -> list[FrameType]:
        """Return the innermost calls of the thread, without those of event loops and our own, innermost first."""
        frames: list[FrameType] = []
        here = sys._current_frames().get(self._thread or 0)  # noqa: SLF001  (CPython has no other way)
        while here is not None:
            if not frames or here.f_globals.get("__name__", "").partition(".")[0] not in _MACHINERY:
                frames.append(here)
            here = here.f_back
        return frames[:_MOST_FRAMES]
