"""The scheduler: runs one function call on each replica of a strategy, and carries collectives to their end.

    run_replicas
     └─ task group ── replica 0, replica 1, …        one task each, started in replica order
                   └─ merge functions                one at a time, each in a task of its own

A `Run` has a `Ledger`, which decides what happens, and the event loop, in which it happens. A matched collective is
computed, and the replicas that wait for it are woken in replica order. One that can never be matched is analysed, and
the report is raised.

**Trouble.** When a group of the ledger is doomed, replicas that can still make a call keep running until all have
settled, or until none of them has settled for a tenth of a second. The whole process may not have run in that time, on
a busy machine; so a few turns of the loop follow, in which tasks that are ready run. Then the snapshot is analysed, and
the error is raised in all replicas that wait.

**Failure.** A replica's own exception closes the run at once: it is the cause, and what the others then raise is an
echo. A replica's function ends in one of four ways: it returned; it raised (its own failure, which closes the run and
cancels the others); it raised the run's error, or an echo of another's failure; it was cancelled. None of these leaves
the task as an exception, so the task group never decides what is raised; when all have ended, `outcome` does. A
cancellation of the caller passes through the task group unchanged.

**Deadlocks.** In a run with groups, each await of an open collective requests a check, which happens once nobody else
has begun to wait for one turn of the loop. Replicas that wait for each other, each in another group, are stuck for ever
if none of their tasks can run, and none of their timers is pending (if the loop does not show its timers, a second
without progress takes the place of that). While this is undecided, the check is repeated, for at most a fiftieth of the
time.

What was rejected: an error queue that each replica polls (a replica that never calls again never learns); raising from
the call instead of the await (the caller may be building a list of pending handles, and the other waiters need the
await in any case).
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

from anyio import create_task_group, get_cancelled_exc_class
from anyio.lowlevel import checkpoint_if_cancelled

from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import check_awaited
from aiodist._collectives import kinds
from aiodist._collectives.work import Work
from aiodist._core.call import Call as PlainCall
from aiodist._core.call import OrderCheck, place
from aiodist._core.errors import CollectiveError, IncompleteCollectiveError
from aiodist._core.instrument import Observer, current_observer
from aiodist._core.ledger import Group, Ledger, Member, Path
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import Overdue, ReplicaFacts, Snapshot
from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.text import ids
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import current
from aiodist._runtime.handle import CollectiveHandle, fill_in
from aiodist._runtime.loop import AsyncioLoop, SoloLoop, TrioLoop, new_loop
from aiodist._runtime.merge import merge
from aiodist._runtime.outcome import (
    error_of_run,
    interrupt_in,
    is_only,
    note_of_failure,
    origin_of,
    without_cancellations,
    without_frames_of_ours,
)
from aiodist._runtime.participant import ANY_THREAD, NO_RUN, Participant
from aiodist._runtime.rendezvous import Extras, Rendezvous
from aiodist._runtime.requests import Request
from aiodist._runtime.stacks import (
    all_callers,
    await_chain,
    drives_tasks,
    is_plumbing,
    lines_here,
    nearest_callers,
    other_threads_can_be_looked_at,
    program_frame,
)
from aiodist._runtime.stall import PROOF_SECONDS, StallWatch, watch_here
from aiodist._runtime.threads import DeviceThreads, ReductionThreads

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

_SETTLE_SECONDS = 0.1
_TURNS = 8
_PAUSE_SECONDS = 0.1
_PAUSE_PER_LOOK = 50
_LONGEST_VALUE = 40
_PASSED = -math.inf
_JOIN = PlainCall("join")


class Span(Protocol):
    """What a run needs of several workers, implemented by `_workers` and handed to the run by the strategy.

    It carries matched collectives to other workers, and trouble once the local replicas have settled.
    """

    def matched(self, slot: Rendezvous) -> None:
        """Agree with other workers on a slot that local members have posted, exchange values, and complete it."""

    def made(self, group: Group) -> None:
        """Hear about a group that local replicas make and that has members on other workers."""

    def troubled(self, group: Group, overdue: Overdue | None) -> None:
        """Have all workers' snapshots analysed, because a group is doomed and its local members have settled."""

    def stuck(self, replica_ids: Collection[int]) -> None:
        """Hear which local replicas only wait in collectives."""

    async def finish(self, failures: Mapping[int, BaseException]) -> None:
        """Meet the other workers at the end of the run, with the local replicas' own failures by id."""


