"""Recovery: lanes on which something went wrong are brought to where all workers have them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from anyio import create_task_group

if TYPE_CHECKING:
    from aiodist.replica.crossing import Crossing
    from aiodist.replica.team import Team
    from aiodist.workers.lane import Lane


class Recovery:
    """The crossings that have ended in trouble, and whose lanes are not left yet.

    Args:
        team: the workers.

    Attributes:
        crossings: in the order in which they ended.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self.crossings: list[Crossing] = []

    def is_behind(self, crossing: Crossing) -> bool:
        """Return whether a step is under way on its lane that was begun before it, and may still be agreed on."""
        before = takewhile(lambda earlier: earlier is not crossing, self.crossings)
        return any(earlier.lane is crossing.lane and earlier.in_the_midst for earlier in before)

    async def carry_out(self) -> None:
        """Leave the lanes.

        They are left in another order on each worker, so that none of them waits for another; what was begun on one
        lane comes to its end in the order in which it was begun there.
        """
        by_lane: dict[Lane, list[Crossing]] = {}
        for crossing in self.crossings:
            by_lane.setdefault(crossing.lane, []).append(crossing)
        async with create_task_group() as tasks:
            for crossings in by_lane.values():
                tasks.start_soon(self._leave, crossings)

    async def _leave(self, crossings: Sequence[Crossing]) -> None:
        for crossing in crossings:
            await crossing.judged.wait()
            if self._team.lost is None and (crossing.clean or await crossing.catch_up()):
                self.crossings.remove(crossing)
                if crossing.lane.index:
                    self._team._in_use.discard(crossing.lane.index)
