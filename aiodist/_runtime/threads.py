"""Threads: the process-wide cache of idle ones.

Starting a thread costs some 50 microseconds of the event loop's time, and joining it as much again, which a run of one
training step would pay for every replica. So runs take threads from a cache and release them. An idle thread ends after
ten seconds, as trio's do. All are daemons, so they never keep the interpreter alive.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

Job: TypeAlias = Callable[[], object]

_IDLE_SECONDS = 10.0
_IDLE_NAME = "aiodist idle"


class Worker(threading.Thread):
    """A thread that does the jobs of its current owner, one after the other."""

    def __init__(self) -> None:
        super().__init__(name=_IDLE_NAME, daemon=True)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._unfinished: deque[None] = deque()

    @property
    def busy(self) -> bool:
        """Whether it has a job that it has not finished."""
        return bool(self._unfinished)

    def submit(self, job: Job) -> None:
        """Do a job, which must not raise, after those submitted before."""
        self._unfinished.append(None)
        self._jobs.put(job)

    def release(self) -> None:
        """Return the thread to the cache once its jobs are done."""
        self._jobs.put(None)

    def run(self) -> None:
        """Do jobs until the thread has been idle for a while."""
        taken = True
        while True:
            try:
                job = self._jobs.get(timeout=None if taken else _IDLE_SECONDS)
            except Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                taken = True  # just now
                continue
            taken = job is not None
            if job is None:
                with _lock:
                    self.name = _IDLE_NAME
                    _idle.append(self)
                continue
            try:
                job()
            finally:
                del job  # an idle thread must keep no memory alive
                self._unfinished.pop()


def take(name: str) -> Worker:
    """Return a thread with that name, which the caller owns until it releases it."""
    with _lock:
        worker = _idle.pop() if _idle else None
    if worker is None:
        worker = Worker()
        contextvars.Context().run(worker.start)  # on a free-threaded Python, threads inherit context variables
    worker.name = name
    return worker


def lock_for(threads: list[Any] | dict[Any, Any]) -> threading.Lock:
    """Return a lock for a collection about threads; a forked child process, which has none of them, finds it empty."""
    lock = threading.Lock()

    def begin_anew() -> None:
        threads.clear()
        lock.release()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=begin_anew)
    return lock


_idle: list[Worker] = []
_lock = lock_for(_idle)
