"""Meetings that are on their way to other workers and back."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final, Protocol

from aiodist.collective.rendezvous import Rendezvous
from aiodist.replica.awaiting import LONGEST_TURN_SECONDS, asked_until
from aiodist.workers.communicator import Request
from aiodist.workers.transfers import Steps

_AT_ONCE_SECONDS: Final = 50e-6
"""For how long to ask at once whether all workers have agreed."""


class UnderWay:
    """A meeting that is being carried over.

    Attributes:
        meeting: the meeting; None for the end of the run.
        steps: its way, which has begun.
        request: what is to be complete before it goes on.
        come_to: how many such requests it has come to.
        error: what has gone wrong with it, and is still to be raised, or to be told to its steps.
    """

    __slots__ = ("come_to", "error", "meeting", "request", "steps")

    def __init__(self, meeting: Rendezvous | None, steps: Steps[int]) -> None:
        self.meeting = meeting
        self.steps = steps
        self.request: Request | None = None
        self.come_to = 0
        self.error: Exception | None = None

    def next(self) -> Request:
        """Return the request that it waits for, or comes to next; raise what ends it."""
        if self.error is not None:
            error, self.error = self.error, None
            self.request = self.steps.throw(error)
        if self.request is None:
            self.request = next(self.steps)
            self.come_to += 1
        return self.request

    def fail(self, error: Exception) -> None:
        """Let its steps hear what has gone wrong with a request, when they go on: they may have something to undo."""
        self.request, self.error = None, error

    def go(self, carrier: Moving) -> bool:
        """Go on until it is over, which is returned, or would take long.

        Args:
            carrier: knows whether all workers have agreed.
        """
        begun = perf_counter()
        try:
            while True:
                request = self.request = next(self.steps)
                try:
                    if not request.test() and not _comes_soon(request, carrier, begun):
                        return False
                except Exception as error:  # noqa: BLE001  (of the engine, and told again to the one who waits)
                    self.request = _Failed(error)
                    return False
                self.request = None
                if perf_counter() - begun > LONGEST_TURN_SECONDS:
                    return False
        except StopIteration:
            return True
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the driving task)
            self.error = error
        return False


class Moving(Protocol):
    """Knows how a step stands.

    Attributes:
        moving: all workers have agreed, and bring values, so that nobody need be waited for any more.
    """

    moving: bool


def _comes_soon(request: Request, carrier: Moving, begun: float) -> bool:
    """Ask a request until it is complete, or the time is over."""
    if hasattr(request, "add_done_callback") or hasattr(request, "by_itself"):
        return False
    until = begun + LONGEST_TURN_SECONDS if carrier.moving else perf_counter() + _AT_ONCE_SECONDS
    return asked_until(request, until)


class _Failed:
    """A request of which it is known what went wrong."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def test(self) -> bool:
        """Raise that."""
        raise self._error


class When:
    """A request that is complete when something is so; whoever makes it so rings the bell.

    Args:
        condition: returns whether it is.
    """

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.test = condition

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Do nothing: the bell is rung."""
