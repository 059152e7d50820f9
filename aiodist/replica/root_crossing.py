"""The crossing of lane 0: what is called outside of replicas, driven by the callers' own tasks.

A caller may leave in the midst: it is cancelled, or Ctrl-C comes. Where its record is with the others already, nobody
knows yet who has seen it agreed on. So it waits for the verdict first, which comes soon: where every worker has brought
that record, all of them carry the operation out, this one as well, and the lane stays in step. A run has been opened
then, and is left as a run is whose caller is cancelled inside.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.spanned import SpannedGroup
from aiodist.replica.awaiting import InterruptedStep, until
from aiodist.replica.crossing import Crossing
from aiodist.replica.under_way import UnderWay
from aiodist.workers.breakdown import OWN_LANE
from aiodist.workers.lane import Lane
from aiodist.workers.record import ALL_FREE
from aiodist.workers.state import WorkerState
from aiodist.workers.transfers import Steps
from aiodist.workers.tribunal import LaneKey, Verdict

if TYPE_CHECKING:
    from aiodist._core.errors import CollectiveError
    from aiodist._core.report import CollectiveReport
    from aiodist.replica.team import Team
    from aiodist.workers.breakdown import Breakdown
    from aiodist.workers.communicator import Duplication

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
        self._left = False
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
        if self._left:
            self.crossing.leave()
        return self.crossing

    def __enter__(self) -> None:
        self._team.asked_of_runs.opening = self.key

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._team.asked_of_runs.opening = None
        if error is not None:
            self._left = True
            if self.crossing is not None:
                self.crossing.leave()
            self._team.asked_of_runs.go_on()


class RootCrossing(Crossing):
    """The crossing of lane 0, from one verdict to the next.

    Args:
        team: the workers.
        lane: lane 0.
        key: what this use of it is called between workers.
        group: stands for the local replicas.
    """

    def __init__(self, team: Team, lane: Lane, key: LaneKey, group: SpannedGroup) -> None:
        super().__init__(team, lane, key, group)
        self._base = 0  # a worker may be asked before it has caught up with the others behind the last verdict
        self._openings: dict[int, RunOpening] = {}
        self._goes_on: Rendezvous | None = None

    @property
    def complete(self) -> int:
        """How many of its operations are complete."""
        return min(self.group.open, default=self.group.members[0].sequence)

    @property
    def in_the_midst(self) -> bool:
        """Whether a step has been begun, and is not over, or its meeting is not."""
        return super().in_the_midst or self._goes_on is not None

    @property
    def error(self) -> BaseException | None:
        """What has ended it: what failed here, or else the verdict."""
        return self._withheld[0][2] if self._withheld else self._error

    @property
    def report(self) -> CollectiveReport:
        """The verdict's."""
        assert self._verdict is not None
        return self._verdict.report

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
            self._leave_lane()

    def _begin(self, meeting: Rendezvous | None, free: int = ALL_FREE) -> UnderWay:
        opening = None if meeting is None else self._openings.pop(meeting.number, None)
        if meeting is None or opening is None:
            return super()._begin(meeting, free)
        return UnderWay(meeting, self._open(meeting, opening))

    def _open(self, meeting: Rendezvous, opening: RunOpening) -> Steps[int]:
        """Open a run. What all workers have agreed on, they all carry out, be it that a lane is to be made.

        Raises:
            InterruptedStep: one of them cannot.
        """
        lanes = yield from self._carry(meeting, self._team.free_lanes)
        lane = None
        if lanes:
            self.lane.in_exchange = True
            lane = yield from self._lane_of((lanes & -lanes).bit_length() - 1)
            self.lane.in_exchange = False
        if self.is_broken:  # another worker could not open it, which was heard when all was ready here
            raise InterruptedStep
        opening.decided = True
        if lane is not None:
            self._team._lanes[lane.index] = lane
            self._team._in_use.add(lane.index)
            crossing = opening.opened(lane)
            if self._verdict is not None and not self._verdict.heard_all:
                crossing.ask(None)
        return 0

    def _lane_of(self, index: int) -> Steps[Lane]:
        """Return a lane that all workers have free; make it, where it is new."""
        lanes = self._team._lanes
        if index not in lanes:
            duplication = self.lane.communicator.idup()
            yield duplication
            return Lane(duplication.result(), index)
        return lanes[index]

    def judge(self, verdict: Verdict) -> None:
        """Raise the verdict, but in the operation that all workers have begun: they carry it out."""
        step = self._step
        begun = verdict.heard_all and verdict.posted_by_all >= self.lane.posted
        if step is not None and begun and OWN_LANE not in verdict.broken:
            self._goes_on = step.meeting
        if self._goes_on is not None:
            self._goes_on.under_way = True
        super().judge(verdict)

    async def conclude(self) -> None:
        """Wait for the verdict, and go on with the step that was left in the midst, where all workers have begun it.

        It may have ended meanwhile: what its records say is seen at any moment, be it that the workers disagree.
        """
        await self.judged.wait()
        meeting = self._goes_on
        if meeting is None:
            return
        await self.finish_step()
        self._goes_on, meeting.under_way = None, False
        if not meeting.complete and self._error is not None:
            self.group._fail(meeting, self._error)
        self._leave_lane()

    def amend(self, verdict: Verdict) -> None:  # noqa: ARG002  (what it says is known to who has failed)
        """Hear a verdict once more: lane 0 has been begun anew meanwhile, and is to be left."""
        if self.breakdowns:
            self._team.break_down(self.breakdowns[-1])

    def take_over(self, breakdown: Breakdown) -> None:
        """Tell of a step before, on the same lane, that this worker cannot carry out."""
        self.breakdowns.append(replace(breakdown, late=True))
        self.tell()

    def lose(self, error: CollectiveError) -> None:
        """Raise that a worker is lost: the strategy is of no use, and may be kept for long."""
        super().lose(error)
        self._bell.close()
        self._values.close()

    def fail_at_once(self, meeting: Rendezvous, error: Exception) -> None:
        """Do nothing: the caller, who raises it, meets the others itself, and cannot leave before that."""

    def leave_values(self) -> None:
        """Go on with nothing: another worker does not."""
        self._values.interrupt()

    async def renew_lane(self, made: Duplication) -> None:
        """Give the lane another communicator.

        Raises:
            InterruptedStep: a worker is lost.
            Exception: what went wrong in the engine.
        """
        self._make_bells()
        await until(made, self._values)
        assert self._verdict is not None
        self.lane.renew(made.result(), self._verdict.posted)

    def ask(self, trouble: int | None) -> None:  # noqa: ARG002  (the run's crossings', whose replicas show what they do)
        """Tell what there is to tell: others are in trouble."""
        self.tell()

    def state(self, **told: Any) -> WorkerState:
        """Return what this worker has to tell, and by which digests others know the calls that it has begun."""
        digests, first = self._team.digests, self.group.members[0]
        found = {}
        meeting: Rendezvous | None
        for number, meeting in list(self.group.open.items()):
            refused = number == first.abandoned and first.refusal
            found[number] = digests.of_refused(meeting.call) if refused else digests.of(meeting.call)
        for _, meeting, _ in self._withheld:
            if meeting is not None:
                found[meeting.number] = digests.of(meeting.call)
        return replace(super().state(**told), digests=found)
