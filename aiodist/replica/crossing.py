"""Crossings: how runs of local replicas meet those of other workers, and what is called outside of replicas does.

A crossing serves one run: its group calls it (`Bridge`), and the control plane does, through the worker's `Team`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio
from anyio import CancelScope

from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.spanned import SpannedGroup
from aiodist.replica.awaiting import InterruptedStep, complete, until
from aiodist.replica.carrying import Carrier
from aiodist.vocabulary.errors import CollectiveError
from aiodist.vocabulary.reports import ReplicaState
from aiodist.workers.absence import Presence
from aiodist.workers.calls import digest
from aiodist.workers.communicator import Request
from aiodist.workers.crossing import Plan
from aiodist.workers.lane import Lane
from aiodist.workers.record import ALL_RECEIVE_ALL, Notice
from aiodist.workers.state import Failure, WorkerState, tell
from aiodist.workers.transfers import Steps
from aiodist.workers.tribunal import Verdict

if TYPE_CHECKING:
    from aiodist.replica.team import Team

_FINISHED = digest("every local replica has returned")
_ENDED = Presence(ended=True)


class Crossing(Carrier):
    """The crossing of one run.

    Args:
        team: the workers.
        lane: the lane of its steps, which nobody else uses meanwhile.
        group: the local replicas.
    """

    group: SpannedGroup

    def __init__(self, team: Team, lane: Lane, group: SpannedGroup) -> None:
        super().__init__(team, lane, group, team.span)
        self.key = lane.key
        self._asked = False
        self._finishing = False
        self._busy = False
        self._loss: CollectiveError | None = None
        self._error: CollectiveError | None = None
        self._verdict: Verdict | None = None
        self._engine_error: BaseException | None = None
        self.told = False
        self.clean = False
        self.judged = anyio.Event()
        self._stopped = anyio.Event()
        layout = team.span.layout
        group.span(self, layout.offset, layout.replicas)
        team.enter(self)

    # What the group calls.

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local replicas mean the same."""
        super().cross(meeting)
        if self._error is not None:
            self._settle()

    def complain(self, overdue: Rendezvous | None) -> None:
        """Have all workers judged, this one being in trouble."""
        limit = None if overdue is None or overdue.deadline is None else overdue.deadline - overdue.started
        self.tell(overdue=None if overdue is None or limit is None else (overdue.number, limit))

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
        if self.told or self._asked or self.group.trouble is not None:
            self.tell()
        else:
            self._queue.append(None)
            self._bell.ring()
            await self._stopped.wait()
        if not self.clean:
            await self.judged.wait()

    # What the control plane calls, in the event loop.

    def ask(self) -> None:
        """Tell what there is to tell, once the local replicas have shown what they do."""
        self._asked = True
        if self.told or self.judged.is_set() or self.clean:
            return
        if self._finishing or self.group.engine is None:
            self.tell()
        else:
            self.group.consider_all()

    def judge(self, verdict: Verdict) -> None:
        """Raise the verdict."""
        self._verdict = verdict
        self._end(verdict.error())

    def lose(self, error: CollectiveError) -> None:
        """Raise that a worker is lost, unless what is in flight is complete: who has ended may have done its part."""
        self._loss = error
        self._values.interrupt()
        self._bell.interrupt()
        if not self._busy:
            self._end(error)

    def _end_by_loss(self) -> None:
        self._busy = False
        if self._loss is not None and not self.clean:
            self._end(self._loss)

    def _end(self, error: CollectiveError) -> None:
        if not self.clean:
            self._bell.interrupt()
            error.__cause__ = error.__cause__ or self._engine_error
            self._error = self._error or error
            self._settle()
        self.judged.set()

    def _settle(self) -> None:
        """End the group, if its replicas have been started; else at their first meeting, or at the end of the run."""
        if self._error is not None and self.group.engine is not None:
            self.group.settle(self._error)

    def tell(
        self,
        *,
        overdue: tuple[int, float] | None = None,
        failures: Mapping[int, BaseException] | None = None,
        note: str = "",
    ) -> None:
        """Tell the coordinator, once."""
        if not self.told:
            self.told = True
            self._bell.interrupt()
            found = [Failure.of(replica_id, error) for replica_id, error in (failures or {}).items()]
            layout = self._team.span.layout  # of many workers, each of which knows the same, a few tell all
            brief = layout.workers > ALL_RECEIVE_ALL and layout.rank % ALL_RECEIVE_ALL != 0
            self._team.report(self.key, self.state(brief=brief, overdue=overdue, failures=found, note=note))

    def state(
        self,
        *,
        brief: bool = False,
        overdue: tuple[int, float] | None = None,
        failures: list[Failure] | None = None,
        note: str = "",
    ) -> WorkerState:
        """Return what this worker has to tell, in any thread."""
        rank, posted = self._team.span.layout.rank, self.lane.freeze()
        return tell(self.group, rank, posted, brief=brief, overdue=overdue, failures=failures or (), note=note)

    # Lane 0, which the callers' tasks drive.

    def move_to_this_loop(self) -> None:
        """Be driven by the event loop that runs now."""
        self._make_bells()

    async def carry_over(self, free: int) -> int:
        """Carry over what has begun; return the lanes that all workers have free, as the last of it has told.

        Raises:
            InterruptedStep: there is trouble.
        """
        common = 0
        self._busy = True
        try:
            while self._queue:
                common = await self._complete(self._begin(self._queue.popleft(), free))
        except InterruptedStep as step:
            self._engine_error = step.__cause__
            raise
        finally:
            self._hands.close()
            self._end_by_loss()
        return common

    async def await_request(self, request: Request) -> None:
        """Wait until a request is complete, unless a worker is lost."""
        await until(request, self._values)

    async def catch_up(self) -> None:
        """Bring the lane to where all workers have it."""
        await self.finish_step()
        if self._verdict is not None:
            try:
                await complete(self.lane.catch_up(self._verdict.posted), self._values)
            except InterruptedStep:
                return

    # The way of a run.

    async def drive(self) -> None:
        """Carry meetings over until the run is finished, or everything is over."""
        with CancelScope(shield=True):
            self._busy = True
            try:
                await self._carry_all()
            except InterruptedStep as step:
                self._engine_error = step.__cause__
                await self._leave_nobody_waiting()
            except Exception as error:  # noqa: BLE001  (of the engine, while nobody waits for a value)
                self._engine_error = error
                self.tell(note=f"its {self.lane.communicator.engine} engine failed: {error}")
            finally:
                self._end_by_loss()
                self._stopped.set()
                self._hands.close()
                self._bell.close()
                self._values.close()

    def stop(self) -> None:
        """Carry nothing over any more."""
        self._bell.interrupt()

    async def _leave_nobody_waiting(self) -> None:
        """Go on with the step that was left in the midst, where all workers have begun it."""
        if self._step is None or self._loss is not None or not self.told:
            return
        await self.judged.wait()
        if self._verdict is not None and self._verdict.posted_by_all >= self.lane.posted:
            await self.finish_step()

    def _disagree(self) -> None:
        self.tell()

    def _end_well(self) -> Steps[int]:
        self._moving = False
        agreed = yield from self.lane.agree(_FINISHED, lambda _: Plan([], lambda _: None))
        if agreed.notice >= Notice.ABSENT:
            yield from self._tell(_ENDED)
        self.clean = True
        self._team.leave(self)
        return 0
