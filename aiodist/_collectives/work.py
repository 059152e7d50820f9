"""Work: a result that would hold up the event loop for too long."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

Call: TypeAlias = Callable[[], object]

MOST_WORKERS = 8  # a few cores saturate the memory, which limits reductions


class Work(NamedTuple):
    """Calls for worker threads that compute a result. It keeps all memory alive that they read and write."""

    phases: Sequence[Sequence[Call]]  # phases run one after the other, the calls of one in any order and any threads
    result: Callable[[], Any]  # returns the result afterwards; for the event loop's thread
    ready: Callable[[], bool] | None = None  # returns whether there is nothing left to wait for

    def then(self, make: Callable[[Any], Any]) -> Work:
        """Return this work followed by a function of its result, also called in a worker thread."""
        made: list[Any] = []
        return Work([*self.phases, [lambda: made.append(make(self.result()))]], made.pop)

    def carry_out(self) -> Any:
        """Make all calls in this thread, and return the result."""
        for calls in self.phases:
            for call in calls:
                call()
        return self.result()


@cache
def thread_count() -> int:
    """Return the number of threads to use: one per core that this process may use, up to a limit."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)
