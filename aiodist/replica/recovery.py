"""Recovery: lanes on which something went wrong are brought to where all workers have them.

Mostly a lane only lacks records (`Lane.catch_up`). One in which a worker could not carry out a step has something in
the air that nobody will ever complete (`workers.breakdown`). A run's is dropped by all workers, and made anew from
lane 0 when a run takes its place. Lane 0 itself gets another communicator, made beside the old one as those of groups
are, in no order with what is in the air there. Where none can be had, the strategy is of no use any more: it says so.

What was rejected: to make lane 0's next communicator from the old one (workers have begun different numbers of
operations there, so that it would pair with a sum); to keep a spare one from the beginning (every strategy would pay
for what hardly ever happens, and a second breakdown needs the next one).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from anyio import create_task_group

from aiodist.replica.awaiting import InterruptedStep
from aiodist.replica.root_crossing import RootCrossing
from aiodist.workers.breakdown import OWN_LANE
from aiodist.workers.lost import no_communicator

if TYPE_CHECKING:
    from aiodist.replica.crossing import Crossing
    from aiodist.replica.team import Team
    from aiodist.workers.communicator import Communicator, Duplication
    from aiodist.workers.lane import Lane
    from aiodist.workers.tribunal import LaneKey, Verdict


class Recovery:
    """The crossings that have ended in trouble, and whose lanes are not left yet.

    Args:
        team: the workers.
        communicator: the job's first, of which others are made.

    Attributes:
        crossings: in the order in which they ended.
    """

    def __init__(self, team: Team, communicator: Communicator) -> None:
        self._team = team
        self._communicator = communicator
        self._judged: dict[LaneKey, Crossing] = {}
        self._renewals: dict[LaneKey, Duplication | Exception] = {}
        self.crossings: list[Crossing] = []

    def judged(self, crossing: Crossing) -> None:
        """Take a crossing that has a verdict."""
        self._judged[crossing.key] = crossing

    def amend(self, key: LaneKey, verdict: Verdict) -> bool:
        """Hear a verdict once more; return whether it is on a crossing that is known."""
        crossing = self._judged.get(key)
        if crossing is not None:
            crossing.amend(verdict)
        return crossing is not None

    def renew(self, root: RootCrossing, number: int) -> None:
        """Begin to make lane 0's next communicator, where the old one is broken; who still waits there leaves it.

        Args:
            root: the crossing in which the old one broke.
            number: a new one, the same on all workers.
        """
        if not root.is_broken:
            return
        for crossing in self.crossings:
            if isinstance(crossing, RootCrossing):
                crossing.leave_values()
        try:
            workers = range(self._team.span.layout.workers)
            self._renewals[root.key] = self._communicator.isplit(workers, number)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for who uses the strategy next)
            self._renewals[root.key] = error

    def end_runs_behind(self, root: RootCrossing, verdict: Verdict, crossings: Sequence[Crossing]) -> None:
        """End those runs that this worker has opened, and another has not, or not as far as it is known."""
        for crossing in crossings:
            if crossing.key[1] != root.key[1] or crossing.key[0] <= verdict.complete:
                continue
            if root.is_broken:
                crossing.half_open = True
                lanes = frozenset({OWN_LANE, *self._team.group_lanes.of(crossing.key)})
                self._team._judge(crossing.key, replace(verdict, broken=lanes))
            elif not verdict.heard_all:  # others have given up what only this worker has seen agreed on
                crossing.ask(None)

    def is_behind(self, crossing: Crossing) -> bool:
        """Return whether a step is under way on its lane that was begun before it, and may still be agreed on."""
        before = takewhile(lambda earlier: earlier is not crossing, self.crossings)
        return any(earlier.lane is crossing.lane and earlier.in_the_midst for earlier in before)

    async def carry_out(self) -> None:
        """Leave the lanes.

        They are left in another order on each worker, so that none of them waits for another; what was begun on one
        lane comes to its end in the order in which it was begun there.

        Raises:
            CollectiveError: lane 0 has no communicator any more; or a worker is lost.
        """
        by_lane: dict[Lane, list[Crossing]] = {}
        for crossing in self.crossings:
            by_lane.setdefault(crossing.lane, []).append(crossing)
        async with create_task_group() as tasks:
            for crossings in by_lane.values():
                tasks.start_soon(self._leave, crossings)
        if self._team.lost is not None:
            raise type(self._team.lost)(self._team.lost.report)

    async def _leave(self, crossings: Sequence[Crossing]) -> None:
        for crossing in crossings:
            await crossing.judged.wait()
            if isinstance(crossing, RootCrossing) and crossing.key in self._renewals:
                await self._renew(crossing)
            if self._team.lost is None and (crossing.clean or await crossing.catch_up()):
                self.crossings.remove(crossing)
                self._judged.pop(crossing.key, None)
                self._take_back(crossing)

    def _take_back(self, crossing: Crossing) -> None:
        """Let another run have the lane of one that has failed, which is in order."""
        index = crossing.lane.index
        if index and crossing.is_broken:
            self._team._lanes.pop(index, None)
        if index and not crossing.lane_is_lost:
            self._team._in_use.discard(index)

    async def _renew(self, crossing: RootCrossing) -> None:
        """Give lane 0 its next communicator, or the strategy up."""
        made = self._renewals[crossing.key]
        error = made if isinstance(made, Exception) else None
        try:
            if not isinstance(made, Exception):
                with suppress(InterruptedStep):  # by the loss of a worker
                    await crossing.renew_lane(made)
        except Exception as raised:  # noqa: BLE001  (of the engine)
            error = raised
        if error is not None:
            self._team.give_up(no_communicator(self._team.span.layout, crossing.report, error))
        if self._team.lost is None:
            del self._renewals[crossing.key]
