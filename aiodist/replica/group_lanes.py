"""The lanes of groups, as one worker has them: asked for of the lane book, made, used again, and given back."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from aiodist.replica.awaiting import Bell, until
from aiodist.workers.communicator import Communicator, Duplication
from aiodist.workers.lane import Lane
from aiodist.workers.lane_book import Ask, Finishing, Free, Grant, GroupKey, Run
from aiodist.workers.standstill import Waits
from aiodist.workers.tribunal import Control

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiodist.replica.part_crossing import PartCrossing
    from aiodist.workers.state import WorkerState


class GroupLanes:
    """The lanes of a strategy's groups.

    Args:
        communicator: the job's first.
        control: the control plane.
    """

    def __init__(self, communicator: Communicator, control: Control) -> None:
        self._communicator = communicator
        self._control = control
        self._making: dict[int, Duplication] = {}
        self._failed: dict[int, Exception] = {}
        self._lanes: dict[int, Lane] = {}
        self._asked: defaultdict[tuple[Run, GroupKey], deque[PartCrossing]] = defaultdict(deque)

    def ask(self, run: Run, part: PartCrossing, key: GroupKey, workers: tuple[int, ...]) -> None:
        """Ask for a lane; the part hears of it."""
        self._asked[run, key].append(part)
        self._control.book(Ask(run, key, workers))

    def finishing(self, run: Run) -> None:
        """Tell that nothing more will be asked for in a run."""
        self._control.book(Finishing(run))

    def tell_waits(self, run: Run, state: WorkerState, certain: Collection[int], asked: int) -> None:
        """Tell which replicas of a run do nothing but wait."""
        self._control.book(Waits(run, state, tuple(certain), asked))

    def granted(self, grant: Grant) -> None:
        """Take a lane, and begin to make its communicator where it is new."""
        number = grant.number
        if number not in self._lanes and number not in self._making:
            try:
                self._making[number] = self._communicator.isplit(grant.workers, number)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is for who wants to use the lane)
                self._failed[number] = error
        waiting = self._asked.get((grant.run, grant.group))
        if waiting:
            waiting.popleft().granted(grant)
        if not waiting:
            self._asked.pop((grant.run, grant.group), None)

    async def lane(self, number: int, bell: Bell) -> Lane:
        """Wait until a lane is made; return it.

        Raises:
            InterruptedStep: the bell has interrupted that.
            Exception: what went wrong in the engine.
        """
        if number in self._failed:
            raise self._failed[number]
        if number not in self._lanes:
            await until(self._making[number], bell)
            if number in self._making:
                self._lanes[number] = Lane(self._making.pop(number).result(), -number)
        return self._lanes[number]

    def free(self, number: int) -> None:
        """Give a lane back that all its workers have left at the same record."""
        self._control.book(Free(number))
