"""The process-wide cache of idle threads.

Starting a thread costs some 50 microseconds of the event loop's time and joining it as much again, which a run of one
training step would pay for every replica. So runs take threads from here and give them back. An idle thread waits for
the next run for ten seconds and then ends by itself, as trio's do. As a daemon it never keeps the interpreter alive.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

Job: TypeAlias = Callable[[], object]

_IDLE_SECONDS = 10.0
_IDLE_NAME = "aiodist idle"


class Worker(threading.Thread):
    """A thread that does one job after the other for whoever has taken it."""

    def __init__(self) -> None:
        super().__init__(name=_IDLE_NAME, daemon=True)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._unfinished: deque[None] = deque()

    @property
    def busy(self) -> bool:
        """Whether it has a job that it has not finished."""
        return bool(self._unfinished)

    def submit(self, job: Job) -> None:
        """Do a job, which must not raise, after the ones before it."""
        self._unfinished.append(None)
        self._jobs.put(job)

    def release(self) -> None:
        """Give the thread back; the next run may take it once its jobs are done."""
        self._jobs.put(None)

    def run(self) -> None:
        """Do jobs until nobody has taken the thread for a while."""
        taken = True
        while True:
            try:
                job = self._jobs.get(timeout=None if taken else _IDLE_SECONDS)
            except Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                taken = True  # in this very moment
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
                del job  # an idle thread keeps nobody's memory
                self._unfinished.pop()


def take(name: str) -> Worker:
    """Return a thread of that name, its caller's own until it is released."""
    with _lock:
        worker = _idle.pop() if _idle else None
    if worker is None:
        worker = Worker()
        worker.start()
    worker.name = name
    return worker


_lock = threading.Lock()
_idle: list[Worker] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child process has its parent's list, and none of the threads
