"""Meetings that are on their way to other workers and back."""

from __future__ import annotations

from time import perf_counter

from aiodist.collective.rendezvous import Rendezvous
from aiodist.workers.communicator import Request
from aiodist.workers.transfers import Steps


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

    def go(self, until: float) -> bool:
        """Go on until it is over, which is returned, or would have to be waited for beyond a time."""
        try:
            request = next(self.steps)
            while True:
                if request.test():
                    request = next(self.steps)
                elif perf_counter() > until:
                    self.request = request
                    return False
        except StopIteration:
            return True
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the driving task)
            self.error = error
            return False
