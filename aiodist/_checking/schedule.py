"""Schedules: the order in which ready tasks run, as changes to asyncio's own order, which is first in, first out.

A **point** is a moment at which a task is to run and at least one other, of the same turn of the loop, is ready, too;
points are counted from 0. In the default order the task that has been ready longest runs. A **change** at a point
alters that:

    17:2     the task 2 places behind runs first; -1 is the last in the queue, and so on from the end
    17-      the task whose turn it is is deferred until nothing else can run

A schedule is the seed of the program's random numbers and the changes, written as ``0/17:2,40-``, as ``--replay`` takes
it. It repeats a run of a program.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

DEFER: Final = 1 << 30
"""The choice to defer the task whose turn it is."""

_CHANGE = re.compile(r"(\d+)(?:(-)|:(-?[1-9]\d*))")
_RATES = (0.3, 0.05, 0.01)
_MOST_RATE = 0.4
_FEWEST_CHANGES = 4


class Change(NamedTuple):
    """A difference from the default order.

    The choice is how many places behind the first the task is that runs instead, negative from the end; or `DEFER`.
    """

    point: int
    choice: int

    def __str__(self) -> str:
        return f"{self.point}-" if self.choice == DEFER else f"{self.point}:{self.choice}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A seed, and the changes to the default order, by ascending point."""

    seed: int = 0
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        return f"{self.seed}/{','.join(map(str, self.changes))}"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read a schedule as `str` writes it; anything else is a ValueError."""
        seed, slash, rest = text.partition("/")
        parts = [_CHANGE.fullmatch(part) for part in rest.split(",")] if rest else []
        if not (slash and seed.isascii() and seed.isdigit()) or None in parts:
            raise ValueError(f"expected a schedule such as 0/17-,40:2, as a failing check prints it, got {text!r}")
        changes = [Change(int(part[1]), DEFER if part[2] else int(part[3])) for part in parts if part]
        return cls(int(seed), tuple(sorted(changes)))


Order: TypeAlias = Callable[[int, int], int]
"""Decides which task runs at a point: takes its number and how many tasks are ready (two or more), and returns the
choice as in `Change`, or 0 for the default."""


def default_order(point: int, ready: int) -> int:  # noqa: ARG001
    """Choose the task that has been ready longest."""
    return 0


def last_first(point: int, ready: int) -> int:  # noqa: ARG001
    """Choose the task that became ready last, so that replicas run in reverse order."""
    return -1


def replayed(changes: Iterable[Change]) -> Order:
    """Return the default order with some changes; one whose point has too few tasks has no effect."""
    choices = dict(changes)

    def choose(point: int, ready: int) -> int:
        choice = choices.get(point, 0)
        return choice if choice == DEFER or -ready < choice < ready else 0

    return choose


def at_random(rng: random.Random, points: int) -> Order:
    """Return an order with changes at random points: at least four, on average, of those in the default order."""
    rate = max(rng.choice(_RATES), min(_MOST_RATE, _FEWEST_CHANGES / points))

    def choose(point: int, ready: int) -> int:  # noqa: ARG001
        if rng.random() >= rate:
            return 0
        return DEFER if rng.random() < 0.25 else rng.randrange(1, ready)

    return choose


def directed(rng: random.Random, places: Sequence[Sequence[int]]) -> Order:
    """Return an order with one to three changes, most of which defer a task.

    The points of the default order are given by place in the program: a rare place is drawn as often as a frequent one.
    """
    changes: dict[int, Change] = {}
    for _ in range(rng.randint(1, 3)):
        point = rng.choice(rng.choice(places))
        changes[point] = Change(point, DEFER if rng.random() < 0.75 else -1)
    return replayed(changes.values())


def other_orders(seed: int, points: int, places: Sequence[Sequence[int]] = ()) -> Iterator[Order]:
    """Yield the orders to try after the default one: its reverse, then random and directed ones in turn.

    Each is a function of the seed and its number, so that a search can be repeated. Directed orders need the points of
    the default order by place in the program.
    """
    yield last_first
    for number in itertools.count(2):
        rng = random.Random(f"{seed}.{number}")  # noqa: S311  (a schedule is no secret)
        yield directed(rng, places) if places and number % 2 else at_random(rng, points)
