"""Where this worker stands, for those who wait for it: what it is at, in which steps, and whether it can only wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.signature import KIND
from aiodist.collective.wording import place
from aiodist.replica.idleness import is_in_a_step, runs_here, something_can_run
from aiodist.vocabulary.environment import stall_seconds
from aiodist.vocabulary.errors import CollectiveError, DeadlockError
from aiodist.vocabulary.reports import CollectiveReport, Reason, ReplicaReport, ReplicaState
from aiodist.workers.lost import lost_worker
from aiodist.workers.makings import Makings, warn
from aiodist.workers.stillness import LaneKey, Progress, Step, Still, made_at

if TYPE_CHECKING:
    from aiodist.collective.rendezvous import Rendezvous
    from aiodist.replica.crossing import Crossing
    from aiodist.replica.root_crossing import RootCrossing
    from aiodist.replica.team import Team

OPENING: Final = "strategy.run"
"""The kind of meeting that opens a run."""

_NOTHING: Final = "its event loop runs"
_MOST_LINES: Final = 5


@dataclass
class _Wait:
    """How long this worker has waited in the same steps, and what has come of that."""

    since: float = field(default_factory=time.monotonic)
    asked: bool = False
    told: bool = False


class Standing:
    """A strategy of this worker, as one that makes, or waits for, a further one sees it.

    Args:
        team: its workers.
        control: its control plane.
        makings: all strategies that this worker makes.
        places: where each worker has made it.
    """

    def __init__(self, team: Team, control: Any, makings: Makings, places: Sequence[str]) -> None:
        self._team = team
        self._control = control
        self._makings = makings
        self.places = places
        self._is_looking = False
        self._waited_in: list[tuple[LaneKey, int]] = []
        self._looks = 0
        self._wait = _Wait()

    @property
    def thread(self) -> int:
        """The thread of the event loop that it was used in last; 0 where it has not been used."""
        return self._team._home.thread

    @property
    def gone(self) -> Mapping[int, str]:
        """The workers that will never make anything again, and why."""
        found: Mapping[int, str] = self._control.gone
        return found

    def inquire(self, question: int, number: int) -> None:
        """Ask all others where they are on their way to the strategy of that number."""
        self._control.inquire(question, number)

    def stop(self, key: LaneKey, why: str, heard: Callable[[Callable[[], object]], object]) -> None:
        """Have ended, on all workers, what they do in a lane, for they wait there for ever; on the first worker."""
        self._control.stop(key, why, heard)

    @property
    def verdicts(self) -> int:
        """The number of the last verdict that has come to this worker."""
        found: int = self._control.verdicts
        return found

    @property
    def is_in_question(self) -> bool:
        """Whether a verdict, or the news that a worker has left, may be on its way to others."""
        return self._team.lost is not None or self._control.awaits_verdict

    def progress(self) -> dict[int, Progress]:
        """Return how far this worker has got in each lane.

        Only the opening of a run is known to bring nothing behind its record before all have brought theirs.
        """
        half_way = {one.lane.index for one in self._team._crossings.values() if _is_opened(one) and not one.moving}
        return {i: Progress(lane.posted, i not in half_way) for i, lane in list(self._team._lanes.items())}

    def lost_worker(self, rank: int, why: str) -> CollectiveError:
        """Return the error for a worker that is gone."""
        return lost_worker(self._team.span.layout, rank, why)

    def standstill(self, rank: int, text: str) -> CollectiveError:
        """Return the error for a worker that can never come."""
        layout = self._team.span.layout
        here, there = layout.places[layout.rank], layout.places[rank]
        states = [ReplicaState.WAITING if i in there else ReplicaState.RUNNING for i in range(layout.replicas)]
        replicas = tuple(map(ReplicaReport, range(layout.replicas), layout.names, states))
        return DeadlockError(CollectiveReport(Reason.DEADLOCK, 0, replicas, (*sorted({*here, *there}),), text))

    def whereabouts(self, tell: Callable[[str, Still | None], object]) -> None:
        """Tell what this worker is at, in the event loop; nothing where none runs."""
        self._team.call_soon_threadsafe(self._tell, tell)

    def _tell(self, to: Callable[[str, Still | None], object]) -> None:
        from aiodist.replica.waits import look_at_loop  # loaded when there is something to tell

        if self._team.is_here and runs_here():
            graph = look_at_loop()
            still = None if something_can_run(lambda: graph) else self._still()
            graph.waiters = [waiter for waiter in graph.waiters if not is_in_a_step(waiter)]
            to("; ".join([*self._operations(), *graph.lines()][:_MOST_LINES]) or _NOTHING, still)

    def look(self, tell: Callable[[Still], object]) -> None:
        """Tell, in the event loop, if this worker can only wait, and has waited in the same step since the last look.

        While that goes on, it is looked up after 1, 2, 4, 8 … looks: there may be thousands of tasks to look at.
        """
        if not self._is_looking:
            self._is_looking = True
            self._team.call_soon_threadsafe(self._look, tell)

    def _look(self, tell: Callable[[Still], object]) -> None:
        from aiodist.replica.waits import look_at_loop

        self._is_looking = False
        if not (self._team.is_here and runs_here()):
            return
        waited_in = [(one.key, one.lane.posted) for one in self._team._crossings.values() if one.in_the_midst]
        if waited_in != self._waited_in:
            self._waited_in, self._looks, self._wait = waited_in, -1, _Wait()
        self._looks += 1
        self._warn_in_time()
        if not waited_in or self._looks.bit_count() != 1 or something_can_run(look_at_loop):
            return
        still = self._still()
        if still is not None:
            tell(still)

    def _warn_in_time(self) -> None:
        """Warn of an operation outside of replicas that has waited for long; what replicas wait in, `stall` does."""
        root, wait, seconds = self._team._root, self._wait, stall_seconds()
        meeting = None if root is None or root._step is None else root._step.meeting
        waited = time.monotonic() - wait.since
        if meeting is None or wait.told or not seconds or waited < seconds:
            return
        if not wait.asked:
            wait.asked = True
            self._makings.ask()
            return
        wait.told = True
        rank, where = self._team.span.layout.rank, location(meeting.code, meeting.offset)
        warn(
            f"worker {rank} has waited {waited:.3g} s in {call_text(meeting.signature)} at {place(where)}, with "
            f"strategy {self._makings.number_of(self)} (AIODIST_STALL_SECONDS sets the time, 0 turns this off)"
            f"{self._makings.told}{self.made_differently}",
            where,
        )

    @property
    def made_differently(self) -> str:
        """A line that says so, where the workers have made it at different places."""
        if len(set(self.places)) < 2:
            return ""
        return "".join(f"\n  {line}" for line in made_at(self._makings.number_of(self), self.places))

    def _operations(self) -> list[str]:
        """Say in which operations outside of replicas this worker waits."""
        elders = self._makings.elders
        roots = {n: elder._team._root for n, elder in elders.items() if isinstance(elder, Standing)}
        said = []
        for number, root in roots.items():
            which = f", with strategy {number}" if len(elders) > 1 else ""
            for meeting in [] if root is None else _waited_in(root):
                where = place(location(meeting.code, meeting.offset))
                said.append(f"it waits in {meeting.signature[KIND].name} at {where}{which}")
        return said

    def _still(self) -> Still | None:
        """Return all steps in the air, of all strategies; None where the control plane may yet bring something else."""
        found: list[Step] = []
        elders = self._makings.elders
        verdicts = {number: elder.verdicts for number, elder in elders.items()}  # who counts one has been called
        known = {elder._team for elder in elders.values() if isinstance(elder, Standing)}
        others = [team for team in set(_teams) - known if team._home.is_here]
        if any(crossing._step is not None for team in others for crossing in team._crossings.values()):
            return None  # a strategy of some of the workers may go on without the one that asks
        for number, elder in elders.items():
            steps = elder._steps(number) if isinstance(elder, Standing) else None
            if steps is None:
                return None
            found += steps
        progress = {number: elder.progress() for number, elder in elders.items()}
        return Still(self._team.span.layout.rank, self._makings.made, tuple(found), progress, verdicts)

    def _steps(self, number: int) -> list[Step] | None:
        team = self._team
        crossings = [crossing for crossing in team._crossings.values() if not crossing.clean]
        comes = team._turns.in_use and (team._root is None or team._root._step is None)  # by copies from a GPU, say
        if team.plane is not None or team.lost is not None or comes or team._home.has_calls:
            return None
        if team._home.thread not in (0, get_ident()) or any(map(_is_in_question, crossings)):
            return None
        return [_step(number, one) for one in crossings if one._step is not None]


_teams: Final[WeakSet[Team]] = WeakSet()


def note(team: Team) -> None:
    """Know a strategy's workers, be it one that only some of the job's make."""
    _teams.add(team)


def _waited_in(root: RootCrossing) -> list[Rendezvous]:
    """Return the operations that a worker waits in; one whose record is with all may not be carried out yet."""
    under_way = None if root._step is None else root._step.meeting
    waited_in = [root.group.open[number] for number in sorted(root.group.open)]
    return waited_in if under_way is None or under_way in waited_in else [under_way, *waited_in]


def _step(number: int, crossing: Crossing) -> Step:
    """Return the step that a crossing waits in."""
    assert crossing._step is not None
    meeting, lane = crossing._step.meeting, crossing.lane
    text = "the end of a run"
    if meeting is not None:
        text = f"{call_text(meeting.signature)} at {place(location(meeting.code, meeting.offset))}"
    return Step(number, lane.index, Progress(lane.posted, crossing.moving), crossing.key, text)


def _is_opened(crossing: Crossing) -> bool:
    """Whether a crossing's step is the opening of a run."""
    meeting = None if crossing._step is None else crossing._step.meeting
    return meeting is not None and meeting.signature[KIND].name == OPENING


def _is_in_question(crossing: Crossing) -> bool:
    """Whether the control plane, or a group's lane, may bring about something that no step does."""
    return crossing.told or crossing._asked or bool(crossing._parts) or crossing.judged.is_set()
