"""Crossings: how runs of local replicas meet those of other workers.

A crossing serves one run: its group calls it (`Bridge`), and the control plane does, through the worker's `Team`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Final

from anyio import CancelScope
from anyio.abc import TaskGroup

from aiodist._core.errors import CollectiveError
from aiodist._core.report import ReplicaState
from aiodist.collective.branches import Branches
from aiodist.collective.group import SyncGroup
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.spanned import LocalPart, SpannedGroup, SpannedPart
from aiodist.collective.subgroup import SubGroup
from aiodist.replica.awaiting import InterruptedStep
from aiodist.replica.carrying import Carrier
from aiodist.replica.lasting_event import LastingEvent
from aiodist.replica.part_crossing import PartCrossing, part_of
from aiodist.replica.under_way import When
from aiodist.workers.calls import digest
from aiodist.workers.lane import Disagreement, Lane
from aiodist.workers.lane_book import GroupKey
from aiodist.workers.record import ALL_RECEIVE_ALL, Notice
from aiodist.workers.state import Failure, WorkerState, tell
from aiodist.workers.transfers import Steps
from aiodist.workers.tribunal import LaneKey

if TYPE_CHECKING:
    from aiodist.replica.team import Team

_FINISHED = digest("every local replica has returned")
_TURNS: Final = 8
_GROUPS_CLOSED = digest("every group of the run is closed")


class Crossing(Carrier):
    """The crossing of one run.

    Args:
        team: the workers.
        lane: the lane of its steps, which nobody else uses meanwhile.
        key: what the run is called between workers.
        group: the local replicas.
    """

    group: SpannedGroup

    def __init__(self, team: Team, lane: Lane, key: LaneKey, group: SpannedGroup) -> None:
        super().__init__(team, lane, group, team.span)
        self.key = key
        lane.begin(*key)
        self._parts: list[PartCrossing] = []
        self.told = False
        self._asked = False
        self._finishing = False
        self._busy = False  # the driving task is at work
        self._loss: CollectiveError | None = None
        self._error: CollectiveError | None = None
        self._engine_error: BaseException | None = None
        self._watches: int | None = None  # the number of the last question
        self._unmade: tuple[GroupKey, ...] | None = None
        self._start: Callable[[PartCrossing], object] | None = None
        self.clean = False
        self.judged = LastingEvent()
        self._stopped = LastingEvent()
        layout = team.span.layout
        group.span(self, layout.offset, layout.replicas)
        team.enter(self)

    # What the run's groups call.

    def new_part(
        self, parent: SyncGroup, positions: tuple[int, ...], name: str | None, code: CodeType, offset: int
    ) -> SubGroup:
        """Return a group of some of the replicas, and begin to carry it over where it has members elsewhere."""
        layout = self.span.layout
        ids = [parent.replica_id_of(position) for position in positions]
        if all(layout.worker_of(replica_id)[0] == layout.rank for replica_id in ids):
            return LocalPart(parent, positions, name, code, offset)
        group = SpannedPart(parent, positions, name, code, offset)
        part = PartCrossing(self, group, parent, positions)
        self._parts.append(part)
        assert self._start is not None
        self._start(part)
        return group

    def tell_waits(self, certain: Collection[int]) -> None:
        """Tell the other workers which local replicas do nothing but wait in collectives."""
        if not self.told and not self.clean:
            self._team.group_lanes.tell_waits(self.key, self.state(), certain, self._watches or 0)

    def watch(self, number: int) -> None:
        """Tell, from now on, when the local replicas do nothing but wait: the coordinator asks for it."""
        self._watches = number
        if self._finishing:
            self.tell_waits(())
        elif self.group.engine is not None:
            Branches.of(self.group).watch.look_now()

    def start_in(self, tasks: TaskGroup) -> None:
        """Drive the crossings of groups in tasks of their own."""
        context = copy_context()  # that of the run's caller, which is no replica's
        self._start = lambda part: context.run(tasks.start_soon, part.drive)

    def close(self) -> None:
        """Never called: the run ends with `finish`."""

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local replicas mean the same."""
        super().cross(meeting)
        if self._watches is not None and self.group.branches is None:
            self.watch(self._watches)
        if self._error is not None:
            self._settle()

    def complain(self, group: SyncGroup, overdue: Rendezvous | None) -> None:
        """Have all workers judged, a group being in trouble."""
        limit = None if overdue is None or overdue.deadline is None else overdue.deadline - overdue.started
        self.tell(group=group, overdue=None if overdue is None or limit is None else (overdue.number, limit))

    def judge_alone(self) -> CollectiveError:
        """Return the verdict on what is known here, where replicas must be told at once."""
        return self._team.judge(self.state())

    async def finish(self, failures: Mapping[int, BaseException]) -> None:
        """Meet the other workers at the end of the run."""
        self._finishing = True
        if self.judged.is_set():
            self._settle()
            return
        if failures or any(member.end is not ReplicaState.EXITED for member in self.group.members):
            self.tell(failures=failures)
            return
        if self.told or self._asked or any(group.trouble is not None for group in self.group.groups()):
            self.tell()
        else:
            if self._watches is not None or self.group.branches is not None:
                self.tell_waits(())
            for part in self._parts:
                part.close()
            self._queue.append(None)
            self._bell.ring()
            await self._stopped.wait()
        if not self.clean:
            await self.judged.wait()
            self._settle()

    # What the control plane calls, in the event loop.

    def ask(self, trouble: int | None) -> None:
        """Tell what there is to tell, once the local replicas have shown what they do, as others are in trouble."""
        self._asked = True
        if self.told or self.judged.is_set() or self.clean:
            return
        if self._finishing or self.group.engine is None:
            self.tell()
        else:
            self.group.consider_all(trouble)

    def lose(self, error: CollectiveError) -> None:
        """Raise what ends the strategy, unless what is in flight is complete: who has ended may have done its part."""
        self._loss = error
        self._values.interrupt()
        self._interrupt(lost=True)
        if not self._busy:
            self._end(error)

    def _end_by_loss(self) -> None:
        self._busy = False
        if self._loss is not None and not self.clean:
            if self._step is not None or self._parts:
                self._team.strand(self.key)
            self._end(self._loss)

    def _end(self, error: CollectiveError) -> None:
        if not self.clean:
            self._interrupt()
            error.__cause__ = error.__cause__ or self._engine_error
            self._error = self._error or error
            self._settle_in_time(_TURNS if self._team.failed else 0)
        self.judged.set()

    def _settle_in_time(self, turns: int) -> None:
        """End the group; first there are some turns of the loop, in which a replica raises what has failed here."""
        engine = self.group.engine
        if turns and engine is not None and not self.group.closed:
            engine.call_soon(partial(self._settle_in_time, turns - 1))
        else:
            self._settle()

    def _settle(self) -> None:
        """End the group, if its replicas have been started; else at their first meeting, or at the end of the run."""
        if self._error is not None and self.group.engine is not None:
            self.group.settle(self._error)

    def tell(
        self,
        *,
        group: SyncGroup | None = None,
        overdue: tuple[int, float] | None = None,
        failures: Mapping[int, BaseException] | None = None,
    ) -> None:
        """Tell the coordinator, once; ``overdue`` is of the group, or of the run's own."""
        for failing in [each for each in self.group.groups() if each.failed is not None]:
            self._give_up_in(failing)
        if not self.told:
            self._interrupt()
            found = [Failure.of(replica_id, error) for replica_id, error in (failures or {}).items()]
            late = None if overdue is None else (group or self.group, overdue)
            layout = self._team.span.layout  # of many workers, each of which knows the same, a few tell all
            brief = layout.workers > ALL_RECEIVE_ALL and layout.rank % ALL_RECEIVE_ALL != 0
            self.told = True
            self._team.report(self.key, self.state(brief=brief, late=late, failures=found))

    def _give_up_in(self, group: SyncGroup) -> None:
        """Give the strategy up for a call that has failed here, and in which the others may wait."""
        assert group.failed is not None
        assert group.failed.error is not None
        if not group.failed.complete:
            group.finish_merge(group.failed, None, group.failed.error)
        self._team.give_up(group.failed.error)

    def state(
        self,
        *,
        brief: bool = False,
        late: tuple[SyncGroup, tuple[int, float]] | None = None,
        failures: Sequence[Failure] = (),
        note: str = "",
    ) -> WorkerState:
        """Return what this worker has to tell, in any thread."""

        def overdue_in(group: SyncGroup) -> tuple[int, float] | None:
            return late[1] if late is not None and late[0] is group else None

        return tell(
            self.group,
            self.span.layout.rank,
            brief=brief,
            overdue=overdue_in(self.group),
            failures=failures,
            note=note,
            groups=[part_of(group, overdue_in(group)) for group in self.group.groups()[1:]],
        )

    # What the crossings of groups call.

    def ring_parts(self) -> None:
        """Let the crossings of groups look again: one of them has a lane."""
        for part in self._parts:
            part.ring()

    def parted(self, part: PartCrossing) -> None:
        """Hear that the crossing of a group is over."""
        self._parts.remove(part)
        self._bell.ring()

    def hear_unmade(self, groups: tuple[GroupKey, ...]) -> None:
        """Hear which groups others have not made, and never will."""
        self._unmade = groups
        self._bell.ring()

    # After the end.

    def leave(self) -> None:
        """End a run that this worker's caller has left before its replicas were started."""
        for member in self.group.members:
            member.end = ReplicaState.CANCELLED
        self._team.close_run(self)

    # The way of a run.

    async def drive(self) -> None:
        """Carry meetings over until the run is finished, or everything is over."""
        with CancelScope(shield=True):
            self._busy = True
            try:
                await self._carry_all()
            except InterruptedStep as step:
                self._engine_error = step.__cause__
            except Exception as error:  # noqa: BLE001  (at the end of the run, where nobody waits for a value)
                self._engine_error = error
                self._team.give_up(error)
            finally:
                self._end_by_loss()
                self._stopped.set()
                self.hands.close()
                self._bell.close()
                self._values.close()

    def stop(self) -> None:
        """Carry nothing over any more."""
        self._interrupt()

    def _interrupt(self, *, lost: bool = False) -> None:
        self._bell.interrupt()
        for part in self._parts:
            part.interrupt(lost=lost)

    def _disagree(self, number: int | None) -> None:
        self.ask(number)

    def _end_well(self) -> Steps[int]:
        notice = Notice.GROUPS if self._parts else Notice.NONE
        if any(part.grant is None for part in self._parts):
            notice = Notice.PENDING
        agreed = yield from self._meet(_FINISHED, notice)
        if agreed.notice is not Notice.NONE:
            if agreed.notice is Notice.PENDING:
                yield from self._settle_pending()
            yield When(lambda: not self._parts)
            yield from self._meet(_GROUPS_CLOSED)
        self.clean = True
        self.judged.set()  # all is said, also where this worker's caller has left the run at its very end
        self._team.leave(self)
        return 0

    def _settle_pending(self) -> Steps[None]:
        """Tell where somebody has not made a group that its others have: everybody has ended."""
        self._team.group_lanes.finishing(self.key)
        yield When(lambda: self._unmade is not None)
        if self._unmade:
            raise Disagreement
