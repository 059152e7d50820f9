"""Threads: which of them could act, and which only wait for another thread.

A thread that waits without a limit for something that only another thread can do will not wake by itself. Four such
waits are recognised by the frame in which a thread is:

- `threading.Condition.wait` without a timeout, which `Event.wait` and `queue.Queue.get` are made of. A thread that has
  been notified is no longer among the condition's waiters, so it differs from one that still waits;
- a thread of a `ThreadPoolExecutor` that waits for work;
- `Thread.join` without a timeout, as long as the thread that it waits for is not about to end;
- a thread that aiodist keeps for its next job: ten seconds later it ends, and calls nobody.

Every other thread counts as one that can act: to take a busy thread for an idle one would be a false alarm, the reverse
only costs time. Work submitted to an executor counts as being at work, too, until a thread has begun it, unless all
threads that the executor may have wait in their work, so that none can begin it.

Undocumented names are read by `getattr`: if a release lacks one, the thread counts as busy.
"""

from __future__ import annotations

import concurrent.futures.thread
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakSet

from aiodist._runtime.threads import Worker

AtWork: TypeAlias = threading.Thread | Future[Any]
"""A thread, or work that has been submitted to an executor and not begun."""

_WORKER = getattr(getattr(concurrent.futures.thread, "_worker", None), "__code__", None)
_WAIT = threading.Condition.wait.__code__
_JOINS = {
    function.__code__
    for name in ("join", "_wait_for_tstate_lock")  # the second is innermost up to Python 3.12
    if (function := getattr(threading.Thread, name, None)) is not None
}
_WAITS = {_WAIT, _WORKER, *_JOINS}
_BYSTANDERS = ("rich.live", "rich.progress", "tqdm._monitor")
"""Modules of threads that only watch: they wake from time to time, but never call into a loop."""
_FINISH_SECONDS = 0.25
_PAUSE_SECONDS = 0.0002

_submitted: dict[Future[Any], ThreadPoolExecutor] = {}
"""Work that has been submitted to executors and not done."""
_slow: WeakSet[AtWork] = WeakSet()
"""Threads and work that were waited for in vain."""


@contextmanager
def executors_watched() -> Iterator[None]:
    """Note the work that is submitted to executors."""
    submit = ThreadPoolExecutor.submit

    def noting(executor: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Future[Any]:
        work = submit(executor, *args, **kwargs)
        _submitted[work] = executor
        work.add_done_callback(lambda done: _submitted.pop(done, None))
        return work

    ThreadPoolExecutor.submit = noting  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        _submitted.clear()


def at_work(*, pause: float) -> list[AtWork]:
    """Return what could call into the event loop of this thread.

    It looks twice, with a pause in between, because a thread may pass work to another during the first look.
    """
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


def let_threads_finish() -> None:
    """Wait until no thread is at work, but not long, and for each of them only once."""
    until = time.monotonic() + _FINISH_SECONDS
    while busy := [each for each in at_work(pause=_PAUSE_SECONDS) if each not in _slow]:
        if time.monotonic() > until:
            _slow.update(busy)
            return
        time.sleep(_PAUSE_SECONDS)


def _busy(threads: list[threading.Thread]) -> list[AtWork]:
    # Before the frames, because a thread may begin the work meanwhile
    waiting = [each for each in _submitted.copy().items() if not each[0].running()]
    frames = sys._current_frames()  # noqa: SLF001  (documented)
    begins = [work for work, executor in waiting if not _all_wait(executor, frames)]
    return begins + [
        each
        for each in threads
        if (each.busy if isinstance(each, Worker) else not _is_idle(frames.get(each.ident or 0)))
    ]


def _all_wait(executor: ThreadPoolExecutor, frames: dict[int, FrameType]) -> bool:
    """Return whether an executor has all its threads, and each waits in the middle of its work."""
    threads = tuple(getattr(executor, "_threads", ()))
    found = [frames.get(thread.ident or 0) for thread in threads]
    is_full = 0 < getattr(executor, "_max_workers", 0) <= len(threads)
    return is_full and all(frame is not None and frame.f_code is not _WORKER and _is_idle(frame) for frame in found)


def _is_idle(frame: FrameType | None) -> bool:
    """Return whether a thread waits, without a limit, for what only another thread can do."""
    if frame is None or frame.f_code not in _WAITS:  # it has not begun, or is about to end
        return False
    code, variables = frame.f_code, frame.f_locals  # not read from a running frame
    if code is _WAIT:
        waiter = variables.get("waiter")
        waiters = getattr(variables["self"], "_waiters", ())
        return variables.get("timeout") is None and waiter is not None and waiter in waiters
    if code is _WORKER:
        executor = variables["executor_reference"]()
        ends = getattr(executor, "_shutdown", True)
        return "work_item" not in variables and not ends
    return variables.get("timeout", -1) in (None, -1) and variables["self"] in threading.enumerate()
