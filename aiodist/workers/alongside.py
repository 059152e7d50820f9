"""Values that move together with their record, instead of after it: the faster mode, for programs known to be right.

A reduction whose size no other worker's value has a part in is begun as soon as its record is, on a communicator that
the lane has for that alone, so that it never meets a record or another lane's values. Nothing that comes of it is
looked at before the records have agreed. Where they do not, the operations in the air are left alone, with their
buffers, and the communicator is never used again: what others have begun there may have been something else.

Which communicator that is, if any, every worker says in its records: values are awaited only where all have begun them,
and the lane gets another communicator only where all lack one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from aiodist.workers.alone import AloneReduction
from aiodist.workers.record import Flag
from aiodist.workers.reduction import Reduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiodist.workers.communicator import Communicator, Request
    from aiodist.workers.transfers import Hands, Steps, Transfer

_MOST_LOST: Final = 16
"""How many communicators a lane may lose before its values wait for their records: MPI has some thousand in all."""


class Begun:
    """A transfer whose first operations are begun.

    Args:
        steps: carry it out. What goes wrong in the first is raised when they are gone on with: others may have begun
            something else, which is then what there is to tell.
    """

    __slots__ = ("_error", "_first", "_steps")

    def __init__(self, steps: Steps[Any]) -> None:
        self._steps = steps
        self._first: Request | None = None
        self._error: Exception | None = None
        try:
            self._first = next(steps)
        except Exception as error:  # noqa: BLE001  (of the engine)
            self._error = error

    def go_on(self) -> Steps[Any]:
        """Bring it to its end; return its result."""
        if self._first is None:
            assert self._error is not None
            raise self._error
        yield self._first
        return (yield from self._steps)


class Alongside:
    """What a lane has for values that move together with their records.

    Args:
        communicator: the lane's, which records use.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._of_lane = communicator
        self._own: Communicator | None = None
        self._lost = 0

    def flag(self, transfers: Sequence[Transfer], room: int) -> int:
        """Return what the record says of a step whose values may move together with it.

        Args:
            transfers: what is to be exchanged.
            room: how many bytes of the first the record takes.
        """
        if not transfers or not isinstance(transfers[0], (Reduction, AloneReduction)) or transfers[0].room <= room:
            return Flag.NONE
        return self.flag_of_large()

    def flag_of_large(self) -> int:
        """Return what the record says of a step that reduces more than a record takes."""
        if self._own is not None:
            return Flag.BEGUN
        return Flag.WANTED if self._lost < _MOST_LOST else Flag.NONE

    def begin(self, transfer: Transfer, hands: Hands) -> Begun:
        """Begin to exchange values whose record is on its way."""
        assert self._own is not None
        return Begun(transfer.carry_out(self._own, None, hands))

    def make(self) -> Steps[None]:
        """Make the communicator: all workers have agreed that they lack it."""
        duplication = self._of_lane.idup()
        yield duplication
        self._own = duplication.result()

    def drop(self) -> None:
        """Use the communicator never again, for something may be in the air there that not all have begun."""
        if self._own is not None:
            self._own = None
            self._lost += 1
