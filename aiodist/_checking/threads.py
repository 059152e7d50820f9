"""Threads: which of them could act, and which only wait for what another thread does.

One that waits without a limit for something that only another thread can do will not wake by itself. Four such waits
are recognised by the frame in which a thread stands:

- `threading.Condition.wait` without a timeout, which `Event.wait` and `queue.Queue.get` are made of. A thread that has
  been notified is no longer among the condition's waiters, so it differs from one that still waits;
- a thread of a `ThreadPoolExecutor` that waits for work, with none in its queue and none handed to it;
- `Thread.join` without a timeout, as long as the thread that it waits for is not about to end;
- a thread that aiodist keeps for its next job: ten seconds later it ends, and calls nobody.

Every other thread counts as one that can act: to take a busy thread for an idle one would be a false alarm, the other
way round costs time. Between the moment in which an executor's thread takes work from its queue and the moment in which
it has it, one instruction goes by; so threads are looked at twice, with time for the other threads in between. (What
asyncio gives to an executor, the loop itself keeps in mind until it has begun.)

From Python 3.13 on, work goes past the queue into the hands of a thread that waits, and may lie there for as long as
the system does not let that thread run. The executor knows: it counts its threads that wait for work, and takes one off
the count for each piece that it is given. The count is advice, and can stay too low when two threads come at the same
moment; so a thread is taken to have work that it lacks for a second, and no longer.

What is taken here that no documentation names is read by `getattr`: where a release lacks it, the thread is busy.
"""

from __future__ import annotations

import concurrent.futures.thread
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from weakref import WeakKeyDictionary, WeakSet

from aiodist._runtime.threads import Worker

_WORKER = getattr(getattr(concurrent.futures.thread, "_worker", None), "__code__", None)
_WAIT = threading.Condition.wait.__code__
_JOINS = {
    function.__code__
    for name in ("join", "_wait_for_tstate_lock")  # the second is innermost up to Python 3.12
    if (function := getattr(threading.Thread, name, None)) is not None
}
_BYSTANDERS = ("rich.live", "rich.progress", "tqdm._monitor")
"""Modules of threads that only watch: they never call into a loop, though they wake from time to time."""

_COUNT_SECONDS = 1.0
"""For how long an executor's count is believed that says that a thread has work."""
_FINISH_SECONDS = 0.25
_GLANCE = 0.0002


def busy_threads(*, pause: float) -> list[threading.Thread]:
    """Return the threads that could call into the event loop of this one: after two looks, with a pause in between."""
    others = _others()
    found = _busy(others)
    if others and pause and not found:
        time.sleep(pause)
        found = _busy(_others())
    return found


def _others() -> list[threading.Thread]:
    here = threading.get_ident()
    everyone = threading.enumerate()
    return [each for each in everyone if each.ident != here and type(each).__module__ not in _BYSTANDERS]


_slow: WeakSet[threading.Thread] = WeakSet()
"""Threads that were at work for longer than others wait for them."""


def let_threads_finish() -> None:
    """Wait until no thread is at work, but not long, and for the same one only once."""
    until = time.monotonic() + _FINISH_SECONDS
    while busy := [thread for thread in busy_threads(pause=_GLANCE) if thread not in _slow]:
        if time.monotonic() > until:
            _slow.update(busy)
            return
        time.sleep(_GLANCE)


def _busy(threads: list[threading.Thread]) -> list[threading.Thread]:
    frames = sys._current_frames()  # noqa: SLF001  (documented)
    busy, waiting = [], list[tuple[threading.Thread, ThreadPoolExecutor]]()
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        employer = _employer(frame)
        if employer is not None:
            waiting.append((thread, employer))
        elif thread.busy if isinstance(thread, Worker) else not _is_idle(frame):
            busy.append(thread)
    numbers = Counter(employer for _, employer in waiting)
    handing_out = {employer for employer, number in numbers.items() if _has_handed_out(employer, number)}
    return busy + [thread for thread, employer in waiting if employer in handing_out]


def _is_idle(frame: FrameType | None) -> bool:
    """Whether a thread waits, without a limit, for what only another thread can do."""
    if frame is None:  # it has not begun, or is about to end
        return False
    code, variables = frame.f_code, frame.f_locals
    if code is _WAIT:
        waiter = variables.get("waiter")
        waiters = getattr(variables["self"], "_waiters", ())
        return variables.get("timeout") is None and waiter is not None and waiter in waiters
    return code in _JOINS and variables.get("timeout", -1) in (None, -1) and variables["self"] in threading.enumerate()


def _employer(frame: FrameType | None) -> ThreadPoolExecutor | None:
    """Return the executor for which a thread waits that has no work; None where it has, or is about to end."""
    if frame is None or frame.f_code is not _WORKER:
        return None
    variables = frame.f_locals
    if "work_item" in variables or not variables["work_queue"].empty():
        return None
    executor: ThreadPoolExecutor | None = variables["executor_reference"]()
    return None if executor is None or getattr(executor, "_shutdown", True) else executor


_since: WeakKeyDictionary[ThreadPoolExecutor, float] = WeakKeyDictionary()
"""Executors that have counted fewer waiting threads than there seem to be since then."""


def _has_handed_out(executor: ThreadPoolExecutor, waiting: int) -> bool:
    """Whether a thread that seems to wait has been handed work, as far as its executor's count tells."""
    if getattr(getattr(executor, "_idle_semaphore", None), "_value", waiting) >= waiting:
        _since.pop(executor, None)
        return False
    now = time.monotonic()
    return now - _since.setdefault(executor, now) < _COUNT_SECONDS
