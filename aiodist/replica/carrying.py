"""Carrying: how meetings of local replicas go on to meet those of other workers, one after the other, in a lane.

    local meeting complete ── record ──┬─ agreed: exchange values, complete the meeting
                                       └─ not: tell the coordinator, stop, raise the verdict when it comes

It stops at the first disagreement, at a verdict, and when a worker is lost. **What was agreed on is always carried
out**, whoever is interrupted meanwhile, for the others count on it: a step that was left in the midst of its record is
gone on with once the verdict says that every worker has brought that record, so that all of them see it agreed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio import CancelScope

from aiodist.collective import joining, sameness
from aiodist.collective.device_crossing import Ferry
from aiodist.collective.member import JOIN
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import KIND, TYPES, has_device_arrays
from aiodist.replica.awaiting import Bell, InterruptedStep, Progress, complete, made
from aiodist.workers.absence import Presence, result_of, tell
from aiodist.workers.crossing import Plan, Span
from aiodist.workers.lane import Agreed, Disagreement, FrozenLane, Lane
from aiodist.workers.record import ALL_FREE, Notice
from aiodist.workers.transfers import Steps
from aiodist_kernels import Accumulate, policy

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.replica.team import Team

_ENGINE_GRACE_SECONDS = 2.0
_NOTHING = Plan([], lambda _: None)

Rest = Callable[[Agreed], Awaitable[Any]]


class _Cargo:
    """What is carried over for a meeting, whatever becomes of the meeting itself.

    Args:
        meeting: at which all local replicas mean the same.
        group: the local replicas.
        span: what kinds need to know of the workers.
    """

    def __init__(self, meeting: Rendezvous, group: SyncGroup, span: Span) -> None:
        types = meeting.signature[TYPES]
        self.signature = meeting.signature
        self.values = meeting.values
        self.accumulate = meeting.options.accumulate
        self.absent = meeting.absent
        self.ferry = Ferry(meeting, group, span) if types is not None and has_device_arrays(types) else None
        self.large = policy.blocks(sum(map(_nbytes, meeting.values)))


class Carrier:
    """Carries the meetings of one group over.

    Args:
        team: the workers.
        lane: the lane of its steps, which nobody else uses meanwhile; None where it is not known yet.
        group: the local replicas.
        span: what kinds need to know of the workers.

    Attributes:
        judged: there is a verdict, or a worker is lost.
    """

    judged: anyio.Event

    def __init__(self, team: Team, lane: Lane | None, group: SyncGroup, span: Span) -> None:
        self._team = team
        self._lane = lane
        self.group = group
        self._span = span
        self._queue: deque[Rendezvous | None] = deque()
        self._make_bells()
        self._step: Progress[Agreed] | None = None
        self._rest: Rest | None = None

    def _make_bells(self) -> None:
        self._bell = Bell(self._team.call_soon_threadsafe)
        self._values = Bell(self._team.call_soon_threadsafe, for_values=True)

    @property
    def lane(self) -> Lane:
        """The lane."""
        assert self._lane is not None
        return self._lane

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local replicas mean the same."""
        self._queue.append(meeting)
        self._bell.ring()

    def _disagree(self) -> None:
        """Tell the coordinator that the workers have brought different digests."""
        raise NotImplementedError

    async def _end_well(self) -> None:
        """Meet the other workers when there is nothing more to carry over."""
        raise NotImplementedError

    async def _carry_all(self) -> None:
        while True:
            while not self._queue:
                if self._bell.interrupts:
                    return
                await self._bell.wait()
            meeting = self._queue.popleft()
            if meeting is None:
                await self._end_well()
                return
            await self.carry(meeting)

    async def carry(self, meeting: Rendezvous, free: int = ALL_FREE) -> int:
        """Carry one meeting over; return the lanes that all workers have free.

        Raises:
            InterruptedStep: there is trouble, or the run is over.
        """
        group, kind = self.group, meeting.signature[KIND]
        if meeting.complete:
            raise InterruptedStep
        if meeting.number == JOIN:
            await self._stand_by(meeting)
            return free
        meeting.put_in_native_order()
        cargo = _Cargo(meeting, group, self._span)
        try:
            agreed, result = await self._exchange(meeting, cargo, free)
            common = agreed.opening.free() if free != ALL_FREE else ALL_FREE
            if kind.across is None:
                if not meeting.complete:
                    group.engine.start_merge(group, meeting)
                return common
            await self._take(meeting, cargo, result)
        except InterruptedStep:
            raise
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for those who wait)
            await self._fail(meeting, error)
            return 0
        group.finish_merge(meeting, meeting.result, None)
        return common

    async def _exchange(self, meeting: Rendezvous, cargo: _Cargo, free: int) -> tuple[Agreed, Any]:
        """Agree on a meeting, and make its result of what all workers bring."""
        own, call = cargo.accumulate, meeting.call
        plan = await self._plan(cargo, own)
        wanted = [own]

        def plan_of(accumulate: Accumulate) -> Plan:
            if accumulate == own:
                return plan
            wanted.append(accumulate)
            return _NOTHING  # for now: to make it takes time

        name = self._team.digests.of(call, sameness.fingerprint(self.group.order_check, call))
        notice = Notice.NONE if cargo.absent is None else Notice.ABSENT
        steps = self.lane.agree(name, plan_of, accumulate=own, free=free, notice=notice)

        async def rest(agreed: Agreed) -> Any:
            if agreed.notice >= Notice.ABSENT:
                return await self._carry_out_without(cargo)
            if wanted[-1] != own:
                agreed = agreed._replace(plan=await self._plan(cargo, wanted[-1]))
            return await self._carry_out(cargo, agreed)

        agreed = await self._agree(steps, rest)
        return agreed, await rest(agreed)

    async def _plan(self, cargo: _Cargo, accumulate: Accumulate) -> Plan:
        """Return what is to be exchanged where nobody is absent; what lies on devices is brought down for it."""
        across = cargo.signature[KIND].across
        if across is None or cargo.absent is not None:
            return _NOTHING
        values = cargo.values
        if cargo.ferry is not None:
            with CancelScope(shield=True):
                values = await made(cargo.ferry.landing(accumulate))
        plan: Plan = await _call(cargo.large, across, cargo.signature, values, accumulate, self._span)
        return plan

    async def _take(self, meeting: Rendezvous, cargo: _Cargo, result: Any) -> None:
        """Keep a result where the local replicas want it, if they still do."""
        if meeting.complete:
            return
        if cargo.ferry is None:
            meeting.take_from_afar(result)
            return
        with CancelScope(shield=True):
            found = await made(cargo.ferry.launching(await _call(cargo.large, cargo.ferry.staged, result)))
        if not meeting.complete:
            meeting.by_replica = True
            meeting.take(found)

    async def _agree(self, steps: Steps[Agreed], rest: Rest) -> Agreed:
        """Exchange records; ``rest`` is what follows where all have agreed."""
        self._step, self._rest = Progress(steps), rest
        try:
            agreed = await self._step.complete(self._bell)
        except FrozenLane:
            self._step = None
            raise InterruptedStep from None
        except Disagreement:
            self._step = None
            self._disagree()
            raise InterruptedStep from None
        self._step = None
        return agreed

    async def finish_step(self) -> None:
        """Go on with a step that was left in the midst, which every worker has begun."""
        step, self._step = self._step, None
        if step is None or self._rest is None:
            return
        try:
            await self._rest(await step.complete(self._values))
        except (InterruptedStep, FrozenLane, Disagreement):
            return
        except Exception:  # noqa: BLE001  (who waited for it has been told of something else)
            return

    async def _carry_out(self, cargo: _Cargo, agreed: Agreed) -> Any:
        with CancelScope(shield=True):
            results = await complete(self.lane.carry_out(agreed), self._values)
            return await _call(cargo.large, agreed.plan.finish, results)

    async def _fail(self, meeting: Rendezvous, error: Exception) -> None:
        """Let those who wait raise what went wrong; where it may be that a worker is lost, that comes first."""
        if not isinstance(error, (ArithmeticError, ImportError, LookupError, TypeError, ValueError, MemoryError)):
            with anyio.move_on_after(_ENGINE_GRACE_SECONDS, shield=True):
                await self.judged.wait()
        self.group.finish_merge(meeting, None, error)

    # Where replicas have joined.

    async def _carry_out_without(self, cargo: _Cargo) -> Any:
        """Make a result without the replicas, here or elsewhere, that have joined."""
        kind, absent = cargo.signature[KIND], cargo.absent or ()
        there = [member.position for member in self.group.members if member.position not in absent]
        values: dict[int, Any] = dict.fromkeys(there)
        if kind.shared and kind.across is not None and cargo.ferry is not None:
            with CancelScope(shield=True):
                values = dict(zip(there, await made(cargo.ferry.landing_one_by_one()), strict=True))
        elif kind.shared and kind.across is not None:
            values = {position: cargo.values[position] for position in there}
        own = {self.group.places[position]: value for position, value in values.items()}
        told = await self._tell(Presence(cargo.accumulate, own))
        return await _call(policy.blocks(_nbytes_of(told)), result_of, cargo.signature, told, self._span)

    async def _stand_by(self, meeting: Rendezvous) -> None:
        """Take part in the others' steps with nothing, until all replicas everywhere have joined."""
        group = self.group
        last = group.places[meeting.values[0]]
        own = Presence(group.options.accumulate, joined=(joining.number_of_join(group), last))
        while True:
            await self._agree(self.lane.stand_by(), lambda _: self._tell(own))
            latest = [presence.joined for presence in await self._tell(own)]
            if None not in latest:
                break
        number, replica_id = max(filter(None, latest))
        if not meeting.complete:
            joining.complete(group, meeting, number)
            meeting.take(replica_id)
            group.finish_merge(meeting, replica_id, None)

    async def _tell(self, own: Presence) -> list[Presence]:
        """Return what all workers bring.

        Raises:
            InterruptedStep: the replicas of one have ended, where others have joined.
        """
        with CancelScope(shield=True):
            told = await complete(tell(self.lane, own), self._values)
            if not any(presence.ended for presence in told):
                return told
        self._disagree()
        raise InterruptedStep


async def _call(large: bool, fn: Callable[..., Any], *args: Any) -> Any:
    """Return what a function makes of values; where they are large, in a worker thread."""
    return await anyio.to_thread.run_sync(fn, *args) if large else fn(*args)


def _nbytes_of(told: list[Presence]) -> int:
    return sum(_nbytes(value) for presence in told for value in presence.values.values())


def _nbytes(value: Any) -> int:
    """Return the size of what a replica brings: a leaf, or a list of leaves."""
    if isinstance(value, list):
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 0))
