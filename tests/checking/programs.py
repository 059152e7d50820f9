"""What tests of checking share: a way to run a program once on a controlled loop, and a thread that is at work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from aiodist._checking.explore import Result, run
from aiodist._checking.schedule import Change, replayed

Main = Callable[[], Coroutine[Any, Any, Any]]


def result(main: Main, *changes: tuple[int, int], seconds: float | None = 20) -> Result:
    """Run a main coroutine function once, in the default order but for the changes."""
    order = replayed(Change(*change) for change in changes)
    return run(main, order, seed=0, seconds=seconds)


def value(main: Main, *changes: tuple[int, int]) -> Any:
    """Return what a main coroutine function returns."""
    found = result(main, *changes)
    if found.error is not None:
        raise found.error
    return found.value


def work_until_the_loop_waits() -> None:
    """Be at work, in another thread than the main one, until the loop in that waits for threads in real time."""
    main, limit = threading.main_thread().ident, time.monotonic() + 20
    while time.monotonic() < limit:
        frame = sys._current_frames().get(main or 0)
        while frame is not None:
            if frame.f_code.co_qualname == "ControlledLoop._wait_for_more":
                return
            frame = frame.f_back
