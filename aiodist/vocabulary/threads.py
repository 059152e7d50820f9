"""Threads: which of them could act, and which only wait for what another thread does.

One that waits without a limit for something that only another thread can do will not wake by
itself. Three such waits are recognised by the frame in which a thread stands:

- `threading.Condition.wait` without a timeout, under which lie `Event.wait` and `queue.Queue.get`. A thread that has
  been notified holds its waiter's lock no longer, so it is told apart from one that still waits;
- a thread of a `ThreadPoolExecutor` that waits for work, with none in its queue;
- `Thread.join` without a timeout, as long as the thread that it waits for is not about to end.

Every other thread counts as one that can act: to take a busy thread for an idle one would be a false alarm, the other
way round costs time. Between the moment in which an executor's thread takes work from its queue and the moment in which
it has it, one instruction goes by; so threads are looked at twice, with time for the other threads in between.
"""

from __future__ import annotations

import concurrent.futures.thread
import sys
import threading
import time
from types import FrameType

_WORKER = concurrent.futures.thread._worker.__code__  # pyright: ignore[reportAttributeAccessIssue]
_WAIT = threading.Condition.wait.__code__
_JOINS = {
    function.__code__
    for name in ("join", "_wait_for_tstate_lock")  # the second stands innermost up to Python 3.12
    if (function := getattr(threading.Thread, name, None)) is not None
}
_BYSTANDERS = ("rich.live", "rich.progress", "tqdm._monitor")
"""Modules of threads that only watch: they never call into a loop, though they wake from time to time."""


def busy_threads(*, pause: float) -> list[threading.Thread]:
    """Return the threads that could call into the loop of this one.

    Args:
        pause: how long the other threads get between two looks, in seconds.
    """
    if threading.active_count() == 1:
        return []
    found = _busy()
    if not found:
        time.sleep(pause)
        found = _busy()
    return found


def _busy() -> list[threading.Thread]:
    frames = sys._current_frames()
    here = threading.get_ident()
    return [
        thread
        for thread in threading.enumerate()
        if thread.ident != here
        and type(thread).__module__ not in _BYSTANDERS
        and not _is_idle(frames.get(thread.ident or 0))
    ]


def _is_idle(frame: FrameType | None) -> bool:
    """Whether a thread waits, without a limit, for what only another thread can do."""
    if frame is None:  # it has not begun, or is about to end
        return False
    code, variables = frame.f_code, frame.f_locals
    if code is _WAIT:
        waiter = variables.get("waiter")
        return variables.get("timeout") is None and waiter is not None and waiter.locked()
    if code is _WORKER:
        return "work_item" not in variables and variables["work_queue"].empty()
    if code in _JOINS:
        return variables.get("timeout", -1) in (None, -1) and variables["self"] in threading.enumerate()
    return False
