"""Inquiries: one that makes a further strategy asks the others, over an earlier one's control plane, where they are.

Who is asked answers from its event loop, which knows what its tasks wait for; or, where that does not answer in half a
second, from the thread of its control plane. Messages between two workers go by way of the first one.

Without being asked, an event loop that can only wait tells the first worker so (`stillness`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from aiodist.collective import wording
from aiodist.workers.ending import ENDED, GAVE_UP
from aiodist.workers.makings import Makings, Whereabouts
from aiodist.workers.peer import message
from aiodist.workers.pulse import Pulse
from aiodist.workers.tcp_requests import Requests

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiodist.workers.holdings import Holdings
    from aiodist.workers.stillness import Still

LOOK_SECONDS: Final = 0.5
STILL_SECONDS: Final = 1.0


class Looking(Protocol):
    """A strategy of a worker that can tell what it is at."""

    def whereabouts(self, tell: Callable[[str, Still | None], object]) -> None:
        """Call a function with that, in the event loop, as soon as it can be told."""

    def look(self, tell: Callable[[Still], object]) -> None:
        """Call a function, in the event loop, where the worker can only wait, and has done so since the last look."""


class Inquiries(Requests):
    """What a control plane does of them."""

    _rank: int
    _size: int
    _pulse: Pulse
    makings: Makings | None

    def __init__(self) -> None:
        super().__init__()
        self.holdings: Holdings | None = None
        self.ending: set[int] = set()
        self._gone: dict[int, str] = {}
        self._inquired: dict[int, int] = {}
        self._next_look = 0.0

    # In any thread.

    def inquire(self, question: int, number: int) -> None:
        """Ask all others where they are on their way to the strategy of that number."""
        self._request("inquire", question, number)

    @property
    def gone(self) -> dict[int, str]:
        """Who will never do anything again, and why: not those who have only closed their strategy, or given it up."""
        found = dict.fromkeys(self.ending, ENDED)
        for rank, why in list(self._gone.items()):
            if why != ENDED and (rank in self.ending or not why.startswith(GAVE_UP)):
                found[rank] = why
        return found

    # In the thread of the control plane.

    def _look_for_stillness(self, now: float) -> None:
        looking: Looking | None = getattr(self._listener, "standing", None)
        if looking is not None and now >= self._next_look:
            self._next_look = now + STILL_SECONDS
            looking.look(lambda still: self._request("still", still))

    def _on_still(self, still: Still) -> None:
        """Take what a worker tells that can only wait; the first worker does."""
        if self._rank > 0:
            self._send(0, "still", still)
        elif self.makings is not None:
            found = self.makings.hear_still(still)
            if found == self._size:
                self._on_end_waits()
            elif found:  # others may be about to tell the same
                self._later(STILL_SECONDS, "end_waits")

    def _on_end_waits(self) -> None:
        if self.makings is not None:
            self.makings.end_waits()

    def _on_inquire(self, question: int, number: int) -> None:
        self._send_to_all("inquired", self._rank, question, number)

    def _send_to_all(self, *what: Any) -> None:
        for rank in range(self._size):
            if rank != self._rank:
                self._send(rank, *what)

    def _send(self, to: int, *what: Any) -> None:
        """Send a message to a worker, by way of the first one."""
        if to in self._peers:
            self._put(self._peers[to], message(*what))
        elif 0 in self._peers:
            self._put(self._peers[0], message("relay", to, *what))

    def _on_relay(self, to: int, *what: Any) -> None:
        if to in self._peers:
            self._put(self._peers[to], message(*what))

    def _on_inquired(self, asker: int, question: int, number: int) -> None:
        looking: Looking | None = getattr(self._listener, "standing", None)
        if self.makings is None:
            return
        if self.makings.made >= number or self.makings.place is not None or looking is None:
            self._answer(asker, question, self._pulse.at())
        elif asker not in self._inquired:
            self._inquired[asker] = question
            self._later(LOOK_SECONDS, "unseen", asker, question)
            looking.whereabouts(lambda text, still: self._request("seen", asker, question, text, True, still))

    def _on_seen(self, asker: int, question: int, text: str, seen: bool, still: Still | None) -> None:
        if self._inquired.get(asker) == question:
            del self._inquired[asker]
            self._answer(asker, question, text, seen, still)

    def _on_unseen(self, asker: int, question: int) -> None:
        """Answer for an event loop that has not."""
        self._on_seen(asker, question, self._pulse.at(), False, None)

    def _answer(self, asker: int, question: int, text: str, seen: bool = False, still: Still | None = None) -> None:
        assert self.makings is not None
        makings = self.makings
        made, place = makings.made, makings.place
        if place is not None:
            made, text, seen, still = made + 1, f"it makes one at {wording.place(place)}", True, None
        self._send(asker, "answered", self._rank, question, Whereabouts(made, text, seen, still))

    def _on_answered(self, rank: int, question: int, whereabouts: Whereabouts) -> None:
        if self.makings is not None:
            self.makings.hear(rank, question, whereabouts)

    def _on_end(self) -> None:
        self._send_to_all("ending", self._rank)

    def _on_ending(self, rank: int) -> None:
        """Hear that a worker's process ends."""
        self.ending.add(rank)