@dataclass(slots=True, eq=False)
class _State:
    """What a run knows about one replica apart from its collectives."""

    awaitable: Any = None  # its function's coroutine, while that is under way
    returned: tuple[Any, FrameType | None] | None = None  # with the frame that it returned from, where that is known
    cancelled_in: tuple[tuple[str, int], ...] = ()  # out of a collective: files and lines, innermost first
    cancelled_by: str = ""  # why, where that is known
    raised: bool = False  # the error that ended the run has been raised in it


@dataclass(slots=True, eq=False)
class _Trouble:
    """A doomed group before its analysis: the fewest members that had not settled so far, and how long to wait."""

    fewest: int | None = None
    until: float | None = None


class Run:
    """One run of a strategy on this process's replicas.

    Args:
        strategy: the strategy that the replicas belong to.
        devices: the replicas' devices, in canonical form.
        order_check: how call sites are compared.
        options: the strategy's, overridden by the run's own.
        first: the id of the first replica.
        total: how many replicas there are over all workers; None for these alone.
    """

    def __init__(
        self,
        strategy: Any,
        devices: Sequence[str],
        order_check: OrderCheck,
        options: CommunicationOptions,
        *,
        first: int = 0,
        total: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.devices = tuple(devices)
        self.options = options
        self.first = first
        self.ledger = Ledger(range(first, first + len(devices)), order_check, total=total, slot_type=Rendezvous)
        self.callers = all_callers if order_check is OrderCheck.CALL_PATH else nearest_callers
        self.closed = False  # nothing completes any more: the run has failed
        self.over = False  # all its tasks have ended, be it that some never began
        self.error: CollectiveError | None = None  # what the order check found
        self.loop: Any = None
        self.handle: type[CollectiveHandle[Any]] = CollectiveHandle
        self.threads: Any = None  # make results that would hold up the loop
        self.thread = 0  # the loop's
        self.has_groups = False  # beside the run's own
        self.called_from: FrameType | None = None  # while a replica's function is called: who awaits the run
        self.span: Span | None = None  # carries matched collectives to other workers; None where there are none
        self.observer: Observer | None = None
        self.has_options = options != CommunicationOptions()
        self._states = [_State() for _ in devices]
        self._echo: CollectiveError | None = None
        self._troubles: dict[Group, _Trouble] = {}
        self._alarm: float | None = None
        self._blocks = 0
        self._looking = self._looks_again = False
        self._not_before = 0.0
        self._quiet: tuple[tuple[int, ...], float] | None = None
        self._cycle_until: float | None = None

    def attach(self, loop: AsyncioLoop | TrioLoop | SoloLoop, threads: Any, thread: int) -> None:
        """Bind the run to the event loop, and the thread, in which its replicas run."""
        self.loop, self.threads, self.thread = loop, threads, thread
        self.handle = loop.handle
        self.now = loop.clock  # tells the time
        self._wake = loop.wake
        self._wakes_later = loop.wakes_later
        for group in list(self.ledger.troubled):  # another worker was in trouble before this one began
            self.reconsider(group)

    def observe(self, observer: Observer, handle: type[CollectiveHandle[Any]]) -> None:
        """Notify an observer of what happens, with handles that notify it of awaits."""
        self.observer = observer
        self.handle = handle

    @property
    def clock(self) -> Callable[[], float]:
        """The time in seconds."""
        clock: Callable[[], float] = self.loop.clock
        return clock

    @property
    def ending(self) -> bool:
        """Whether the run has failed, or the run or the running task is being cancelled."""
        return self.closed or bool(self.loop.ending)

    def state_of(self, member: Member) -> _State:
        """Return what is known of a replica."""
        return self._states[member.replica_id - self.first]

    def device_of(self, replica_id: int) -> str:
        """Return a replica's device."""
        return self.devices[replica_id - self.first]

    def devices_of(self, group: Group) -> tuple[str, ...]:
        """Return the devices of a group's members, by position."""
        return tuple(self.device_of(member.replica_id) for member in group.members)

    # The way of a collective that goes well.

    def begin(self, slot: Rendezvous) -> None:
        """Note the run's options for a collective."""
        slot.options = self.options
        if self.options.timeout_seconds is not None:
            self._limit(slot, self.options.timeout_seconds)

    def add(self, slot: Rendezvous, position: int, extras: Extras) -> None:
        """Record the options and the buffers of one post."""
        options, out = extras.options, extras.out
        if options is not None:
            if options.timeout_seconds is not None:
                self._limit(slot, options.timeout_seconds)
            if position == 0:
                slot.options = slot.options.merge(options)
        if out is not None:
            slot.outs = {**(slot.outs or {}), position: out}

    def _limit(self, slot: Rendezvous, seconds: float) -> None:
        deadline = slot.started + seconds
        if slot.deadline is None or deadline < slot.deadline:
            slot.deadline = deadline
            self._ring_by(deadline)

    def carry_out(self, slot: Rendezvous, last: int) -> None:
        """Carry out a collective that all replicas of this process have posted alike."""
        group = slot.group
        if self.span is not None and group.size != len(group.members):  # and `_spans`, written out
            self.span.matched(slot)
            return
        if slot.request.kind is kinds.MERGE_CALL and not slot.absent:
            self.start_merge(slot)
            return
        try:
            work = slot.compute(self.devices_of)
            if work is not None:
                slot.under_way = True
                slot.deadline = None  # nobody is missing: it can be neither late nor abandoned
                self.threads.carry_out(work, partial(self.complete, slot))
                return
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for those who wait)
            slot.fail(error)
        slot.last = last
        self._complete(slot)
        # The last to arrive takes its place among the others when it awaits, which it normally does in this very step.
        if self._wakes_later or last == len(slot.waiters) - 1:
            self._wake(slot)
        else:
            self.loop.call_soon(partial(self.release, slot))

    def _spans(self, group: Group) -> bool:
        """Return whether a group has members on other workers, so that the span carries out its collectives."""
        return self.span is not None and group.size != len(group.members)

    def complete(self, slot: Rendezvous, result: Any, error: BaseException | None) -> None:
        """Complete a collective with its result (for all, or by position) or its error; wake the waiting replicas."""
        slot.under_way = False
        if slot.complete:
            return
        if error is None:
            slot.take(result, shared=slot.shared)
        else:
            slot.fail(error)
        self._complete(slot)
        self.release(slot)

    def _complete(self, slot: Rendezvous) -> None:
        slot.values = []  # a merge function whose task has not begun finds nothing to merge, and does not run
        slot.group.complete(slot)
        if self.observer is not None:
            self.observer.completed(slot)

    def release(self, slot: Rendezvous) -> None:
        """Wake the replicas that wait in a complete collective, in replica order; nobody waits in it afterwards."""
        if not slot.released:
            self._wake(slot)

    # merge_call and join.

    def start_merge(self, slot: Rendezvous) -> None:
        """Run the merge function of a matched slot in a task of its own, with replica 0's context variables."""
        self.loop.start_task(slot.values[0].context, merge, self.strategy, self.finish_merge, slot)

    def finish_merge(self, slot: Rendezvous, results: list[Any] | None, error: BaseException | None) -> None:
        """Complete a merge_call with its merge function's result for each replica, or its exception.

        If a replica has abandoned it, it stays open until the report, unless there is an exception to raise in others.
        """
        group = slot.group
        abandoned = group.doomed is not None and slot.number >= group.doomed and not self.closed
        if abandoned and (error is None or not slot.has_waiters()):
            return
        slot.shared = False
        self.complete(slot, results, error)

    def join(self, me: Participant, code: Any, offset: int) -> CollectiveHandle[Any]:
        """Let a replica join; return the handle to await."""
        member = me.member
        group = member.group
        matched = group.join(member, _JOIN, code, offset)
        slot: Any = group.joining
        if slot.request is None:
            slot.request, slot.started = JOIN, self.now()
        slot.values = [member.rank]
        handle = fill_in(self.handle(), me, slot)
        if self.observer is not None:
            self.observer.posted(member, slot)
        each: Any
        for each in matched:
            if each.request is JOIN and not self._spans(group):
                self.finish_join(each, group.number_of_join(), member.rank)
            else:
                self.carry_out(each, -1)
        if group.doomed is not None and not self.closed:
            self.reconsider(group, member)
        return handle

    def finish_join(self, slot: Rendezvous, number: int, last: int) -> None:
        """Let all replicas continue after a join, which takes that number and gives the id of the last to join."""
        slot.group.finish_join(slot, number)
        slot.take(last, shared=True)
        slot.last = -1
        self._complete(slot)
        self.loop.call_soon(partial(self.release, slot))

    def new_group(
        self, member: Member, ranks: tuple[int, ...], name: str | None, code: Any, offset: int, path: Path
    ) -> Member:
        """Let a replica make the next group of these members; see `Group.new_group`."""
        self.has_groups = True
        made = member.group.new_group(member, ranks, name, code, offset, path)
        if self.span is not None and self._spans(made.group):
            self.span.made(made.group)
        if made.group.doomed is not None and not self.closed:
            self.reconsider(made.group, made)
        return made

    # Trouble.

    def blocked(self, member: Member) -> None:
        """Note that a replica waits in a collective that is not complete."""
        group = member.group
        if group.doomed is not None:
            self.reconsider(group, member)
        if self.has_groups:
            self._blocks += 1
            if not self._looking:
                self._looking = True
                self.loop.call_plainly(self._when_quiet, self._blocks)

    def abandon(self, member: Member, slot: Rendezvous) -> None:
        """Note that a replica was cancelled out of a collective."""
        if slot.complete or self.closed:
            return
        state = self.state_of(member)
        if member.abandoned is None or slot.number < member.abandoned:
            from aiodist._runtime.inspection import why_cancelled  # loaded when something has gone wrong

            state.cancelled_in, state.cancelled_by = lines_here(), why_cancelled()
        member.group.abandon(member, slot)
        self.reconsider(member.group, member)

    def doom(self, group: Group, number: int) -> None:
        """Doom a group for a reason on another worker: replicas here settle, then the span is notified."""
        if not self.closed:
            group.doom(number)
            self.reconsider(group)

    def reconsider(self, group: Group, member: Member | None = None) -> None:
        """Check whether a doomed group can be analysed, now that this member has done something."""
        if self.closed or self.loop is None:  # `attach` comes back to it
            return
        if member is not None:
            group.consider(member)
        trouble = self._troubles.setdefault(group, _Trouble())
        unsettled = group.unsettled
        if not unsettled:
            self._judge(group)
        elif trouble.fewest is None or unsettled < trouble.fewest:
            trouble.fewest = unsettled
            trouble.until = self.now() + _SETTLE_SECONDS
            self._ring_by(trouble.until)

    def _judge_after_turns(self, group: Group, turns: int = _TURNS) -> None:
        """Analyse a group after some turns of the loop, unless a replica settles in them, or the run is over."""
        trouble = self._troubles[group]
        if turns == _TURNS:
            trouble.until = None
        if self.closed or self.over or trouble.until is not None:
            return
        if turns:
            self.loop.call_soon(partial(self._judge_after_turns, group, turns - 1))
        else:
            self._judge(group)

    def _judge(self, group: Group, overdue: Overdue | None = None) -> None:
        if all(member.replica.end is not None for member in group.members):
            return  # nobody is left to notify: `conclude` judges, if it comes to that
        if self.span is not None:
            self.span.troubled(group, overdue)
        else:
            self.fail(self._analysed(overdue))

    def _analysed(self, overdue: Overdue | None = None) -> CollectiveError:
        """Return the error for the ledger's state. An exception in this must not keep waiting replicas waiting."""
        try:
            return _error_of(self.snapshot(), overdue)
        except Exception as error:  # noqa: BLE001  (a bug in the analysis)
            text = f"replicas disagree, and the analysis of it failed: {type(error).__name__}: {error}"
            everyone = tuple(replica.id for replica in self.ledger.replicas)
            plain = IncompleteCollectiveError(CollectiveReport(Reason.ABANDONED, 0, (), everyone, text))
            plain.__cause__ = error
            return plain

    def fail(self, error: CollectiveError) -> None:
        """End the run with an error, which is raised in all waiting replicas and by the run."""
        if self.closed:
            return
        self.error = error
        if self.observer is not None:
            self.observer.reported(self, error)
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Stop completing collectives; raise the error in waiting replicas, and cancel the others."""
        self.closed = True
        if error is not None:
            for slot in self._open_slots():
                if not slot.under_way:
                    self.fail_slot(slot, error)
        if self.loop is not None:  # else its replicas find it closed when they begin
            self.loop.cancel()

    def _open_slots(self) -> list[Rendezvous]:
        return [slot for slot in self.ledger.open_slots() if isinstance(slot, Rendezvous)]

    def fail_slot(self, slot: Rendezvous, error: BaseException | None = None) -> None:
        """Complete a collective of a run that has failed, with the run's error, or an echo of a replica's failure."""
        slot.fail(error or self.error or self.echo())
        self._complete(slot)
        slot.released = True
        self.loop.wake_failed(slot)

    def echo(self) -> CollectiveError:
        """Return the error for replicas that wait after another's failure has ended the run.

        The run raises the failure itself, so all get the same error: analysing thousands of replicas for each of them
        would take minutes.
        """
        if self._echo is None:
            self._echo = self._analysed()
        return self._echo

    def tell_shielded(self) -> None:
        """Raise the error in replicas that wait in shielded scopes, which no cancellation reaches."""
        for slot in self._open_slots():
            if slot.has_waiters() and not slot.matched:
                self.fail_slot(slot)

    def end_waits(self) -> None:
        """Raise an error in tasks that outlive the run, where they wait or will wait: nobody will come."""
        self.closed = True
        for slot in self._open_slots():
            if slot.has_waiters():
                self.fail_slot(slot)
            slot.clear()

    def conclude(self) -> CollectiveError | None:
        """Return the run's error, once all replicas have ended; None if there was no trouble."""
        if self.error is None and not self.closed and self.ledger.troubled:
            self.error = self._analysed()
            if self.observer is not None:
                self.observer.reported(self, self.error)
        return self.error

    def raised_before(self, member: Member) -> bool:
        """Return whether the error that ended the run has been raised in a replica before, and note that it has now."""
        state = self.state_of(member)
        raised, state.raised = state.raised, True
        return raised

    # Timers.

    def _ring_by(self, at: float) -> None:
        """Have due work done at that time at the latest."""
        if not self.closed and (self._alarm is None or at < self._alarm):
            self._alarm = at
            self.loop.call_at(at, self._ring)

    def _ring(self) -> None:
        """Do what is due (a deadline, the end of a delay, another check), and set a timer for what comes next."""
        self._alarm = None
        now = self.now()
        timed = [(slot.deadline, slot) for slot in self._open_slots() if slot.deadline not in (None, _PASSED)]
        for deadline, slot in sorted(timed, key=lambda each: each[0]):
            if deadline <= now and not (self.closed or slot.complete):
                self._expire(slot, deadline)
        for group, trouble in list(self._troubles.items()):
            if trouble.until is not None and trouble.until <= now:
                self._judge_after_turns(group)
        if self._looks_again and self._not_before <= now:
            self._looks_again = False
            self._look()
        for at in (
            *(deadline for deadline, _ in timed if deadline > now),
            *(trouble.until for trouble in self._troubles.values() if trouble.until is not None),
            *([self._not_before] if self._looks_again else []),
        ):
            self._ring_by(at)

    def _expire(self, slot: Rendezvous, deadline: float) -> None:
        slot.deadline = _PASSED  # once, whatever time limits others come with
        number = None if slot is slot.group.joining else slot.number
        self._judge(slot.group, Overdue(slot.group.key, number, deadline - slot.started))

    # Replicas that wait for each other.

    def _when_quiet(self, blocks: int) -> None:
        """Check for deadlocks if nobody has begun to wait in the last turn of the loop."""
        if self.closed:
            return
        if blocks != self._blocks:
            self.loop.call_plainly(self._when_quiet, self._blocks)
            return
        self._looking = False
        self._look()

    def _look(self) -> None:
        """Check for replicas that wait for each other across groups, unless a report is pending."""
        if self.closed or self.ledger.troubled:
            return
        if self.now() < self._not_before:
            self._look_again()
            return
        self._looks_again = False
        began = time.perf_counter()
        suspects = self.ledger.stuck()
        if suspects:
            certain = self.waiting_for_good()
            if self.span is not None and certain:
                self.span.stuck(certain)
            elif certain & suspects and self._no_timer_helps() and self._others_have_settled(certain):
                self._end_by_deadlock(certain)
                return
        took = time.perf_counter() - began
        self._not_before = self.now() + max(_PAUSE_SECONDS if suspects else 0.0, _PAUSE_PER_LOOK * took)
        if suspects:
            self._look_again()

    def _look_again(self) -> None:
        running = any(replica.end is None for replica in self.ledger.replicas)  # else the end of the run tells all
        if running and not self._looks_again:
            self._looks_again = True
            self._ring_by(self._not_before)

    def _others_have_settled(self, certain: set[int]) -> bool:
        """Return whether the replicas outside the cycle have ended, or have had time to reach it."""
        if self._cycle_until is None:
            self._cycle_until = self.now() + _SETTLE_SECONDS
        running = (each.id for each in self.ledger.replicas if each.end is None)
        return certain.issuperset(running) or self.now() >= self._cycle_until

    def _no_timer_helps(self) -> bool:
        """Return whether the loop shows its timers or, if it does not, whether no replica has moved for a second."""
        if self.loop.pending() is not None:
            return True
        progress, now = self.ledger.progress(), self.now()
        if self._quiet is None or self._quiet[0] != progress:
            self._quiet = (progress, now)
        return now - self._quiet[1] >= PROOF_SECONDS

    def waiting_for_good(self) -> set[int]:
        """Return the ids of local replicas that certainly only wait for other replicas."""
        from aiodist._runtime.inspection import never_go_on  # loaded when there is something to look at

        return never_go_on(self.ledger, self.loop.pending() or ())

    def look_for_deadlock(self) -> None:
        """End the run if nothing has moved for a while and some replicas will certainly never continue."""
        if self.closed or self.ledger.troubled or self.span is not None:
            return
        certain = self.waiting_for_good()
        waiting = {m.replica_id for slot in self.ledger.open_slots() for m in slot.group.members if m.has_posted(slot)}
        if certain & waiting:
            self._end_by_deadlock(certain)

    def _end_by_deadlock(self, certain: set[int]) -> None:
        from aiodist._runtime.inspection import look_at_loop

        headline = f"{ids(certain)} wait for each other, and nothing else can wake them"
        text = look_at_loop().report(headline, replicas_alone=True)
        among = tuple(sorted(certain))
        self.fail(_error_of(self.snapshot(blocked=among, deadlocked=among, circle=text)))

    # What is known of the replicas.

    def snapshot(self, **more: Any) -> Snapshot:
        """Return what every replica called and where it is, including waits outside of collectives."""
        from aiodist._runtime.inspection import Look, handled_in, look_at_run  # loaded when something has gone wrong

        # where the event loop is blocked, another thread asks; behind the run's end, its loop may be gone
        is_here = get_ident() == self.thread
        looks, reads = is_here and not self.over, is_here or other_threads_can_be_looked_at()
        look = look_at_run(self.ledger) if looks else Look({}, "", {})
        facts = tuple(
            ReplicaFacts(
                replica.id,
                self.device_of(replica.id),
                replica.end,
                await_chain(state.awaitable if reads else None),
                look.waits.get(replica.id),
                *_how_it_returned(state),
                state.cancelled_in,
                child_calls=look.calls.get(replica.id, ()),
                cancelled_by=state.cancelled_by,
                handles=handled_in(state.awaitable if reads else None),
            )
            for replica, state in zip(self.ledger.replicas, self._states, strict=True)
        )
        return self.ledger.snapshot(facts, **{"circle": look.circle, **more})


