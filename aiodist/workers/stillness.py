"""Stillness: workers that can only wait for each other, in steps of several strategies, or of one.

A worker whose event loop has nothing to run, now or later, before one of the steps is complete that it waits in (see
`replica.idleness`) tells the first worker so: in which steps, and how far it has got in every lane of every strategy.
It tells that once, and takes nothing back when it goes on. From what all have told, those are sought of whom nobody can
ever go on: in each step of each of them, another one of them is missing.

What was told at different times is no picture of one moment. It need not be, for how far a worker has got in a lane
only grows. Suppose that some of those found have gone on since they told. The first to do so went on by a step that was
complete; so the one that was missing in it had got there. It had not when it told. If it told later than that, it never
had before; if it told earlier, it must have gone on in between, before the first. Both cannot be.

Something else may wake a worker: a verdict on what went wrong before. Verdicts of a strategy are numbered, and reach
each worker in order. Who has told of fewer than another one knows of may have one on its way, and does not count.

Where a step has more than one exchange, as the opening of a run that needs a new lane has, a worker may have brought
its record and then stand still: one that makes a strategy does nothing else. So how far a worker has got is told with
whether it takes part in what comes behind the record.

What was rejected: a picture of one moment (the workers would be asked twice, and who goes on in between would be asked
again); to compare the lines at which strategies are made, which may be those of branches that are meant to meet.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from aiodist.collective.wording import ids_briefly

LaneKey: TypeAlias = tuple[int, int]


class Progress(NamedTuple):
    """How far a worker has got in a lane: it has brought so many records, and goes on behind the last of them."""

    posted: int
    moving: bool


class Step(NamedTuple):
    """A step that a worker waits in.

    Attributes:
        strategy: of which strategy, by its number.
        lane: in which lane; None where the strategy is being made.
        needs: how far all others must have got for it to be complete.
        key: what this use of the lane is called between workers, if it is one.
        text: what it is, and where it was called.
    """

    strategy: int
    lane: int | None
    needs: Progress
    key: LaneKey | None
    text: str


class Still(NamedTuple):
    """What a worker tells that can only wait.

    Attributes:
        rank: the worker.
        made: how many strategies it has made, with the one that it is making.
        steps: what it waits in.
        progress: how far it has got, by strategy and lane; a lane that is missing has not been used.
        verdicts: by strategy, the number of the last verdict that it has heard.
    """

    rank: int
    made: int
    steps: tuple[Step, ...]
    progress: Mapping[int, Mapping[int, Progress]]
    verdicts: Mapping[int, int]

    @property
    def makes(self) -> bool:
        """Whether it is making a strategy, and its event loop stands still."""
        return any(step.lane is None for step in self.steps)

    def at(self, strategy: int, lane: int | None) -> Progress:
        """Return how far it had got there: as far as anybody wants, where that is not told."""
        if lane is None:
            return _NOWHERE if self.made < strategy else _ANYWHERE
        lanes = self.progress.get(strategy)
        return _ANYWHERE if lanes is None else lanes.get(lane, _NOWHERE)

    def is_missing_in(self, step: Step) -> bool:
        """Whether it had not come to a step yet."""
        return self.at(step.strategy, step.lane) < step.needs


_NOWHERE: Final = Progress(0, moving=False)
_ANYWHERE: Final = Progress(sys.maxsize, moving=True)


def stuck(stills: Iterable[Still]) -> dict[int, Still]:
    """Return those workers, by rank, that never go on; of each the last that it has told is given."""
    left = {still.rank: still for still in stills}
    latest: dict[int, int] = {}
    for still in left.values():
        for strategy, number in still.verdicts.items():
            latest[strategy] = max(number, latest.get(strategy, 0))
    left = {rank: still for rank, still in left.items() if still.makes or not _may_hear(still, latest)}
    while True:
        least = _least(left.values())
        free = [
            rank
            for rank, still in left.items()
            if not all(least[step.strategy, step.lane] < step.needs for step in still.steps)
        ]
        if not free:
            return left
        for rank in free:
            del left[rank]


def _may_hear(still: Still, latest: Mapping[int, int]) -> bool:
    """Whether a verdict that another worker has heard may be on its way to this one."""
    return any(latest[strategy] > number for strategy, number in still.verdicts.items())


def _least(stills: Collection[Still]) -> dict[tuple[int, int | None], Progress]:
    """Return how far the last one has got in each lane that somebody waits in: there may be thousands who wait."""
    lanes = {(step.strategy, step.lane) for still in stills for step in still.steps}
    return {lane: min(still.at(*lane) for still in stills) for lane in lanes}


class Stillness:
    """What workers have told of it, as the first one keeps it; in any thread."""

    def __init__(self) -> None:
        self._told: dict[int, Still] = {}
        self._lock = threading.Lock()

    def hear(self, still: Still) -> int:
        """Take what a worker tells; return how many never go on. More may be about to tell the same."""
        with self._lock:
            self._told[still.rank] = still
            return len(stuck(self._told.values()))

    def take(self) -> dict[int, Still]:
        """Return the workers that never go on, once."""
        with self._lock:
            found = stuck(self._told.values())
            for rank in found:
                del self._told[rank]
            return found


class Together:
    """Lanes of several strategies that are judged together.

    A worker that has heard of one may go on to the step of another, which others wait in still. As all have told how
    far they have got in that, it is too late to take part in it, also where its verdict comes later.

    Args:
        lanes: how many.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._judging: dict[object, Callable[[], object]] = {}
        self._lock = threading.Lock()

    def heard(self, lane: object, judge: Callable[[], object]) -> None:
        """Hear that all workers have told of a lane; have all judged, where it was the last. In any thread."""
        with self._lock:
            self._judging[lane] = judge
            judging = list(self._judging.values()) if len(self._judging) == self._lanes else []
        for each in judging:
            each()


