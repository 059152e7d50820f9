"""The crossing of lane 0: what is called outside of replicas, driven by the callers' own tasks."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final

from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.spanned import SpannedGroup
from aiodist.replica.awaiting import InterruptedStep
from aiodist.replica.crossing import Crossing
from aiodist.replica.under_way import UnderWay
from aiodist.workers.lane import Lane
from aiodist.workers.record import ALL_FREE
from aiodist.workers.transfers import Steps
from aiodist.workers.tribunal import LaneKey

if TYPE_CHECKING:
    from aiodist._core.errors import CollectiveError
    from aiodist.replica.team import Team

_MOST_RUNS: Final = 63


class RunOpening:
    """A run that is being opened.

    Args:
        team: the workers.
        group: its local replicas.
        key: what it is called between workers.

    Attributes:
        crossing: the run's crossing, once it is open.
        decided: it is, or it is not.
    """

    def __init__(self, team: Team, group: SpannedGroup, key: LaneKey) -> None:
        self._team = team
        self._group = group
        self.key = key
        self.decided = False
        self.crossing: Crossing | None = None

    @property
    def run(self) -> Crossing:
        """The run's crossing.

        Raises:
            RuntimeError: the workers have no lane free for it.
        """
        if self.crossing is None:
            raise RuntimeError(f"a strategy on several workers has at most {_MOST_RUNS} runs at a time")
        return self.crossing

    def opened(self, lane: Lane) -> Crossing:
        """Take the run's lane."""
        self.crossing = Crossing(self._team, lane, self.key, self._group)
        return self.crossing

    def __enter__(self) -> None:
        self._team.asked_of_runs.opening = self.key

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._team.asked_of_runs.opening = None
        if error is not None and self.crossing is not None:
            self.crossing.leave()


class RootCrossing(Crossing):
    """The crossing of lane 0.

    Args:
        team: the workers.
        lane: lane 0.
        key: what this use of it is called between workers.
        group: stands for the local replicas.
    """

    def __init__(self, team: Team, lane: Lane, key: LaneKey, group: SpannedGroup) -> None:
        super().__init__(team, lane, key, group)
        self._openings: dict[int, RunOpening] = {}

    @property
    def complete(self) -> int:
        """How many of its operations are complete."""
        return min(self.group.open, default=self.group.members[0].sequence)

    @property
    def error(self) -> BaseException | None:
        """What has ended it."""
        return self._error

    def move_to_this_loop(self) -> None:
        """Be driven by the event loop that runs now."""
        self._make_bells()

    def open_run(self, meeting: Rendezvous, group: SpannedGroup) -> RunOpening:
        """Let a meeting open a run."""
        number = meeting.number
        self._openings[number] = RunOpening(self._team, group, (number + 1, self.key[1]))
        return self._openings[number]

    async def carry_over(self) -> None:
        """Carry over what has begun.

        Raises:
            InterruptedStep: there is trouble.
        """
        self._busy = True
        try:
            while self._queue:
                if self.told:
                    raise InterruptedStep  # noqa: TRY301  (as where it is told in the midst of a step)
                await self._complete(self._begin(self._queue.popleft()))
        except InterruptedStep as step:
            self._engine_error = step.__cause__
            raise
        except Exception as error:
            self._engine_error = error
            raise
        finally:
            self.hands.close()
            self._end_by_loss()

    def _begin(self, meeting: Rendezvous | None, free: int = ALL_FREE) -> UnderWay:
        opening = None if meeting is None else self._openings.pop(meeting.number, None)
        if meeting is None or opening is None:
            return super()._begin(meeting, free)
        return UnderWay(meeting, self._open(meeting, opening))

    def _open(self, meeting: Rendezvous, opening: RunOpening) -> Steps[int]:
        """Open a run. What all workers have agreed on, they all carry out, be it that a lane is to be made.

        Raises:
            InterruptedStep: the strategy has ended.
        """
        lanes = yield from self._carry(meeting, self._team.free_lanes)
        lane = None
        if lanes:
            self.lane.in_exchange = True
            lane = yield from self._lane_of((lanes & -lanes).bit_length() - 1)
            self.lane.in_exchange = False
        opening.decided = True
        if lane is not None:
            self._team._lanes[lane.index] = lane
            self._team._in_use.add(lane.index)
            opening.opened(lane)
        return 0

    def _lane_of(self, index: int) -> Steps[Lane]:
        """Return a lane that all workers have free; make it, where it is new."""
        lanes = self._team._lanes
        if index not in lanes:
            duplication = self.lane.communicator.idup()
            yield duplication
            return Lane(duplication.result(), index)
        return lanes[index]

    def lose(self, error: CollectiveError) -> None:
        """Raise that a worker is lost: the strategy is of no use, and may be kept for long."""
        super().lose(error)
        self._bell.close()
        self._values.close()

    def fail_at_once(self, meeting: Rendezvous, error: Exception) -> None:
        """Do nothing: the caller, who raises it, meets the others itself, and cannot leave before that."""

    def ask(self, trouble: int | None) -> None:  # noqa: ARG002  (the run's crossings', whose replicas show what they do)
        """Tell what there is to tell: others are in trouble."""
        self.tell()
