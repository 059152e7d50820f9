"""Making a further strategy: what the workers tell each other of it over the control planes of those they have made.

The k-th strategy of a worker meets the k-th of every other one, and its constructor blocks until they have come. One
that waits for more than a second asks the others what they do; each tells whether it has come, and where it is. So a
worker that never makes that strategy is named soon, where it can be known that it never will:

- its process ends, has died, is stopped or cut off: the control plane of an earlier strategy knows;
- nothing can run there any more but what goes on with a step for which this worker has not brought its record, and it
  will not, for its event loop stands still in the constructor.

Everything else may be a worker that takes its time, to load what it needs, say: it is waited for, and a warning tells
once what the others are at. What was rejected: to take a worker that has closed an earlier strategy, or that computes,
for one that will not come; to compare the lines at which workers make a strategy, which may well be those of branches.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from aiodist.collective import wording
from aiodist.collective.callsite import location
from aiodist.vocabulary import environment
from aiodist.vocabulary.errors import CollectiveError, StallWarning
from aiodist.vocabulary.reports import Location
from aiodist.vocabulary.threads import busy_threads

if TYPE_CHECKING:
    from aiodist.workers.communicator import Request

FIRST_MEETING_SECONDS: Final = 300.0
ASK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.0005
_GLANCE: Final = 0.0002
_OURS_BY_NAME: Final = "aiodist "
_OURS: Final = ("aiodist.workers", "aiodist.strategy")


class InFlight(NamedTuple):
    """A step that a worker waits for: of which strategy, in which lane, and how many records it has brought there."""

    strategy: int
    lane: int
    posted: int


class Whereabouts(NamedTuple):
    """What a worker tells who waits for it.

    Attributes:
        number: how many strategies it has made, with the one that it is making.
        text: what it is at.
        waits: where nothing of it can run but what goes on with steps, those; else None.
    """

    number: int
    text: str
    waits: tuple[InFlight, ...] | None = None


class Elder(Protocol):
    """An earlier strategy of this worker, while it lives."""

    @property
    def thread(self) -> int:
        """The thread of the event loop that it was used in last; 0 where it has not been used."""
        ...

    @property
    def gone(self) -> Mapping[int, str]:
        """The workers that will never make anything again, and why."""
        ...

    def posted(self, lane: int) -> int:
        """Return how many records this worker has brought to a lane."""
        ...

    def inquire(self, question: int, number: int) -> None:
        """Ask all others where they are on their way to the strategy of that number."""

    def lost_worker(self, rank: int, why: str) -> CollectiveError:
        """Return the error for a worker that is gone."""
        ...

    def standstill(self, rank: int, text: str) -> CollectiveError:
        """Return the error for a worker that can never come."""
        ...


class Makings:
    """The strategies that a worker makes with the job's others.

    Attributes:
        made: for how many of them all have come.
        place: where it waits for the others to come to the next one, if it does.
    """

    def __init__(self) -> None:
        self.made = 0
        self.place: Location | None = None
        self._elders: dict[int, Callable[[], Elder | None]] = {}
        self._question = 0
        self._heard: dict[int, Whereabouts] = {}

    def add(self, elder: Callable[[], Elder | None]) -> None:
        """Take the strategy that has been made last, by a reference that does not keep it."""
        self._elders[self.made] = elder

    @property
    def elders(self) -> dict[int, Elder]:
        """The earlier strategies that live, by their numbers."""
        return {number: elder for number, ref in self._elders.items() if (elder := ref()) is not None}

    def number_of(self, elder: Elder) -> int:
        """Return the number of a strategy that lives; 0 for one that is not known yet."""
        return next((number for number, known in self.elders.items() if known is elder), 0)

    def hear(self, rank: int, question: int, whereabouts: Whereabouts) -> None:
        """Take what another worker tells, in any thread."""
        if question == self._question:
            self._heard = {**self._heard, rank: whereabouts}

    def wait(self, request: Request, rank: int, size: int) -> None:
        """Block until the next strategy's first request, for which all workers must come, is complete.

        Raises:
            CollectiveError: a worker will never make it.
            TimeoutError: another worker has not begun it for five minutes.
        """
        begun = time.monotonic()
        self._question, self._heard = self._question + 1, {}
        self.place = _place_of_constructor()
        try:
            self._wait(request, begun, rank, size)
            self.made += 1
        finally:
            self.place = None

    def _wait(self, request: Request, begun: float, rank: int, size: int) -> None:
        ask_at, tell_at = begun + ASK_SECONDS, begun + (environment.stall_seconds() or FIRST_MEETING_SECONDS)
        while not request.test():
            now = time.monotonic()
            if now > begun + FIRST_MEETING_SECONDS:
                raise TimeoutError(
                    f"worker {rank} of {size} has waited {FIRST_MEETING_SECONDS:.0f} s for the others to make their "
                    f"MultiWorkerMirroredStrategy{self._at()}; every worker must run the same program{self._others()}"
                )
            if now >= ask_at:
                ask_at = now + ASK_SECONDS
                self._look(rank)
            if now >= tell_at:
                tell_at = begun + 2 * FIRST_MEETING_SECONDS
                self._tell(rank, size, now - begun)
            time.sleep(_POLL_SECONDS)

    def _at(self) -> str:
        return "" if self.place is None else f" at {wording.place(self.place)}"

    def _others(self) -> str:
        missing = {rank: told for rank, told in sorted(self._heard.items()) if told.number <= self.made}
        return "".join(f"\n  worker {rank}: {told.text}" for rank, told in missing.items())

    def _tell(self, rank: int, size: int, seconds: float) -> None:
        text = (
            f"worker {rank} of {size} has waited {seconds:.3g} s to make its strategy number {self.made + 1}, which "
            f"every worker is to make (AIODIST_STALL_SECONDS sets the time, 0 turns this off){self._others()}"
        )
        if self.place is not None:
            _warn(text, self.place)

    # What can be known.

    def _look(self, rank: int) -> None:
        """Look whether a worker will never come, and ask all of them anew.

        Raises:
            CollectiveError: one will not.
        """
        elders = self.elders
        for elder in elders.values():
            for lost, why in sorted(elder.gone.items()):
                raise elder.lost_worker(lost, f"{why}, and worker {rank} waits for it to make a strategy{self._at()}")
        if not elders:
            return
        for other, told in sorted(self._heard.items()):
            if told.number <= self.made and told.waits is not None and self._are_in_vain(told.waits, elders):
                raise elders[max(elders)].standstill(
                    other,
                    f"worker {rank} makes a strategy{self._at()}, and worker {other} never comes to that, for it waits "
                    f"for worker {rank}: {told.text}\nEvery worker must make the same strategies in the same order.",
                )
        for elder in elders.values():
            elder.inquire(self._question, self.made + 1)

    def _are_in_vain(self, waits: Sequence[InFlight], elders: Mapping[int, Elder]) -> bool:
        """Whether none of these steps can go on before this thread does, which waits for who waits for them."""
        return all(
            step.strategy in elders
            and _no_other_thread_uses(elders[step.strategy])
            and elders[step.strategy].posted(step.lane) < step.posted
            for step in waits
        )


_log = logging.getLogger("aiodist")
makings: Final = Makings()
"""Those of this process."""


def _warn(text: str, place: Location) -> None:
    try:
        warnings.warn_explicit(text, StallWarning, place.file, place.line)
    except StallWarning:  # a filter makes errors of warnings; who waits is not to be ended by that
        _log.error(text)


def _no_other_thread_uses(elder: Elder) -> bool:
    """Whether nothing is done with a strategy while this thread waits: others may begin to use one that it has used."""
    if elder.thread not in (0, get_ident()):
        return False
    return all(thread.name.startswith(_OURS_BY_NAME) for thread in busy_threads(pause=_GLANCE))


def _place_of_constructor() -> Location | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return None if frame is None else location(frame.f_code, frame.f_lasti)
