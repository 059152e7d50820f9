"""Schedules: in which order ready tasks run, as the changes against the plain order.

A **point** is a moment in which a task is to run and at least one other, of the same turn of the loop, is ready, too;
points are counted from 0. In the plain order, asyncio's own, the task that has been ready longest runs. A **change** at
a point does otherwise:

    17:2     the task that stands 2 places behind runs first; -1 is the last in the queue, and so on from the end
    17-      the task whose turn it is steps aside, until nothing else can run

A schedule is the seed of the program's random numbers and its changes, and as text ``0/17:2,40-``, which is what
``--replay`` takes. Any run of a program can be repeated from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

ASIDE: Final = 1 << 30
"""The choice to step aside."""
NEVER: Final = 1 << 62

_CHANGE = re.compile(r"(\d+)(?:(-)|:(-?[1-9]\d*))")


class Change(NamedTuple):
    """What is done otherwise than in the plain order.

    Attributes:
        point: at which point.
        choice: how many places behind the first the task stands that runs, negative: counted from the end; or `ASIDE`.
    """

    point: int
    choice: int

    def __str__(self) -> str:
        return f"{self.point}-" if self.choice == ASIDE else f"{self.point}:{self.choice}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A seed, and the changes against the plain order, by ascending point."""

    seed: int = 0
    changes: tuple[Change, ...] = ()

    def __str__(self) -> str:
        return f"{self.seed}/{','.join(map(str, self.changes))}"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read a schedule as `str` writes it.

        Raises:
            ValueError: it is none.
        """
        seed, slash, rest = text.partition("/")
        parts = [_CHANGE.fullmatch(part) for part in rest.split(",")] if rest else []
        if not (slash and seed.isascii() and seed.isdigit()) or None in parts:
            raise ValueError(f"expected a schedule such as 0/17-,40:2, as a failing check prints it, got {text!r}")
        changes = [Change(int(part[1]), ASIDE if part[2] else int(part[3])) for part in parts if part]
        return cls(int(seed), tuple(sorted(changes)))


class Order:
    """Who runs next. This is the plain order; others override `choose`.

    Attributes:
        next_point: the first point from here on at which it is to be asked.
    """

    next_point: int = NEVER

    def choose(self, point: int, ready: int) -> int:
        """Return who runs.

        Args:
            point: the number of this point, at least ``next_point``.
            ready: how many tasks are ready, two or more.

        Returns:
            The choice, as in `Change`; 0 for the plain one.
        """
        raise NotImplementedError(f"the plain order has nothing to choose at point {point} of {ready} tasks")


class Replayed(Order):
    """An order by given changes. One whose point has too few tasks changes nothing."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._left = sorted(changes, reverse=True)
        self._go_on()

    def choose(self, point: int, ready: int) -> int:
        """Choose as it is written."""
        choice = 0
        while self._left and self._left[-1].point <= point:
            change = self._left.pop()
            choice = change.choice if change.point == point else 0
        self._go_on()
        return choice if choice == ASIDE or -ready < choice < ready else 0

    def _go_on(self) -> None:
        self.next_point = self._left[-1].point if self._left else NEVER
