"""Crossings: how meetings of local replicas go on to meet those of other workers, one after the other, in a lane.

    local meeting complete ── record ──┬─ agreed: exchange values, complete the meeting
                                       └─ not: tell the coordinator, stop, raise the verdict when it comes

A crossing serves one sync group: its group calls it (`Bridge`), and the control plane does, through the worker's
`Team`. It stops at the first disagreement, at a verdict, and when a worker is lost. What was agreed on is always
carried out, whoever is cancelled meanwhile: the others count on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio import CancelScope

from aiodist.collective import sameness
from aiodist.collective.device_crossing import Ferry
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import KIND, TYPES, has_device_arrays
from aiodist.collective.spanned import SpannedGroup
from aiodist.replica.awaiting import Bell, InterruptedStep, complete, made, until
from aiodist.vocabulary.errors import CollectiveError
from aiodist.vocabulary.reports import ReplicaState
from aiodist.workers.calls import digest
from aiodist.workers.communicator import Request
from aiodist.workers.crossing import Plan
from aiodist.workers.lane import Agreed, Disagreement, FrozenLane, Lane, PlanOf
from aiodist.workers.record import ALL_FREE
from aiodist.workers.state import Failure, WorkerState, tell
from aiodist.workers.tribunal import Verdict
from aiodist_kernels import Accumulate, policy

if TYPE_CHECKING:
    from aiodist.replica.team import Team

_FINISHED = digest("every local replica has returned")
_NOTHING = Plan([], lambda _: None)
_ENGINE_GRACE_SECONDS = 2.0


class Crossing:
    """The crossing of one group.

    Args:
        team: the workers.
        lane: the lane of its steps, which nobody else uses meanwhile.
        group: the local replicas.
    """

    def __init__(self, team: Team, lane: Lane, group: SpannedGroup) -> None:
        self._team = team
        self.lane = lane
        self.key = lane.key
        self.group = group
        self._queue: deque[Rendezvous | None] = deque()
        self._bell = Bell(team.call_soon_threadsafe)
        self._values = Bell(team.call_soon_threadsafe, for_values=True)
        self._asked = False
        self._finishing = False
        self._busy = False
        self._loss: CollectiveError | None = None
        self._error: CollectiveError | None = None
        self._engine_error: BaseException | None = None
        self.told = False
        self.clean = False
        self.needs = 0
        self.judged = anyio.Event()
        self._stopped = anyio.Event()
        layout = team.span.layout
        group.span(self, layout.offset, layout.replicas)
        team.enter(self)

    # What the group calls.

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local replicas mean the same."""
        self._queue.append(meeting)
        self._bell.ring()
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
        self.needs = verdict.posted
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
            self._team.report(self.key, self.state(overdue=overdue, failures=found, note=note))

    def state(
        self, *, overdue: tuple[int, float] | None = None, failures: list[Failure] | None = None, note: str = ""
    ) -> WorkerState:
        """Return what this worker has to tell, in any thread."""
        rank = self._team.span.layout.rank
        return tell(self.group, rank, self.lane.freeze(), overdue=overdue, failures=failures or (), note=note)

    # Lane 0, which the callers' tasks drive.

    def move_to_this_loop(self) -> None:
        """Be driven by the event loop that runs now."""
        self._bell = Bell(self._team.call_soon_threadsafe)
        self._values = Bell(self._team.call_soon_threadsafe, for_values=True)

    async def carry_over(self, free: int) -> int:
        """Carry over what has begun; return the lanes that all workers have free, as the last of it has told.

        Raises:
            InterruptedStep: there is trouble.
        """
        common = 0
        self._busy = True
        try:
            while self._queue:
                meeting = self._queue.popleft()
                assert meeting is not None
                common = await self.carry(meeting, free)
        except InterruptedStep as step:
            self._engine_error = step.__cause__
            raise
        finally:
            self._end_by_loss()
        return common

    async def await_request(self, request: Request) -> None:
        """Wait until a request is complete, unless a worker is lost."""
        await until(request, self._values)

    async def catch_up(self) -> None:
        """Bring the lane to where all workers have it."""
        try:
            await complete(self.lane.catch_up(self.needs), self._values)
        except InterruptedStep:
            return

    # The way of a meeting.

    async def drive(self) -> None:
        """Carry meetings over until the run is finished, or everything is over."""
        with CancelScope(shield=True):
            self._busy = True
            try:
                await self._carry_all()
            except InterruptedStep as step:
                self._engine_error = step.__cause__
            except Exception as error:  # noqa: BLE001  (of the engine, while nobody waits for a value)
                self._engine_error = error
                self.tell(note=f"its {self.lane.communicator.engine} engine failed: {error}")
            finally:
                self._end_by_loss()
                self._stopped.set()
                self._bell.close()
                self._values.close()

    def stop(self) -> None:
        """Carry nothing over any more."""
        self._bell.interrupt()

    async def _carry_all(self) -> None:
        while True:
            while not self._queue:
                if self._bell.interrupts:
                    return
                await self._bell.wait()
            meeting = self._queue.popleft()
            if meeting is not None:
                await self.carry(meeting)
            else:
                await self._agree(_FINISHED, lambda _: _NOTHING, "native")
                self.clean = True
                self._team.leave(self)
                return

    async def carry(self, meeting: Rendezvous, free: int = ALL_FREE) -> int:
        """Carry one meeting over; return the lanes that all workers have free.

        Raises:
            InterruptedStep: there is trouble, or the run is over.
        """
        group, kind = self.group, meeting.signature[KIND]
        if meeting.complete:
            raise InterruptedStep
        meeting.put_in_native_order()
        large = policy.blocks(sum(map(_nbytes, meeting.values)))
        ferry = Ferry(meeting, group, self._team.span) if _is_on_devices(meeting) else None
        try:
            agreed = await self._agree_on(meeting, ferry, free, large=large)
            common = agreed.opening.free() if free != ALL_FREE else ALL_FREE
            if kind.across is None:
                if not meeting.complete:
                    group.engine.start_merge(group, meeting)
                return common
            await self._take(meeting, ferry, await self._carry_out(agreed, large=large), large=large)
        except InterruptedStep:
            raise
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for those who wait)
            await self._fail(meeting, error)
            return 0
        group.finish_merge(meeting, meeting.result, None)
        return common

    async def _agree_on(self, meeting: Rendezvous, ferry: Ferry | None, free: int, *, large: bool) -> Agreed:
        """Agree with all workers on a meeting, and on how it accumulates."""
        call, own = meeting.call, meeting.options.accumulate
        plan = await self._plan(meeting, ferry, own, large=large)
        wanted = [own]

        def plan_of(accumulate: Accumulate) -> Plan:
            if accumulate == own:
                return plan
            wanted.append(accumulate)
            return _NOTHING  # for now: making it takes time

        name = self._team.digests.of(call, sameness.fingerprint(self.group.order_check, call))
        agreed = await self._agree(name, plan_of, own, free)
        if wanted[-1] == own:
            return agreed
        return agreed._replace(plan=await self._plan(meeting, ferry, wanted[-1], large=large))

    async def _plan(self, meeting: Rendezvous, ferry: Ferry | None, accumulate: Accumulate, *, large: bool) -> Plan:
        """Return what is to be exchanged; values on devices are brought down for it."""
        across = meeting.signature[KIND].across
        if across is None:
            return _NOTHING
        values = meeting.values if ferry is None else await made(ferry.landing(accumulate))
        plan: Plan = await _call(large, across, meeting.signature, values, accumulate, self._team.span)
        return plan

    async def _take(self, meeting: Rendezvous, ferry: Ferry | None, result: Any, *, large: bool) -> None:
        """Keep a result where the local replicas want it, if they still do."""
        if ferry is None:
            if not meeting.complete:
                meeting.take_from_afar(result)
            return
        with CancelScope(shield=True):
            found = await made(ferry.launching(await _call(large, ferry.staged, result)))
        if not meeting.complete:
            meeting.by_replica = True
            meeting.take(found)

    async def _agree(self, name: bytes, plan_of: PlanOf, accumulate: Accumulate, free: int = ALL_FREE) -> Agreed:
        try:
            return await complete(self.lane.agree(name, plan_of, accumulate=accumulate, free=free), self._bell)
        except FrozenLane:
            raise InterruptedStep from None
        except Disagreement:
            self.tell()
            raise InterruptedStep from None

    async def _carry_out(self, agreed: Agreed, *, large: bool) -> Any:
        with CancelScope(shield=True):
            results = await complete(self.lane.carry_out(agreed), self._values)
            return await _call(large, agreed.plan.finish, results)

    async def _fail(self, meeting: Rendezvous, error: Exception) -> None:
        """Let those who wait raise what went wrong; where it may be that a worker is lost, that comes first."""
        if not isinstance(error, (ArithmeticError, ImportError, LookupError, TypeError, ValueError, MemoryError)):
            with anyio.move_on_after(_ENGINE_GRACE_SECONDS, shield=True):
                await self.judged.wait()
        self.group.finish_merge(meeting, None, error)


async def _call(large: bool, fn: Callable[..., Any], *args: Any) -> Any:
    """Return what a function makes of values; where they are large, in a worker thread."""
    return await anyio.to_thread.run_sync(fn, *args) if large else fn(*args)


def _is_on_devices(meeting: Rendezvous) -> bool:
    types = meeting.signature[TYPES]
    return types is not None and has_device_arrays(types)


def _nbytes(value: Any) -> int:
    """Return the size of what a replica brings: a leaf, or a list of leaves."""
    if isinstance(value, list):
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 0))
