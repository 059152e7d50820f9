"""The course of one run of a program: the order that it is to go by, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from aiodist.checking.schedule import Change, Order

if TYPE_CHECKING:
    from aiodist.checking.loop import ControlledLoop, Step


class OnPoint(Protocol):
    """Who is told of points."""

    def __call__(self, point: int, first: Step, instead: Step | None, /) -> None:
        """Note a point: the step whose turn it is and, where the order is changed, the step that runs instead.

        For a step aside that is the first one itself.
        """


class OnEnd(Protocol):
    """Who is called when a run cannot, or may not, go on."""

    def __call__(self, loop: ControlledLoop, *, proved: bool) -> None:
        """Make something run, or raise what is to come out of the loop.

        Args:
            loop: the loop.
            proved: nothing can ever run again; else the run has taken too long.
        """


class Course:
    """The course of one run of a program, on one controlled loop or on several, one after the other.

    Attributes:
        order: who runs next.
        on_end: called when the run cannot go on.
        on_point: told of every point; None for nobody.
        deadline: when the run has taken too long, on the real clock; None for never.
        next_point: the next point at which `choose` is to be asked.
        points: how many points there have been.
        changes: where the order was not the plain one.
    """

    def __init__(
        self, order: Order, on_end: OnEnd, *, on_point: OnPoint | None = None, deadline: float | None = None
    ) -> None:
        self.order = order
        self.on_end = on_end
        self.on_point = on_point
        self.deadline = deadline
        self.next_point = 0 if on_point is not None else order.next_point
        self.points = 0
        self.changes: list[Change] = []

    def choose(self, point: int, ready: int) -> int:
        """Return who runs at a point, as in `Change`; 0 for the one whose turn it is."""
        order, choice = self.order, 0
        if point >= order.next_point:
            choice = order.choose(point, ready)
            if choice:
                self.changes.append(Change(point, choice))
        if self.on_point is None:
            self.next_point = order.next_point
        return choice
