"""Work: a result that would hold up the event loop for too long."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

Call: TypeAlias = Callable[[], object]

MOST_WORKERS = 8
"""Reductions are bound by memory, which a few cores keep busy."""


class Work(NamedTuple):
    """Calls for worker threads that compute a result. It keeps alive all memory that they read and write."""

    phases: Sequence[Sequence[Call]]  # calls to make in any order, in any threads, phase by phase
    result: Callable[[], Any]  # returns the result, when all have returned; for the event loop's thread
    ready: Callable[[], bool] | None = None  # returns whether the calls would only find everything done

    def then(self, make: Callable[[Any], Any]) -> Work:
        """Return this work followed by a function of its result, which a worker thread calls, too."""
        made: list[Any] = []
        return Work([*self.phases, [lambda: made.append(make(self.result()))]], made.pop)

    def carry_out(self) -> Any:
        """Make the result in this thread, and return it."""
        for calls in self.phases:
            for call in calls:
                call()
        return self.result()


@cache
def thread_count() -> int:
    """Return how many threads may work at a time: one for each core that this process may use, up to a limit."""
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)
