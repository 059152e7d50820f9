"""Orders that look for trouble: random ones, and ones directed at the places where the order can be another."""

from __future__ import annotations

import math
import random
from types import CodeType
from typing import Any, TypeAlias

from aiodist._runtime.stacks import awaited_by, is_plumbing
from aiodist.checking.loop import Step
from aiodist.checking.schedule import ASIDE, Change, Order, Replayed

Places: TypeAlias = dict[tuple[CodeType | None, int], list[int]]
"""By the place in the program at which a task was to go on, the points at which that was so."""

_RATES = (0.3, 0.05, 0.01)
_FAR = 64


class LastFirst(Order):
    """Whoever became ready last runs first: replicas run in the reverse of their order."""

    next_point = 0

    def choose(self, point: int, ready: int) -> int:  # noqa: ARG002
        """Choose the last."""
        self.next_point = point + 1
        return -1


class Random(Order):
    """Changes at random points, many or few."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rate = math.log1p(-rng.choice(_RATES))
        self.next_point = self._pause()

    def choose(self, point: int, ready: int) -> int:
        """Choose any but the first, or let that step aside."""
        self.next_point = point + 1 + self._pause()
        if self._rng.random() < 0.25:
            return ASIDE
        if ready <= 2 * _FAR:
            return self._rng.randrange(1, ready)
        choice = self._rng.randrange(-_FAR, _FAR)  # near an end of a long queue, where a task is found fast
        return choice or 1

    def _pause(self) -> int:
        return int(math.log(1.0 - self._rng.random()) / self._rate)


class Watch:
    """Notes at which place of the program each point was, in a run in plain order."""

    def __init__(self) -> None:
        self.places: Places = {}

    def __call__(self, point: int, first: Step, _: Step | None, /) -> None:
        """Note a point."""
        self.places.setdefault(_place_of(first), []).append(point)


def _place_of(step: Step) -> tuple[CodeType | None, int]:
    """Return where a task will go on: its innermost frame that is the program's."""
    awaitable: Any = step.task.get_coro()
    found: tuple[CodeType | None, int] = None, 0
    while (frame := getattr(awaitable, "cr_frame", None)) is not None:
        if not _is_plumbing(frame.f_code, frame):
            found = frame.f_code, frame.f_lasti
        awaitable = awaited_by(awaitable)
    return found


_known: dict[CodeType, bool] = {}


def _is_plumbing(code: CodeType, frame: Any) -> bool:
    if code not in _known:
        _known[code] = is_plumbing(frame)
    return _known[code]


def directed(rng: random.Random, places: Places) -> Order:
    """Return an order with one to three changes, at points drawn by place: a rare one counts like a frequent one.

    Most let a task step aside until nothing else can run: what waits for nobody comes as late as it can.
    """
    by_place = list(places.values())
    changes: dict[int, Change] = {}
    for _ in range(rng.randint(1, 3)):
        point = rng.choice(rng.choice(by_place))
        changes[point] = Change(point, ASIDE if rng.random() < 0.75 else -1)
    return Replayed(list(changes.values()))
