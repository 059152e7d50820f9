"""What other workers ask of runs: of those that this worker has not opened yet, and of those it has no part in.

Who has left a run in the midst of its opening, or at its very end, has told of it, and the others are asked. Some of
them have the run open, and their crossings answer. One that is to open it yet answers when it does. One that has ended
the run already, or will not open it any more, says so at once, for the one that asks waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodist._core.report import ReplicaState
from aiodist.workers.state import WorkerState, absent
from aiodist.workers.tribunal import LaneKey

if TYPE_CHECKING:
    from aiodist.replica.crossing import Crossing
    from aiodist.replica.team import Team


class Asked:
    """The questions for which there is no crossing.

    Args:
        team: the workers.

    Attributes:
        opening: the run that is being opened.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._waiting: dict[LaneKey, int | None] = {}
        self._ended_well: dict[int, LaneKey] = {}
        self.opening: LaneKey | None = None

    def ask(self, key: LaneKey, trouble: int | None) -> None:
        """Answer, now or later."""
        if self._has_no_part_in(key):
            self._team.report(key, self._absent_from(key))
        else:
            self._waiting[key] = trouble

    def take(self, crossing: Crossing) -> None:
        """Let a crossing answer what has been asked, as soon as its run has begun."""
        if crossing.key in self._waiting:
            self._team.call_soon_threadsafe(self._team.ask, crossing.key, self._waiting.pop(crossing.key))

    def end_well(self, crossing: Crossing) -> None:
        """Note a run that has ended well; until its lane is used again."""
        self._ended_well[crossing.lane.index] = crossing.key

    def _has_no_part_in(self, key: LaneKey) -> bool:
        return key[0] > 0 and key != self.opening and key[0] <= self._team.complete

    def _absent_from(self, key: LaneKey) -> WorkerState:
        layout = self._team.span.layout
        end = ReplicaState.EXITED if key in self._ended_well.values() else ReplicaState.CANCELLED
        return absent(layout.rank, end, layout.local)