JOIN = Request.of_kind(kinds.JOIN)


def _error_of(snapshot: Snapshot, overdue: Overdue | None = None) -> CollectiveError:
    from aiodist._core.analysis import analyse, error_of  # loaded when something has gone wrong

    return error_of(analyse(snapshot, overdue=overdue))


def _how_it_returned(state: _State) -> tuple[str | None, Location | None]:
    """Return what a replica's function returned, as text, and where."""
    if state.returned is None:
        return None, None
    value, frame = state.returned
    simple = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    text = repr(value) if simple else f"<{type(value).__qualname__}>"
    text = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
    return text, None if frame is None else place(frame.f_code, frame.f_lasti).location


def new_standing_run(run: Run) -> Run:
    """Return a run for contexts that a program makes itself.

    A single replica needs no event loop: whatever it issues is complete at once. Of several, none runs.
    """
    if run.ledger.root.size > 1:
        run.thread = NO_RUN
    else:
        run.attach(SoloLoop(partial(merge, run.strategy, run.finish_merge)), _InThisThread(), ANY_THREAD)
    return run


class _InThisThread:
    """Replaces worker threads if nobody else would have to wait."""

    under_way = 0

    def carry_out(self, work: Work, done: Callable[[Any, BaseException | None], object]) -> None:
        """Make the result at once."""
        try:
            result = work.carry_out()
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the await)
            done(None, error)
        else:
            done(result, None)


