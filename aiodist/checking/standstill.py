"""Standstill: what is raised, and where, when a run on a controlled loop cannot go on.

The error goes the way of every verdict: it is set in the sync group, raised at the await of each replica that waits in
a collective, the other replicas are cancelled, and it comes out of ``strategy.run``. With several runs at a time the
youngest goes first, for an older one may be waiting for it; what is freed by that may well let the others go on. Where
no run is left to end, the error comes out of the loop itself.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiodist._core.errors import CollectiveTimeoutError, DeadlockError
from aiodist.checking.deadlock import report_on
from aiodist.checking.tasks import run_of

if TYPE_CHECKING:
    from aiodist._runtime.scheduler import Run
    from aiodist.checking.loop import ControlledLoop

_UNWINDING_SECONDS = 5.0


class Standstill:
    """Ends runs that cannot go on.

    Args:
        seconds: for how long a run may take, in real time; what the error says of it.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._error: DeadlockError | CollectiveTimeoutError | None = None

    def __call__(self, loop: ControlledLoop, *, proved: bool) -> None:
        """End the youngest run; with none left, raise.

        Raises:
            CollectiveTimeoutError: the run took too long.
            DeadlockError: nothing can ever run again.
        """
        run = _youngest(loop)
        if run is None and self._error is not None:
            raise self._error  # tasks that the error does not reach, or that ignore it
        error = self._error_of(loop, run, proved=proved)
        self._error = self._error or error
        if not proved:
            loop.course.deadline = time.monotonic() + _UNWINDING_SECONDS
        if run is None:
            raise error
        run.fail(error)

    def _error_of(
        self, loop: ControlledLoop, run: Run | None, *, proved: bool
    ) -> DeadlockError | CollectiveTimeoutError:
        if proved:
            return DeadlockError(report_on(loop, run, None))
        return CollectiveTimeoutError(report_on(loop, run, self._seconds))


def _youngest(loop: ControlledLoop) -> Run | None:
    """Return the run, of those whose replicas run on a loop, that began last; None when there is none."""
    found: list[tuple[int, Run]] = []
    for task in asyncio.all_tasks(loop):
        run = run_of(task)
        if run is not None and not run.closed:
            found.append((loop.number_of(task), run))
    return max(found, key=lambda one: one[0])[1] if found else None