def text_of(found: Mapping[int, Still], places: Mapping[int, Sequence[str]]) -> str:
    """Return what is to be told of workers that never go on.

    Args:
        found: by rank.
        places: by strategy and rank, where it was made.
    """
    alike: dict[str, list[int]] = {}
    for rank, still in sorted(found.items()):
        for step in still.steps:
            alike.setdefault(f"in {step.text}, with strategy {step.strategy}", []).append(rank)
    waits = [f"  {_workers(ranks)} wait{'s' if len(ranks) == 1 else ''} {where}" for where, ranks in alike.items()]
    used = sorted({step.strategy for still in found.values() for step in still.steps})
    made = [line for number in used for line in made_at(number, places.get(number, ()))]
    return "\n".join(
        [
            "workers wait for each other, and nothing can let them go on:",
            *waits,
            *made,
            "Strategies pair up in the order in which workers make them: make them, and use them, in the same order on",
            "every worker. What is to go on side by side takes a task for each strategy.",
        ]
    )


def made_at(strategy: int, places: Sequence[str]) -> list[str]:
    """Say where a strategy was made; in a line for each place, where the workers made it at several."""
    alike = _by_place(places)
    if len(alike) < 2:
        return [f"Strategy {strategy} was made at {place}." for place in alike]
    return [f"Strategy {strategy} was made {_by_whom(alike)}."]


def made_differently(places: Sequence[str]) -> str:
    """Say so, where the workers have made a strategy at different places; which may be meant."""
    alike = _by_place(places)
    if len(alike) < 2:
        return ""
    return f"The strategy was made {_by_whom(alike)}: strategies pair up in the order in which each worker makes them."


def _by_place(places: Sequence[str]) -> dict[str, list[int]]:
    alike: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        alike.setdefault(place, []).append(rank)
    return alike


def _by_whom(alike: Mapping[str, Sequence[int]]) -> str:
    who = [f"by {_workers(ranks)} at {place}" for place, ranks in alike.items()]
    return f"{', '.join(who[:-1])} and {who[-1]}"


def _workers(ranks: Sequence[int]) -> str:
    return ids_briefly(ranks).replace("replica", "worker")
