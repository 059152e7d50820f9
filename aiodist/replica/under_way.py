"""Meetings that are on their way to other workers and back."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

from aiodist.collective.rendezvous import Rendezvous
from aiodist.replica.awaiting import LONGEST_TURN_SECONDS
from aiodist.workers.communicator import Request
from aiodist.workers.transfers import Steps

_AT_ONCE_SECONDS: Final = 20e-6


class UnderWay:
    """A meeting that is being carried over.

    Attributes:
        meeting: the meeting; None for the end of the run.
        steps: its way, which has begun.
        request: what is to be complete before it goes on.
        error: what came out of it before it could be waited for.
    """

    __slots__ = ("error", "meeting", "request", "steps")

    def __init__(self, meeting: Rendezvous | None, steps: Steps[int]) -> None:
        self.meeting = meeting
        self.steps = steps
        self.request: Request | None = None
        self.error: Exception | None = None

    def next(self) -> Request:
        """Return the request that it waits for, or comes to next; raise what ends it."""
        if self.error is not None:
            raise self.error
        if self.request is None:
            self.request = next(self.steps)
        return self.request

    def go(self, moving: Callable[[], bool]) -> bool:
        """Go on until it is over, which is returned, or would take long.

        Args:
            moving: says whether all workers have agreed, so that nobody need be waited for any more.
        """
        begun = perf_counter()
        try:
            while self._goes_on(self.next(), begun + (LONGEST_TURN_SECONDS if moving() else _AT_ONCE_SECONDS)):
                self.request = None
        except StopIteration:
            return True
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the driving task)
            self.error = error
        return False

    def _goes_on(self, request: Request, until: float) -> bool:
        """Ask a request until it is complete, or the time is over."""
        asked_once = hasattr(request, "add_done_callback") or hasattr(request, "by_itself")
        try:
            while not request.test():
                if asked_once or perf_counter() > until:
                    return False
        except Exception as error:  # noqa: BLE001  (of the engine, and told again to the one who waits)
            self.request = _Failed(error)
            return False
        return True


class _Failed:
    """A request of which it is known what went wrong."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def test(self) -> bool:
        """Raise that."""
        raise self._error
