"""Steps that wait for what devices do, without holding up the event loop."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Final

from aiodist._collectives.work import Work
from aiodist.workers.transfers import Hands, Steps, by_hand

_LOOKS_SECONDS: Final = 100e-6


class _Look:
    """A request that is complete when devices have done a work, or have been looked at long enough."""

    def __init__(self, work: Work) -> None:
        self._ready = work.ready
        self._until = perf_counter() + _LOOKS_SECONDS
        self.done = False

    def test(self) -> bool:
        """Return whether there is nothing more to look for."""
        self.done = self._ready is not None and self._ready()
        return self.done or perf_counter() > self._until


def made(work: Work, hands: Hands) -> Steps[Any]:
    """Return what devices make; if nobody waits for it any more, they are waited for all the same: they use memory."""
    if work.ready is not None:
        look = _Look(work)
        try:
            yield look
        except GeneratorExit:
            wait_for(work)
            raise
        if look.done:
            return work.result()
    yield from by_hand(hands, wait_for, work)
    return work.result()


def wait_for(work: Work) -> None:
    """Make all calls of a work, the last of which wait for the devices; for a worker thread."""
    for calls in work.phases:
        for call in calls:
            call()
