"""Carrying: how meetings of local replicas go on to meet those of other workers, one after the other, in a lane.

    local meeting complete ── record ──┬─ agreed: exchange values, complete the meeting
                                       └─ not: tell the coordinator, stop, raise the verdict when it comes

It stops at the first disagreement, at a verdict, and when a worker is lost. **What was agreed on is always carried
out**, whoever is interrupted meanwhile, for the others count on it: a step that was left in the midst of its record is
gone on with once the verdict says that every worker has brought that record, so that all of them see it agreed.

A step is a generator of requests. The arrival that completes a meeting begins it there and then, and asks for some ten
microseconds whether all agree, which they mostly do where the others are as far, and for half a millisecond whether the
values are there; only what takes longer is left to the driving task, for that a task is woken costs more than a small
step does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import anyio
from anyio import CancelScope

from aiodist.collective import joining
from aiodist.collective.member import JOIN
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import KIND
from aiodist.replica.awaiting import LONGEST_TURN_SECONDS, Bell, InterruptedStep, next_turn, until
from aiodist.replica.cargo import Cargo, nbytes_of
from aiodist.replica.hands import Hands
from aiodist.replica.under_way import UnderWay
from aiodist.workers.absence import ENDED, Presence, result_of, tell
from aiodist.workers.crossing import Plan, Span
from aiodist.workers.lane import Agreed, Disagreement, FrozenLane, Lane
from aiodist.workers.record import ALL_FREE, Notice
from aiodist.workers.transfers import Steps, by_hand
from aiodist_kernels import Accumulate, policy

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.replica.team import Team
    from aiodist.workers.nccl_plane import Use

_ENGINE_GRACE_SECONDS = 2.0


class When:
    """A request that is complete when something is so; whoever makes it so rings the bell.

    Args:
        condition: returns whether it is.
    """

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.test = condition

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Do nothing: the bell is rung."""