def run_replicas(run: Run, calls: Sequence[Call]) -> Coroutine[Any, Any, list[Any]]:
    """Run one function call on each replica of a new run; return their results in replica order."""
    return _Replicas(run, calls).results()


class _Replicas:
    """The replicas of one run: their tasks, their threads, and what they returned or raised."""

    def __init__(self, run: Run, calls: Sequence[Call]) -> None:
        self._run = run
        self._calls = calls
        self._results: list[Any] = [None] * len(calls)
        self._failures: dict[int, BaseException] = {}
        self._known: set[int] = set()
        self._handled: dict[int, Exception] = {}
        self._cancellations: dict[int, BaseException] = {}
        self._threads: DeviceThreads | None = None
        self._running = len(calls)
        self._watch: StallWatch | None = None
        self._called_from: FrameType | None = None

    async def results(self) -> list[Any]:
        """Run the replicas and return what they return."""
        run = self._run
        self._called_from = program_frame(sys._getframe(1))  # noqa: SLF001  (documented, for all its name)
        observer = current_observer()
        self._watch = watch_here()
        try:
            async with create_task_group() as tasks:
                self._attach(new_loop(tasks), observer)
                members = run.ledger.root.members
                names = [
                    f"replica {m.replica_id} of {_name(self._calls[0][0])} ({run.device_of(m.replica_id)})"
                    for m in members
                ]
                run.loop.start([partial(self._drive, member) for member in members], names)
            if run.span is not None:  # at once, unless its last replica was cancelled while it did that
                await run.span.finish(self._failures)
            reported = run.conclude()
            if reported is not None or self._cancellations:
                await checkpoint_if_cancelled()  # the caller's: on trio, a task group does not raise it
        except get_cancelled_exc_class() as cancellation:
            error = error_of_run(None, self._failures, {})
            if error is not None:
                raise without_frames_of_ours(error) from None
            raise cancellation.with_traceback(None)  # noqa: B904
        except BaseExceptionGroup as group:  # trio's, of a Ctrl-C that meets this task where it waits for the replicas
            interrupt = interrupt_in(group)
            if interrupt is not None:
                raise without_frames_of_ours(interrupt) from None
            raise
        finally:
            self._let_go()
        error = error_of_run(reported, self._failures, self._handled)
        if error is None and self._cancellations:
            replica_id = min(self._cancellations)
            error = RuntimeError(
                f"replica {replica_id} was cancelled, and nobody has cancelled the run; was its task cancelled, or did "
                "one of asyncio's timeouts end in a cancel scope of anyio's that was cancelled, too?"
            )
            error.__cause__ = self._cancellations[replica_id]
        if error is not None:
            raise without_frames_of_ours(error)
        return self._results

    def _let_go(self) -> None:
        """Release what the run has used, however it ends."""
        run = self._run
        run.over, self._called_from = True, None
        if self._watch is not None:
            self._watch.remove(run)
        if self._threads is not None:
            self._threads.close()
        if run.threads is not None:
            run.threads.close()
        run.end_waits()
        if run.observer is not None:
            run.observer.run_ended(run)

    def _attach(self, loop: AsyncioLoop | TrioLoop, observer: Observer | None) -> None:
        run = self._run
        threads = ReductionThreads(loop.call_plainly, loop.call_soon_threadsafe)
        run.attach(loop, threads, get_ident())
        self._threads = DeviceThreads(loop)
        loop.hold_interrupts_back(ReplicaContext, Participant, loop.handle)
        if self._watch is not None:
            self._watch.add(run)
        if observer is not None:
            from aiodist._runtime.observed import observe  # which looks at tasks, and is loaded for who observes

            observe(run, observer)
            observer.run_begun(run, self._calls[0][0])

    @drives_tasks
    async def _drive(self, member: Member) -> None:
        """Run one replica's function to its end, and note how it ended."""
        run = self._run
        me = Participant(run, member, self._threads)
        state = run.state_of(member)
        end = ReplicaState.CANCELLED
        frame = None
        try:
            if not run.closed:
                result = self._call(me)
                if inspect.isawaitable(result):
                    state.awaitable = result
                    frame = getattr(result, "cr_frame", None)  # held, it knows when it is over where it returned
                    if frame is not None and not is_plumbing(frame):
                        me.awaits.frame = frame
                    result = await result
                check_awaited(result, "result")
                state.returned = (result, frame)
                self._results[member.position] = result
                if not run.ending:  # cancelled replicas await nothing more
                    me.awaits.warn(member.replica_id)
                end = ReplicaState.EXITED
        except GeneratorExit:
            run.ledger.end(member.replica, ReplicaState.FAILED)  # its task is being destroyed
            raise
        except BaseException as error:  # noqa: BLE001  (whatever it is, `outcome` says what comes of it)
            end = self._note(member, error)
        finally:
            frame = None
            me.retire()
            state.awaitable = None
            self._running -= 1
            is_last = not self._running
            if is_last:
                run.loop.close()
        if run.observer is not None:
            run.observer.ended(member, end, self._failures.get(member.replica_id))
        self._end(member, end)
        await self._wait_for_what_is_left(is_last=is_last)

    async def _wait_for_what_is_left(self, *, is_last: bool) -> None:
        """Wait for what a replica has not awaited: when a run is over, its arrays are its own again."""
        run = self._run
        if run.threads.under_way:
            await run.threads.settle()
        if is_last and run.span is not None:  # here, while merge functions that nobody awaits can still be started
            await run.span.finish(self._failures)

    def _call(self, me: Participant) -> Any:
        current.set(me)
        if self._run.observer is not None:
            self._run.observer.started(me.member)
        fn, args, kwargs = self._calls[me.member.position]
        self._run.called_from = self._called_from
        try:
            return fn(*args, **kwargs)
        finally:
            self._run.called_from = None

    def _end(self, member: Member, end: ReplicaState) -> None:
        run = self._run
        run.ledger.end(member.replica, end)
        if end is ReplicaState.FAILED:
            if not run.closed:
                run.close()
                run.tell_shielded()  # who waits from now on gets the error from the handle
            return
        if not run.closed:
            for group in sorted(run.ledger.troubled, key=lambda group: group.serial):
                run.reconsider(group)

    def _note(self, member: Member, error: BaseException) -> ReplicaState:
        """Note the outcome of a replica's function, and return its state.

        The first failure of a replica's own closes the run; what others then raise is an echo.
        """
        run = self._run
        cancelled = get_cancelled_exc_class()
        error = interrupt_in(error) or without_cancellations(error, cancelled)
        if isinstance(error, KeyboardInterrupt):
            run.loop.was_interrupted = True
        if is_only(error, cancelled):
            if not run.closed:
                self._cancellations[member.replica_id] = error
            return ReplicaState.CANCELLED
        if run.closed and is_only(error, CollectiveError, cancelled):
            origin = origin_of(error)
            if origin is not None:
                self._handled[member.replica_id] = origin
            return ReplicaState.FAILED
        if id(error) not in self._known:
            self._known.add(id(error))
            device = run.device_of(member.replica_id)
            error.add_note(note_of_failure(run.ledger, member.replica, device, first=not self._failures))
        self._failures[member.replica_id] = error
        return ReplicaState.FAILED


def _name(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
