"""Carrying: how meetings of local replicas go on to meet those of other workers, one after the other, in a lane.

    local meeting complete ── record ──┬─ agreed: exchange values, complete the meeting
                                       └─ not: tell the coordinator, stop, raise the verdict when it comes

It stops at the first disagreement, at a verdict, and when a worker is lost, which end the strategy. What was agreed on
is carried out before a cancellation, for the others count on it. Where that fails on a worker, it gives the strategy
up. An engine that fails may do so because a worker is lost, and seldom knows it: the control plane is given some time
to say that, and what the engine said becomes the cause of it.

A step is a generator of requests. The arrival that completes a meeting begins it there and then, and asks for fifty
microseconds whether all agree, which they mostly do where the others are as far, and for half a millisecond whether the
values are there; only what takes longer is left to the driving task, for that a task is woken costs more than a small
step does.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from anyio import get_cancelled_exc_class

from aiodist._arrays.leaves import has_device_arrays
from aiodist.collective.member import JOIN
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import KIND, TYPES
from aiodist.replica.awaiting import LONGEST_TURN_SECONDS, Bell, InterruptedStep, next_turn, outlast, until
from aiodist.replica.cargo import Cargo
from aiodist.replica.failing import bring_failure
from aiodist.replica.hands import Hands
from aiodist.replica.lasting_event import LastingEvent
from aiodist.replica.standing_aside import carry_out_without, stand_by, tell_presence
from aiodist.replica.under_way import UnderWay
from aiodist.workers.absence import ENDED
from aiodist.workers.crossing import NOTHING, Plan, Span
from aiodist.workers.lane import Agreed, Disagreement, Lane
from aiodist.workers.record import ALL_FREE, Flag, Notice
from aiodist.workers.transfers import Steps
from aiodist_kernels import Accumulate

if TYPE_CHECKING:
    from aiodist.collective.spanned import SpannedGroup, SpannedPart
    from aiodist.replica.team import Team

_ENGINE_GRACE_SECONDS = 2.0
_OF_THIS_WORKER = (ArithmeticError, ImportError, LookupError, TypeError, ValueError, MemoryError)


class Carrier:
    """Carries the meetings of one group over.

    Args:
        team: the workers.
        lane: the lane of its steps, which nobody else uses meanwhile; None where it is not known yet.
        group: the local replicas.
        span: what kinds need to know of the workers.

    Attributes:
        group, span: those.
        judged: there is a verdict, or a worker is lost.
        moving: all have agreed, and bring values, so that nobody need be waited for any more.
        hands: worker threads.
    """

    judged: LastingEvent

    def __init__(self, team: Team, lane: Lane | None, group: SpannedGroup | SpannedPart, span: Span) -> None:
        self._team = team
        self._lane = lane
        self.group = group
        self.span = span
        self._queue: deque[Rendezvous | None] = deque()
        self._make_bells()
        self.hands = Hands()
        self._step: UnderWay | None = None
        self._at_hand = False  # the driving task waits for a meeting
        self.moving = False

    def _make_bells(self) -> None:
        self._bell = Bell(self._team.call_soon_threadsafe)
        self._values = Bell(self._team.call_soon_threadsafe, for_values=True)

    @property
    def team(self) -> Team:
        """The workers."""
        return self._team

    @property
    def lane(self) -> Lane:
        """The lane."""
        assert self._lane is not None
        return self._lane

    @property
    def on_its_way(self) -> tuple[Rendezvous | None, int] | None:
        """The meeting whose values move, with how much of their way they have come; None where none do."""
        step = self._step if self.moving else None
        return None if step is None else (step.meeting, step.come_to)

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local replicas mean the same."""
        if self._at_hand and self._step is None and not self._queue and not self._bell.interrupts:
            step = UnderWay(meeting, self._carry(meeting, ALL_FREE))
            if step.go(self):
                return
            self._step = step
        else:
            self._queue.append(meeting)
        self._bell.ring()

    def _disagree(self, number: int | None) -> None:
        """Have it told that the workers do not mean the same, once the local replicas have shown what they do.

        Args:
            number: the meeting's; None where there is none, or it is a join.
        """
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
            if self._bell.interrupts and self._step is None:
                return
            step = self._step or self._begin(self._queue.popleft())
            await self._complete(step)
            if step.meeting is None:
                return
            del step  # the meeting, and with it a result, whose memory the next one may have

    def _begin(self, meeting: Rendezvous | None, free: int = ALL_FREE) -> UnderWay:
        return UnderWay(meeting, self._end_well() if meeting is None else self._carry(meeting, free))

    async def _complete(self, step: UnderWay) -> int:
        """Bring a step to its end; return the lanes that all workers have free.

        Raises:
            InterruptedStep: there is trouble, or the run is over.
        """
        self._step = step
        try:
            common = await self._go_on(step)
        except (InterruptedStep, get_cancelled_exc_class(), GeneratorExit):
            raise
        except Disagreement:
            self._step = None
            self._disagree(None if step.meeting is None or step.meeting.number == JOIN else step.meeting.number)
            raise InterruptedStep from None
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for who waits)
            self._step = None
            await self._fail(step.meeting, error)
            return 0
        except BaseException as error:
            self._step = None
            if self.lane.in_exchange:
                self._team.give_up(error)
            raise
        self._step = None
        return common

    async def _go_on(self, step: UnderWay) -> int:
        """Go on with a step; what is agreed on is carried out whoever is cancelled, and who is, is after it."""
        common: int | None = None
        while common is None:
            if self.moving:
                common = await outlast(partial(self._wait_for, step, self._values), self._forget_step)
            else:
                common = await self._wait_for(step, self._bell)
        return common

    def _forget_step(self, common: int | None) -> None:
        if common is not None:
            self._step = None

    async def _wait_for(self, step: UnderWay, bell: Bell) -> int | None:
        """Go on with a step while it is in the same phase; return its result if it ends in it.

        The loop's other tasks run often enough also where nothing need be waited for.
        """
        moving, turn = self.moving, perf_counter()
        while self.moving is moving:
            try:
                request = step.next()
            except StopIteration as end:
                return int(end.value)
            if self.moving is moving:
                try:
                    waited = await until(request, bell)
                    step.request = None
                except InterruptedStep:
                    raise
                except Exception as error:  # noqa: BLE001  (its steps raise it, or another one)
                    step.fail(error)
                    waited = False
                if not waited and perf_counter() - turn > LONGEST_TURN_SECONDS:
                    await next_turn()
                    waited = True
                turn = perf_counter() if waited else turn
        return None

    # Steps.

    def _carry(self, meeting: Rendezvous, free: int) -> Steps[int]:
        """Carry one meeting over; return the lanes that all workers have free.

        Raises:
            Disagreement: the workers do not mean the same.
            InterruptedStep: there is trouble, or the run is over.
            Exception: what went wrong with the values.
        """
        self.moving = False
        if meeting.complete:
            raise InterruptedStep
        if meeting.number == JOIN:
            yield from stand_by(self, meeting)
            return free
        hands, lane = self.hands, self.lane
        cargo: Cargo | None = None
        try:
            if meeting.others is not None:
                meeting.put_in_native_order()
            types = meeting.signature[TYPES]
            if meeting.absent is not None or (types is not None and has_device_arrays(types)):
                cargo = Cargo(meeting, self.group, self.span)
                plan = yield from cargo.landed(meeting.options.accumulate, hands)
            else:
                plan = self._planned(meeting)
            yield from plan.prepared(hands)
            notice = Notice.NONE if meeting.absent is None else Notice.ABSENT
            flags = Flag.FLOAT64 if meeting.options.accumulate == "float64" else Flag.NONE
            agreed = yield from lane.agree(self._team.digests.of(meeting.call), plan, flags, free, notice)
        except Exception as error:
            if not lane.in_exchange:
                yield from bring_failure(self, meeting, error)
            raise
        return (yield from self._carry_on(meeting, cargo, agreed, free))

    def _planned(self, meeting: Rendezvous) -> Plan:
        """Return what is to be exchanged for what the local replicas bring."""
        across = meeting.signature[KIND].across
        if across is None:  # a merge function of the user's makes the result
            return NOTHING
        plan: Plan = across(meeting.signature, meeting.values, meeting.options.accumulate, self.span)
        return plan

    def _carry_on(self, meeting: Rendezvous, cargo: Cargo | None, agreed: Agreed, free: int) -> Steps[int]:
        """Carry a meeting over on which all workers have agreed; return the lanes that all have free."""
        plan, hands, lane = agreed.plan, self.hands, self.lane
        common = agreed.opening.free() if free != ALL_FREE else ALL_FREE
        self.moving = True
        if not agreed.plain and (agreed.other or agreed.notice >= Notice.ABSENT):
            cargo = cargo or Cargo(meeting, self.group, self.span)
            result = yield from self._carry_out_otherwise(cargo, agreed)
        else:
            results = yield from lane.carry_out(agreed, hands)
            lane.in_exchange = False
            result = (yield from plan.finished(results, hands)) if plan.nbytes else plan.finish(results)
        if cargo is not None and meeting.signature[KIND].across is not None:
            result = yield from cargo.launch(result, hands)
        if not meeting.complete:
            self._hand_over(meeting, cargo, result)
        return common

    def _hand_over(self, meeting: Rendezvous, cargo: Cargo | None, result: Any) -> None:
        """Complete a meeting, or let the merge function run that does."""
        if meeting.signature[KIND].across is None:
            self.group.engine.start_merge(self.group, meeting)
            return
        if cargo is None:
            meeting.take_from_afar(result)
        else:
            cargo.hand_over(meeting, result)
        self.group.finish_merge(meeting, meeting.result, None)

    def _carry_out_otherwise(self, cargo: Cargo, agreed: Agreed) -> Steps[Any]:
        """Make a result without replicas that have joined, here or elsewhere, or with the accumulator of worker 0."""
        if agreed.notice >= Notice.ABSENT:
            return (yield from carry_out_without(self, cargo))
        other: Accumulate = "native" if cargo.accumulate == "float64" else "float64"
        agreed = agreed._replace(plan=(yield from cargo.landed(other, self.hands)))
        results = yield from self.lane.carry_out(agreed, self.hands)
        self.lane.in_exchange = False
        return (yield from agreed.plan.finished(results, self.hands))

    async def _fail(self, meeting: Rendezvous | None, error: Exception) -> None:
        """Let those who wait raise what went wrong; where it may be that a worker is lost, that comes first.

        Raises:
            InterruptedStep: other workers may be in the midst of the step.
        """
        if not self.lane.in_exchange:
            if meeting is None:
                raise error
            self.finish_with(meeting, error)
            if self.moving:
                return
        elif isinstance(error, _OF_THIS_WORKER):
            self.finish_with(meeting, error)
        else:
            heard = lambda: self._team.lost is not None or self.judged.is_set()  # noqa: E731
            await outlast(partial(self._bell.wait_until, heard, _ENGINE_GRACE_SECONDS))
            if self._team.lost is None:
                self.finish_with(meeting, error)
        self._team.give_up(error)
        raise InterruptedStep from error

    def fail_at_once(self, meeting: Rendezvous, error: Exception) -> None:
        """Let those who wait in a meeting raise what has failed here, before other workers are met in it."""
        self.finish_with(meeting, error)

    def finish_with(self, meeting: Rendezvous | None, error: BaseException) -> None:
        """Let those who wait in a meeting, where there is one, raise an error."""
        if meeting is not None:
            self.group.finish_merge(meeting, None, error)

    def _meet(self, name: bytes, notice: Notice = Notice.NONE) -> Steps[Agreed]:
        """Agree with the other workers that all have come to an end.

        Raises:
            Disagreement: the others have not; or replicas of theirs have joined, and wait for ours to.
        """
        self.moving = False
        agreed = yield from self.lane.agree(name, notice=notice)
        if agreed.notice >= Notice.ABSENT:
            yield from tell_presence(self, ENDED)
        self.lane.in_exchange = False
        return agreed
