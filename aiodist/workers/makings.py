"""Making a further strategy: what the workers tell each other of it over the control planes of those they have made.

The k-th strategy of a worker meets the k-th of every other one, and its constructor blocks until they have come. One
that waits for more than a second asks the others what they do; each tells whether it has come, and where it is. So a
worker that never makes that strategy is named soon, where it can be known that it never will:

- its process ends, has died, is stopped or cut off: the control plane of an earlier strategy knows;
- nothing can run there any more but what goes on with steps in which this worker is missing, or another one that waits
  likewise (`stillness`); and this one stays missing, for its event loop stands still in the constructor.

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
from functools import partial
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from aiodist.collective import wording
from aiodist.collective.callsite import location
from aiodist.collective.wording import ids_briefly
from aiodist.vocabulary import environment
from aiodist.vocabulary.errors import CollectiveError, StallWarning
from aiodist.vocabulary.reports import Location
from aiodist.vocabulary.threads import busy_threads
from aiodist.workers.stillness import LaneKey, Progress, Step, Still, Stillness, Together, stuck, text_of

if TYPE_CHECKING:
    from aiodist.workers.communicator import Request

FIRST_MEETING_SECONDS: Final = 300.0
ASK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.0005
_GLANCE: Final = 0.0002
_OURS_BY_NAME: Final = "aiodist "
_OURS: Final = ("aiodist.workers", "aiodist.strategy")


class Whereabouts(NamedTuple):
    """What a worker tells who waits for it.

    Attributes:
        number: how many strategies it has made, with the one that it is making.
        text: what it is at.
        seen: its event loop has told that itself.
        still: what it waits in, where nothing of it can run but what goes on with that; else None.
    """

    number: int
    text: str
    seen: bool = False
    still: Still | None = None


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

    @property
    def places(self) -> Sequence[str]:
        """Where each worker has made it."""
        ...

    @property
    def verdicts(self) -> int:
        """The number of the last verdict that has come to this worker."""
        ...

    @property
    def is_in_question(self) -> bool:
        """Whether others may go on by what is on its way to them: a verdict, or the news that a worker has left."""
        ...

    def progress(self) -> Mapping[int, Progress]:
        """Return how far this worker has got in each lane."""
        ...

    def inquire(self, question: int, number: int) -> None:
        """Ask all others where they are on their way to the strategy of that number."""

    def lost_worker(self, rank: int, why: str) -> CollectiveError:
        """Return the error for a worker that is gone."""
        ...

    def standstill(self, rank: int, text: str) -> CollectiveError:
        """Return the error for a worker that can never come."""
        ...

    def stop(self, key: LaneKey, why: str, heard: Callable[[Callable[[], object]], object]) -> None:
        """Have ended, on all workers, what they do in a lane, for they wait there for ever; on the first worker.

        Args:
            key: the lane.
            why: what is told.
            heard: called when all have told their part, with what judges the lane.
        """


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
        self._seen: set[int] = set()
        self._stillness = Stillness()

    def add(self, elder: Callable[[], Elder | None]) -> None:
        """Take the strategy that has been made last, by a reference that does not keep it.

        Other threads may be looking through those that there are: they are replaced.
        """
        living = {number: ref for number, ref in self._elders.items() if ref() is not None}
        self._elders = {**living, self.made: elder}

    @property
    def elders(self) -> dict[int, Elder]:
        """The earlier strategies that live, by their numbers."""
        return {number: elder for number, ref in self._elders.items() if (elder := ref()) is not None}

    def number_of(self, elder: Elder) -> int:
        """Return the number of a strategy that lives; 0 for one that is not known yet."""
        return next((number for number, known in self.elders.items() if known is elder), 0)

    def hear(self, rank: int, question: int, whereabouts: Whereabouts) -> None:
        """Take what another worker tells, in any thread."""
        if question != self._question or (rank in self._seen and not whereabouts.seen):
            return  # the strategy that is asked there is one that the event loop does not use
        if whereabouts.seen:
            self._seen.add(rank)
        self._heard = {**self._heard, rank: whereabouts}

    def hear_still(self, still: Still) -> int:
        """Take what a worker tells that can only wait, in any thread; return how many never go on."""
        return self._stillness.hear(still)

    def end_waits(self) -> None:
        """Have ended what workers wait in that never go on."""
        found, elders = self._stillness.take(), self.elders
        why = text_of(found, {number: elder.places for number, elder in elders.items()})
        waited_in = {(step.strategy, step.key) for one in found.values() for step in one.steps}
        ended = [(elders[strategy], key) for strategy, key in waited_in if strategy in elders and key is not None]
        together = Together(len(ended))
        for elder, key in ended:
            elder.stop(key, why, partial(together.heard, object()))

    def ask(self) -> None:
        """Ask all other workers where they are; `told` has what they answer."""
        self._question, self._heard, self._seen = self._question + 1, {}, set()
        self._inquire()

    @property
    def told(self) -> str:
        """What the others have answered so far, in a line each."""
        return "".join(f"\n  worker {rank}: {told.text}" for rank, told in sorted(self._heard.items()))

    def wait(self, request: Request, rank: int, size: int) -> None:
        """Block until the next strategy's first request, for which all workers must come, is complete.

        Raises:
            CollectiveError: a worker will never make it.
            TimeoutError: another worker has not begun it for five minutes.
        """
        begun = time.monotonic()
        self._question, self._heard = self._question + 1, {}
        self.place = place_of_constructor()
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
            warn(text, self.place)

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
        found = self._never_coming(rank, elders)
        for other in sorted(found):
            if other != rank and found[other].made <= self.made:
                raise elders[max(elders)].standstill(
                    other,
                    f"worker {rank} makes a strategy{self._at()}, and worker {other} never comes to that, for it waits "
                    f"for {_whom(found, other)}: {self._heard[other].text}\n"
                    "Every worker must make the same strategies in the same order.",
                )
        self._seen = set()
        self._inquire()

    def _inquire(self) -> None:
        for elder in self.elders.values():
            elder.inquire(self._question, self.made + 1)

    def _never_coming(self, rank: int, elders: Mapping[int, Elder]) -> dict[int, Still]:
        """Return the workers that never go on, as long as this one does not, for they wait for it or for each other.

        What other threads may yet bring is not known: of a strategy that one may use, nothing is said. Nor is anything
        where one is in question: a worker that seems to wait for this one may go on by what it is about to hear.
        """
        verdicts = {number: elder.verdicts for number, elder in elders.items()}
        if any(elder.is_in_question for elder in elders.values()):
            return {}
        told = [told.still for told in self._heard.values() if told.still is not None]
        waited_in = {step.strategy for still in told for step in still.steps}
        idle = {n: elders[n] for n in waited_in & elders.keys() if _no_other_thread_uses(elders[n])}
        making = Step(self.made + 1, None, Progress(1, moving=False), None, "")
        progress = {number: elder.progress() for number, elder in idle.items()}
        return stuck([Still(rank, self.made + 1, (making,), progress, verdicts), *told])


_log = logging.getLogger("aiodist")
makings: Final = Makings()
"""Those of this process."""


def warn(text: str, place: Location) -> None:
    """Warn that a worker waits for others, at a place of its program."""
    try:
        warnings.warn_explicit(text, StallWarning, place.file, place.line)
    except StallWarning:  # a filter makes errors of warnings; who waits is not to be ended by that
        _log.error(text)


def _no_other_thread_uses(elder: Elder) -> bool:
    """Whether nothing is done with a strategy while this thread waits: others may begin to use one that it has used."""
    if elder.thread not in (0, get_ident()):
        return False
    return all(thread.name.startswith(_OURS_BY_NAME) for thread in busy_threads(pause=_GLANCE))


def _whom(found: Mapping[int, Still], waiting: int) -> str:
    """Return for whom a worker waits that never goes on."""
    missing = {other for step in found[waiting].steps for other, still in found.items() if still.is_missing_in(step)}
    return ids_briefly(missing).replace("replica", "worker")


def place_of_making() -> str:
    """Return where a strategy is being made, file and line, as text."""
    place = place_of_constructor()
    return "" if place is None else wording.place(place)


def place_of_constructor() -> Location | None:
    """Return where a strategy is being made; None where no frame of a program's is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return None if frame is None else location(frame.f_code, frame.f_lasti)