class Carrier:
    """Carries the meetings of one group over.

    Args:
        team: the workers.
        lane: the lane of its steps, which nobody else uses meanwhile; None where it is not known yet.
        group: the local replicas.
        span: what kinds need to know of the workers.

    Attributes:
        judged: there is a verdict, or a worker is lost.
        use: the run's use of NCCL; None where it has none.
    """

    judged: anyio.Event

    def __init__(self, team: Team, lane: Lane | None, group: SyncGroup, span: Span) -> None:
        self._team = team
        self._lane = lane
        self.group = group
        self._span = span
        self._queue: deque[Rendezvous | None] = deque()
        self._make_bells()
        self._hands = Hands()
        self._step: UnderWay | None = None
        self._at_hand = False  # the driving task waits for a meeting
        self._moving = False  # all have agreed, and bring values
        self.use: Use | None = None

    def _make_bells(self) -> None:
        self._bell = Bell(self._team.call_soon_threadsafe)
        self._values = Bell(self._team.call_soon_threadsafe, for_values=True)

    @property
    def lane(self) -> Lane:
        """The lane."""
        assert self._lane is not None
        return self._lane

    @property
    def alongside(self) -> bool:
        """Whether values move together with their records."""
        return self._span.alongside

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local replicas mean the same."""
        if self._at_hand and self._step is None and not self._queue and not self._bell.interrupts:
            step = UnderWay(meeting, self._carry(meeting, ALL_FREE))
            if step.go(lambda: self._moving):
                return
            self._step = step
        else:
            self._queue.append(meeting)
        self._bell.ring()

    def _disagree(self) -> None:
        """Tell the coordinator that the workers have brought different digests."""
        raise NotImplementedError

    def _end_well(self) -> Steps[int]:
        """Meet the other workers when there is nothing more to carry over."""
        raise NotImplementedError

    # Driving.

    async def _carry_all(self) -> None:
        while True:
            self._at_hand = True
            while not self._queue and self._step is None:
                if self._bell.interrupts:
                    return
                await self._bell.wait()
            self._at_hand = False
            step = self._step or self._begin(self._queue.popleft())
            await self._complete(step)
            if step.meeting is None:
                return

    def _begin(self, meeting: Rendezvous | None, free: int = ALL_FREE) -> UnderWay:
        return UnderWay(meeting, self._end_well() if meeting is None else self._carry(meeting, free))

    async def _complete(self, step: UnderWay) -> int:
        """Bring a step to its end; return the lanes that all workers have free.

        Raises:
            InterruptedStep: there is trouble, or the run is over; the step can be gone on with.
        """
        self._step = step
        try:
            common = await self._go_on(step)
        except InterruptedStep:
            raise
        except FrozenLane:
            self._step = None
            raise InterruptedStep from None
        except Disagreement:
            self._step = None
            self._disagree()
            raise InterruptedStep from None
        except Exception as error:
            self._step = None
            if step.meeting is None:
                raise
            await self._fail(step.meeting, error)
            return 0
        self._step = None
        return common

    async def _go_on(self, step: UnderWay) -> int:
        """Go on with a step; what is agreed on is carried out whoever is cancelled."""
        common: int | None = None
        while common is None:
            if self._moving:
                with CancelScope(shield=True):
                    common = await self._wait_for(step, self._values)
            else:
                common = await self._wait_for(step, self._bell)
        return common

    async def _wait_for(self, step: UnderWay, bell: Bell) -> int | None:
        """Go on with a step while it is in the same phase; return its result if it ends in it.

        The loop's other tasks run often enough also where nothing need be waited for.
        """
        moving, turn = self._moving, perf_counter()
        while self._moving is moving:
            try:
                request = step.next()
            except StopIteration as end:
                return int(end.value)
            if self._moving is moving:
                waited = await until(request, bell)
                step.request = None
                if not waited and perf_counter() - turn > LONGEST_TURN_SECONDS:
                    await next_turn()
                    waited = True
                turn = perf_counter() if waited else turn
        return None

    async def finish_step(self) -> None:
        """Go on with a step that was left in the midst, which every worker has begun."""
        step = self._step
        if step is not None and not isinstance(step.request, When):
            with suppress(Exception):  # who waited for it has been told of something else
                while await self._wait_for(step, self._values) is None:
                    pass
        self._step = None

    # Steps.

    def _carry(self, meeting: Rendezvous, free: int) -> Steps[int]:
        """Carry one meeting over; return the lanes that all workers have free.

        Raises:
            Disagreement: the workers do not mean the same.
            FrozenLane: this worker has told of the lane already.
            InterruptedStep: there is trouble, or the run is over.
            Exception: what went wrong with the values.
        """
        group, kind = self.group, meeting.signature[KIND]
        self._moving = False
        if meeting.complete:
            raise InterruptedStep
        if meeting.number == JOIN:
            yield from self._stand_by(meeting)
            return free
        meeting.put_in_native_order()
        cargo = Cargo(meeting, group, self._span, self.use)
        own, wanted = cargo.accumulate, cargo.accumulate

        def plan_of(accumulate: Accumulate) -> Plan:
            nonlocal wanted
            wanted = accumulate
            return plan if accumulate == own else cargo.plan(accumulate)

        name = self._team.digests.of(meeting.call)
        yield from cargo.land(own, self._hands)
        plan = cargo.plan(own)
        yield from plan.prepared(self._hands)
        notice = Notice.NONE if cargo.absent is None else Notice.ABSENT
        alongside = self._hands if self.alongside and notice is Notice.NONE else None
        agreed = yield from self.lane.agree(
            name, plan_of, accumulate=own, free=free, notice=notice, alongside=alongside
        )
        common = agreed.opening.free() if free != ALL_FREE else ALL_FREE
        self._moving = True
        if agreed.notice >= Notice.ABSENT:
            cargo.stay()
            result = yield from self._carry_out_without(cargo)
        else:
            if wanted != own and cargo.ferry is not None:
                yield from cargo.land(wanted, self._hands)
                agreed = agreed._replace(plan=cargo.plan(wanted))
            results = yield from self.lane.carry_out(agreed, self._hands)
            result = yield from agreed.plan.finished(results, self._hands)
            yield from cargo.fly(wanted, self._hands)
        if kind.across is None:
            if not meeting.complete:
                group.engine.start_merge(group, meeting)
            return common
        result = yield from cargo.launch(result, self._hands)
        if not meeting.complete:
            cargo.hand_over(meeting, result)
            group.finish_merge(meeting, meeting.result, None)
        return common

    async def _fail(self, meeting: Rendezvous, error: Exception) -> None:
        """Let those who wait raise what went wrong; where it may be that a worker is lost, that comes first."""
        if not isinstance(error, (ArithmeticError, ImportError, LookupError, TypeError, ValueError, MemoryError)):
            with anyio.move_on_after(_ENGINE_GRACE_SECONDS, shield=True):
                await self.judged.wait()
        self.group.finish_merge(meeting, None, error)

    def _meet(self, name: bytes, notice: Notice = Notice.NONE) -> Steps[Agreed]:
        """Agree with the other workers that all have come to an end.

        Raises:
            Disagreement: the others have not; or replicas of theirs have joined, and wait for ours to.
        """
        self._moving = False
        agreed = yield from self.lane.agree(name, lambda _: Plan([], lambda _: None), notice=notice)
        if agreed.notice >= Notice.ABSENT:
            yield from self._tell(ENDED)
        return agreed

    # Where replicas have joined.

    def _carry_out_without(self, cargo: Cargo) -> Steps[Any]:
        """Make a result without the replicas, here or elsewhere, that have joined."""
        signature, places = cargo.signature, self.group.places
        values = yield from cargo.one_by_one(self._hands)
        own = {places[position]: value for position, value in values.items()}
        told = yield from self._tell(Presence(cargo.accumulate, own))
        if policy.blocks(_nbytes_of(told)):
            return (yield from by_hand(self._hands, result_of, signature, told, self._span))
        return result_of(signature, told, self._span)

    def _stand_by(self, meeting: Rendezvous) -> Steps[None]:
        """Take part in the others' steps with nothing, until all replicas everywhere have joined."""
        group = self.group
        last = group.places[meeting.values[0]]
        own = Presence(group.options.accumulate, joined=(joining.number_of_join(group), last))
        while True:
            self._moving = False
            yield from self.lane.stand_by()
            latest = [presence.joined for presence in (yield from self._tell(own))]
            if None not in latest:
                break
        number, replica_id = max(filter(None, latest))
        if not meeting.complete:
            joining.complete(group, meeting, number)
            meeting.take(replica_id)
            group.finish_merge(meeting, replica_id, None)

    def _tell(self, own: Presence) -> Steps[list[Presence]]:
        """Return what all workers bring.

        Raises:
            Disagreement: the replicas of one have ended, where others have joined.
        """
        self._moving = True
        told = yield from tell(self.lane, own, self._hands)
        if any(presence.ended for presence in told):
            raise Disagreement
        return told


def _nbytes_of(told: list[Presence]) -> int:
    return sum(nbytes_of(value) for presence in told for value in presence.values.values())
