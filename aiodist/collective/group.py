"""A sync group: the replicas of one run, and the one place that every collective of each of them passes through.

**The rule.** The k-th collective of every replica must be the same one. The first arrival at k sets the signature and
the call site; each later one is compared; the last one completes the meeting. Nothing is compared by clock, and nobody
is taken for the truth.

**Trouble.** An arrival that differs, a replica that ended without a collective that others wait in, and one that was
cancelled out of one, put the group in trouble at that number. From then on no meeting at or behind that number
completes. Replicas that can still make a call (`Member.has_settled`) are let run until none can, or until a tenth of
a second goes by in which none of them settles; then `verdict.judge` looks at what all of them did, so that the verdict
does not depend on who came first. It is set as the error of every open meeting, and the group is closed.

**Failure.** A replica's own exception closes the group at once: it is the cause, and what the others then run into is
an echo.

**Groups of some replicas** (`subgroup`) are sync groups like the run's own, their `root`, each with an order of its
own. What ends a replica ends it in all of them, and the verdict on one closes all: the root keeps the list.

What was rejected: judging at the moment of the second arrival (blames whoever came second); an error queue that each
replica polls (a replica that never calls again never learns); raising from the call instead of the await (the caller
may be building a list of pending handles, and the other waiters need the await in any case).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from types import CodeType
from typing import Any

from aiodist._arrays.options import CommunicationOptions
from aiodist._core.call import OrderCheck
from aiodist._collectives.host import HostExecutor
from aiodist._collectives.work import Work
from aiodist._core.errors import CollectiveError
from aiodist._core.report import ReplicaState
from aiodist.collective import joining, judging, sameness
from aiodist.collective.branches import Branches
from aiodist.collective.brought import OutBuffers
from aiodist.collective.engine import Engine
from aiodist.collective.grace import GRACE_SECONDS, look
from aiodist.collective.kinds import MERGE_CALL
from aiodist.collective.member import Member
from aiodist.collective.observer import Observer
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import KIND, STRUCTURE, Signature
from aiodist_kernels import Accumulate

HISTORY = 256
_NEVER = 1 << 62
_ALWAYS = -1 << 62

Record = tuple[int, Signature, CodeType, int, dict[int, tuple[Signature, CodeType, int]] | None]


class SyncGroup:
    """The replicas of one run, or some of them, and their meetings.

    Args:
        devices: the replicas' devices, one each.
        order_check: what call sites are compared by.
        options: the strategy's, of which the timeout and the accumulator hold for every collective.

    Attributes:
        root: the run's own group, of all its replicas; of that group itself, it is the group.
        branches: in the run's own group, the run's other groups; None as long as there is none.
        making: groups of some of its members that not all of those have made yet.
        places: by position, the replicas' ids as contexts have them: those of other workers count, too.
        serial: when it was made, among the groups of a run.
        let_go: ids of those that cannot call anything more in it, though they run, as they have let its contexts go.
    """

    serial = offset = 0
    bridge: Any = None  # to the replicas of other workers, counted in world_size; see `spanned`
    let_go: frozenset[int] = frozenset()
    unmet: tuple[Rendezvous, ...] = ()  # meetings that a verdict, or a replica's failure, ended
    failed: Rendezvous | None = None  # one that failed here, which may not have failed on other workers

    def __init__(self, devices: Sequence[str], order_check: OrderCheck, options: CommunicationOptions) -> None:
        self.size = self.world_size = len(devices)
        self.places: Sequence[int] = range(self.size)
        self.members = [Member(position, device, self) for position, device in enumerate(devices)]
        self.root = self
        self.branches: Branches | None = None
        self.making: dict[Any, Any] = {}
        self.order_check, self.options = order_check, options
        self._has_options, self.paths = options != CommunicationOptions(), order_check is OrderCheck.CALL_PATH
        self.thread, self.closed = 0, False
        self.open: dict[int, Rendezvous] = {}
        self.agreed: deque[Record] = deque(maxlen=HISTORY)
        self._checked: Any = None  # the latest signature: mostly the next one asks for the same
        self._executors: dict[Accumulate, HostExecutor] = {}  # what carries that out
        self.trouble: int | None = None
        self.verdict: CollectiveError | None = None
        self._ended_at = _NEVER
        self._unsettled: set[int] | None = None
        self._fewest_unsettled = self.size + 1
        self._grace_ends: float | None = None
        self._alarm: float | None = None
        self.engine: Any = None
        self.observer: Observer | None = None

    def attach(self, engine: Engine, thread: int) -> None:
        """Bind the group to the event loop, and the thread, in which its replicas run."""
        self.engine, self.thread = engine, thread
        self._handle, self._clock, self._wakes_at_once = engine.handle, engine.clock, engine.wakes_at_once

    @property
    def label(self) -> str | None:
        """What reports call it; None for the run's own group, of which they need not speak."""
        return None

    def keep(self) -> None:
        """Last as long as the run does, whoever lets go of it."""

    def replica_id_of(self, place: int) -> int:
        """Return the id in the run of the replica that has that id here."""
        return place

    def now(self) -> int:
        """Return the time on the event loop's clock, in nanoseconds."""
        return int(self.engine.fine_clock() * 1e9)

    # The way of a collective that goes well.

    def arrive(
        self,
        member: Member,
        signature: Signature,
        code: CodeType,
        offset: int,
        value: Any,
        options: CommunicationOptions | None = None,
        out: OutBuffers | None = None,
    ) -> Any:
        """Let a replica issue its next collective.

        Args:
            member: the replica.
            signature: what it asks for.
            code: its caller's code, with
            offset: the offset of the call in it.
            value: what it brings: a leaf, or a list of leaves for a nest.
            options: for this call, over the group's.
            out: the caller's own buffers for the result.

        Returns:
            The handle to await.

        Raises:
            TypeError, ValueError: the arguments are wrong in themselves. Nothing has changed then.
        """
        number = member.sequence
        meeting = self.open.get(number)
        if meeting is None:
            if signature != self._checked:
                signature[KIND].check(signature, self.world_size)
                self._checked, self._executors = signature, {}
            else:
                signature = self._checked
            if self._has_options or number >= self._ended_at:
                meeting = self._begin(number, signature, code, offset)
            else:
                meeting = Rendezvous(number, signature, code, offset, self.size, self._clock())
                self.open[number] = meeting
        elif offset != meeting.offset or code is not meeting.code or signature != meeting.signature:
            self._compare(member, meeting, signature, code, offset)
        if options is not None:
            self._apply(options, meeting, member)
        if out is not None:
            meeting.outs = {**(meeting.outs or {}), member.position: out}
        member.sequence = number + 1
        meeting.values[member.position] = value
        meeting.missing -= 1
        handle = self._handle(meeting, member, signature[STRUCTURE])
        if self.observer is not None:
            self.observer.arrived(member, meeting)
        if self.trouble is not None:
            self._arrive_in_trouble(member, meeting)
        elif not meeting.missing:
            self._agree(meeting, member.position)
        return handle

    def _begin(self, number: int, signature: Signature, code: CodeType, offset: int) -> Rendezvous:
        meeting = self.open[number] = Rendezvous(number, signature, code, offset, self.size, self._clock())
        if self._has_options:
            meeting.options = self.options
            if self.options.timeout_seconds is not None:
                self._limit(meeting, self.options.timeout_seconds)
        if number >= self._ended_at:
            joining.begin_without(self, meeting)
        return meeting

    def _apply(self, options: CommunicationOptions, meeting: Rendezvous, member: Member) -> None:
        if options.timeout_seconds is not None:
            self._limit(meeting, options.timeout_seconds)
        if member.position == 0:
            meeting.options = meeting.options.merge(options)

    def _limit(self, meeting: Rendezvous, seconds: float) -> None:
        deadline = meeting.started + seconds
        if meeting.deadline is None or deadline < meeting.deadline:
            meeting.deadline = deadline
            self._set_alarm(deadline)

    def _agree(self, meeting: Rendezvous, last: int) -> None:
        """Complete a meeting whose last replica has arrived: all of them mean the same."""
        meeting.agreed = True
        signature = meeting.signature
        self.agreed.append((meeting.number, signature, meeting.code, meeting.offset, meeting.others))
        if signature[KIND] is MERGE_CALL and meeting.absent is None:
            self.engine.start_merge(self, meeting)
            return
        try:
            work = self._combine(meeting)
            if work is not None:
                self._carry_out(meeting, work)
                return
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for those who wait)
            meeting.fail(error)
        meeting.last = last
        meeting.complete = True
        del meeting.values
        del self.open[meeting.number]
        if self.observer is not None:
            self.observer.completed(self, meeting)
        if last == self.size - 1 < self._wakes_at_once:
            meeting.released = True
            self.engine.wake(meeting.waiters)
        else:  # it takes its place among the others when it awaits, which it normally does in this very step
            self.engine.call_soon(partial(self.release, meeting))

    def _combine(self, meeting: Rendezvous) -> Work | None:
        if meeting.signature is not self._checked or meeting.absent is not None:
            return meeting.combine(self.members)
        executor = self._executors.get(meeting.options.accumulate)
        if executor is None and meeting.is_of_host():
            executor = self._executors[meeting.options.accumulate] = meeting.executor()
        return meeting.combine(self.members, executor)

    def _carry_out(self, meeting: Rendezvous, work: Work) -> None:
        """Let worker threads make the result. Nobody is missing: the meeting can be neither late nor abandoned."""
        meeting.under_way = True
        meeting.deadline = None
        self.engine.carry_out(work, partial(self.finish_work, meeting))

    def finish_work(self, meeting: Rendezvous, result: Any, error: BaseException | None) -> None:
        """Complete a meeting with what worker threads have made."""
        meeting.under_way = False
        if error is None:
            meeting.take(result)
        else:
            meeting.fail(error)
        self._complete(meeting)
        self.release(meeting)

    def _complete(self, meeting: Rendezvous) -> None:
        meeting.complete = True
        meeting.values = []  # a merge function whose task has not begun finds nothing to merge, and does not run
        del self.open[meeting.number]
        if self.observer is not None:
            self.observer.completed(self, meeting)

    def release(self, meeting: Rendezvous) -> None:
        """Wake those who wait in a complete meeting, in replica order; from now on nobody need wait in it."""
        if not meeting.released:
            meeting.released = True
            self.engine.wake_in_turns(meeting.waiters)

    def finish_merge(self, meeting: Rendezvous, result: Any, error: BaseException | None) -> None:
        """Complete a merge_call with what its merge function gave for each replica, or raised.

        One that a replica has abandoned stays open until the verdict, unless there is an error and someone to raise it.
        """
        abandoned = self.trouble is not None and meeting.number >= self.trouble and not self.closed
        if abandoned and (error is None or not meeting.has_waiters()):
            return
        if not meeting.complete:
            meeting.result = result
            if error is not None:
                meeting.fail(error)
            self._complete(meeting)
            self.release(meeting)

    # Trouble.

    def _compare(self, member: Member, meeting: Rendezvous, signature: Signature, code: CodeType, offset: int) -> None:
        """Compare the meaning of an arrival that is not literally the first one's."""
        difference = sameness.difference(self.order_check, (signature, code, offset), meeting.call)
        if difference is not None:
            signature[KIND].check(signature, self.world_size)
            self._set_trouble(meeting.number)
        meeting.add_other(member.replica_id, signature, code, offset)

    def _set_trouble(self, number: int) -> None:
        if self.trouble is None or number < self.trouble:
            self.trouble = number
            self._unsettled = None

    def _arrive_in_trouble(self, member: Member, meeting: Rendezvous) -> None:
        """Let a replica arrive where others are at odds."""
        assert self.trouble is not None
        if self.closed:
            self._fail(meeting, self.verdict or judging.echo(self, meeting))
            return
        if not meeting.missing and meeting.number < self.trouble:
            self._agree(meeting, member.position)
        self.consider(member)

    def abandon(self, member: Member, meeting: Rendezvous) -> None:
        """Note that a replica was cancelled out of the await of a meeting."""
        if meeting.complete or meeting.under_way or self.closed:
            return
        member.abandon(meeting.number)
        self._set_trouble(meeting.number)
        self.consider(member)

    def end(self, member: Member, state: ReplicaState, error: BaseException | None = None) -> None:
        """Note that a replica's function has ended, how, and with what failure of its own: in all groups of the run."""
        member.end = state
        if self.observer is not None:
            self.observer.ended(member, error)
        self._end(member, state)
        for part in tuple(member.parts or ()):
            part.group._end(part, state)

    def _end(self, member: Member, state: ReplicaState) -> None:
        member.end = state
        self._ended_at = min(self._ended_at, member.sequence)
        if self.closed:
            return
        unmet = [number for number in self.open if number >= member.sequence]
        if unmet:
            self._set_trouble(min(unmet))
        self.consider(member)

    def consider(self, member: Member) -> None:
        """Look whether the trouble can be judged, now that this member has done something."""
        if self.trouble is None or self.closed:
            return
        if self._unsettled is None:
            self._unsettled = {m.position for m in self.members if not m.has_settled(self.trouble)}
        elif member.has_settled(self.trouble):
            self._unsettled.discard(member.position)
        else:
            self._unsettled.add(member.position)
        if not self._unsettled:
            self._decide()
        elif len(self._unsettled) < self._fewest_unsettled:
            self._fewest_unsettled = len(self._unsettled)
            self._grace_ends = self._clock() + GRACE_SECONDS
            self._set_alarm(self._grace_ends)

    def _decide(self, overdue: Rendezvous | None = None) -> None:
        if all(member.end is not None for member in self.members):
            return  # nobody is left to be told: `conclude` judges, if it comes to that
        self.root.give_up(judging.judge(self, overdue))

    def give_up(self, error: CollectiveError) -> None:
        """End the run with a verdict on it, also one found outside, where it is seen that nobody can go on."""
        self._note(error)
        self.close()

    def _note(self, error: CollectiveError) -> None:
        self.verdict = error
        if self.observer is not None:
            self.observer.judged(self, error)

    def conclude(self) -> CollectiveError | None:
        """Return the verdict, once all replicas have ended; None when there was no trouble, in any group of the run."""
        for group in self.groups():
            if self.verdict is None and group.trouble is not None and not self.closed:
                self._note(judging.judge(group))
        return self.verdict

    def groups(self) -> list[SyncGroup]:
        """Return every group of the run, its own first, in the order in which they were made."""
        return [self] if self.branches is None else [self, *self.branches.in_order()]

    def close(self) -> None:
        """End the run's groups: nothing completes any more, who waits gets the verdict, the others are cancelled."""
        for group in self.groups():
            group._shut(self.verdict)
        self.engine.cancel()

    def _shut(self, error: CollectiveError | None) -> None:
        self.closed = True
        self.verdict = error
        self.trouble = _ALWAYS
        if error is not None:
            for number in sorted(self.open):
                if not self.open[number].under_way:
                    self._fail(self.open[number], error)

    def _fail(self, meeting: Rendezvous, error: BaseException) -> None:
        meeting.fail(error)
        self._complete(meeting)
        meeting.released = True
        self.unmet += (meeting,)
        self.engine.wake_failed(meeting.waiters)

    def _set_alarm(self, at: float) -> None:
        if not self.closed and (self._alarm is None or at < self._alarm):
            self._alarm = at
            self.engine.alarm(at)

    def ring(self) -> None:
        """Look what is overdue in the run's groups: the end of the grace, or a meeting's own deadline."""
        self._alarm = None
        for group in self.groups():
            look(group, self._clock())
        if self.branches is not None:
            self.branches.watch.ring(self._clock())
