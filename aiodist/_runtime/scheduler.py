"""The scheduler: runs one function call on each replica of a strategy, and completes their collectives.

    run_replicas
     └─ task group ── replica 0, replica 1, …        one task each, started in replica order
                   └─ merge functions                one at a time, each in a task of its own

A `Run` owns a `Ledger`, which decides, and acts on its decisions in the event loop: it computes a matched collective
and wakes the replicas that wait for it, in replica order; when one can never be matched, it raises the report.

**Trouble.** When a group of the ledger is doomed, replicas that can still make a call keep running until all have
settled, or until none of them has settled for a tenth of a second. On a busy machine the whole process may not have run
in that time, so the tasks that are ready get a few more turns of the loop. Then the snapshot is analysed, and the error
is raised in all replicas that wait.

**Failure.** A replica's own exception closes the run at once: it is the cause, and what the others then raise is an
echo. No exception leaves a replica's task, so the task group never decides what is raised; when all replicas have
ended, `outcome` does. A cancellation of the caller passes through the task group unchanged.

**Deadlocks.** In a run with groups, each await of an open collective requests a check, which happens after a turn of
the loop in which no other replica has begun to wait. Replicas that wait for each other, each in another group, are
deadlocked if none of their tasks can run and none of their timers is pending (if the loop does not show its timers, a
second without progress counts instead). While this is undecided the check is repeated, for at most a fiftieth of the
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
from functools import cached_property, partial
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

from anyio import create_task_group, get_cancelled_exc_class
from anyio.lowlevel import checkpoint_if_cancelled

from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import check_awaited
from aiodist._collectives import kinds
from aiodist._core.call import OrderCheck, place
from aiodist._core.errors import CollectiveError, IncompleteCollectiveError
from aiodist._core.instrument import Observer, current_observer
from aiodist._core.ledger import Group, Ledger, Member, Path
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import Overdue, ReplicaFacts, Snapshot
from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.text import ids
from aiodist._runtime import outcome, stacks
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import current
from aiodist._runtime.handle import CollectiveHandle, fill_in
from aiodist._runtime.loop import AsyncioLoop, SoloLoop, TrioLoop, new_loop
from aiodist._runtime.merge import merge
from aiodist._runtime.participant import ANY_THREAD, NO_RUN, Participant
from aiodist._runtime.rendezvous import Extras, Rendezvous
from aiodist._runtime.requests import Request
from aiodist._runtime.stall import PROOF_SECONDS, StallWatch, watch_here
from aiodist._runtime.threads import DeviceThreads, ReductionThreads

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

_SETTLE_SECONDS = 0.1
_TURNS = 8
_PAUSE_SECONDS = 0.1
_PAUSE_PER_CHECK = 50
_LONGEST_VALUE = 40
_PASSED = -math.inf


class Span(Protocol):
    """A run's connection to the other workers, implemented by `_workers` and passed to the run by the strategy."""

    def matched(self, slot: Rendezvous) -> None:
        """Agree with other workers on a slot that all local members have posted, exchange values, and complete it."""

    def made(self, group: Group) -> None:
        """Note a group that local replicas make and that has members on other workers."""

    def report_group(self, group: Group, overdue: Overdue | None) -> None:
        """Have all workers' snapshots analysed, because a group is doomed and its local members have settled."""

    def stuck(self, replica_ids: Collection[int]) -> None:
        """Note which local replicas wait in collectives and will do nothing else."""

    async def finish(self, failures: Mapping[int, BaseException]) -> None:
        """Meet the other workers at the end of the run, with the local replicas' own failures by id."""


@dataclass(slots=True, eq=False)
class _State:
    """What a run knows about one replica apart from its collectives."""

    awaitable: Any = None  # its function's coroutine, while it runs
    returned: tuple[Any, FrameType | None] | None = None  # its result, and the frame that returned it if known
    cancelled_in: tuple[tuple[str, int], ...] = ()  # cancelled out of a collective: files and lines, innermost first
    cancelled_by: str = ""  # why, if known
    raised: bool = False  # the error that ended the run has been raised in it


@dataclass(slots=True, eq=False)
class _Trouble:
    """A doomed group before its analysis: the fewest unsettled members so far, and until when to wait for them."""

    fewest: int | None = None
    until: float | None = None


class Run:
    """One run of a strategy on this process's replicas, one for each device.

    ``first`` is the id of the first one; ``total`` is their number over all workers, or None if there are no others.
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
        self.callers = stacks.all_callers if order_check is OrderCheck.CALL_PATH else stacks.nearest_callers
        self.closed = False  # nothing completes any more: the run has failed
        self.over = False  # all its tasks have ended, or never began
        self.error: CollectiveError | None = None  # what the order check found
        self.loop: Any = None
        self.handle: type[CollectiveHandle[Any]] = CollectiveHandle
        self.threads: Any = None  # compute results that would hold up the loop; None outside any run
        self.device_threads: DeviceThreads | None = None  # for `run_sync`
        self.thread = 0  # the loop's
        self.has_groups = False  # besides the run's own
        self.called_from: FrameType | None = None  # the frame that awaits the run, while a replica's function is called
        self.span: Span | None = None  # None if there are no other workers
        self.observer: Observer | None = None
        self.has_options = options != CommunicationOptions()
        self._states = [_State() for _ in devices]
        self._troubles: dict[Group, _Trouble] = {}
        self._timer_at: float | None = None
        # The check for deadlocks across groups:
        self._waits = 0  # awaits of open collectives so far
        self._check_requested = self._checks_again = False
        self._not_before = 0.0
        self._seen: tuple[int, ...] = ()
        self._seen_since = 0.0

    def attach(self, loop: AsyncioLoop | TrioLoop | SoloLoop, thread: int) -> None:
        """Bind the run to the event loop, and the thread, in which its replicas run."""
        self.loop, self.thread = loop, thread
        if not isinstance(loop, SoloLoop):
            self.threads, self.device_threads = ReductionThreads(loop), DeviceThreads(loop)
        self.handle = loop.handle
        self.now = self.clock = loop.clock  # tells the time in seconds
        self._wake = loop.wake
        self._wakes_later = loop.wakes_later
        for group in list(self.ledger.doomed_groups):  # another worker was in trouble before this one began
            self.reconsider(group)

    @property
    def ending(self) -> bool:
        """Whether the run has failed, or the run or the running task is being cancelled."""
        return self.closed or bool(self.loop.ending)

    def state_of(self, member: Member) -> _State:
        """Return what the run knows about a replica."""
        return self._states[member.replica_id - self.first]

    def device_of(self, replica_id: int) -> str:
        """Return a replica's device."""
        return self.devices[replica_id - self.first]

    def devices_of(self, group: Group) -> tuple[str, ...]:
        """Return the devices of a group's members, by position."""
        return tuple(self.device_of(member.replica_id) for member in group.members)

    # A collective, from its first post to its result.

    def begin(self, slot: Rendezvous) -> None:
        """Apply the run's options to a collective."""
        slot.options = self.options
        self._limit(slot, self.options.timeout_seconds)

    def add(self, slot: Rendezvous, position: int, extras: Extras) -> None:
        """Record the options and the buffers of one post."""
        options, out = extras.options, extras.out
        if options is not None:
            self._limit(slot, options.timeout_seconds)
            if position == 0:
                slot.options = slot.options.merge(options)
        if out is not None:
            slot.outs = {**(slot.outs or {}), position: out}

    def _limit(self, slot: Rendezvous, seconds: float | None) -> None:
        if seconds is not None and (slot.deadline is None or slot.started + seconds < slot.deadline):
            slot.deadline = slot.started + seconds
            self._set_timer(slot.deadline)

    def carry_out(self, slot: Rendezvous, last: int) -> None:
        """Carry out a collective that all replicas of this process have posted alike; ``last`` posted last."""
        group = slot.group
        if self.span is not None and group.size != len(group.members):  # `_spans`, inlined
            self.span.matched(slot)
            return
        if slot.request.kind is kinds.MERGE_CALL and not slot.absent:
            self.start_merge(slot)
            return
        try:
            work = slot.compute(self.devices_of)
            if work is not None and self.threads is None:  # outside any run
                slot.take(work.carry_out(), shared=slot.shared)
            elif work is not None:
                slot.under_way = True
                slot.deadline = None  # no replica is missing: it can be neither late nor abandoned
                self.threads.carry_out(work, partial(self.complete, slot))
                return
        except Exception as error:  # noqa: BLE001  (the waiting replicas raise it)
            slot.fail(error)
        slot.last = last
        self._mark_complete(slot)
        # The last to arrive takes its place among the others when it awaits, which it normally does in this very step.
        if self._wakes_later or last == len(slot.waiters) - 1:
            self._wake(slot)
        else:
            self.loop.call_soon(self.release, slot)

    def _spans(self, group: Group) -> bool:
        """Return whether a group has members on other workers."""
        return self.span is not None and group.size != len(group.members)

    def complete(self, slot: Rendezvous, result: Any, error: BaseException | None) -> None:
        """Complete a collective with its result (shared, or by position) or its error; wake the waiting replicas."""
        slot.under_way = False
        if slot.complete:
            return
        if error is None:
            slot.take(result, shared=slot.shared)
        else:
            slot.fail(error)
        self._mark_complete(slot)
        self.release(slot)

    def _mark_complete(self, slot: Rendezvous) -> None:
        slot.values = []  # a merge function whose task has not begun finds nothing to merge, and does not run
        slot.group.complete(slot)
        if self.observer is not None:
            self.observer.completed(slot)

    def release(self, slot: Rendezvous) -> None:
        """Wake the replicas that wait in a complete collective, in replica order."""
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
        matched = group.join(member, JOIN.call, code, offset)
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
        """Complete a join with the id of the last to join; it takes that number, and all replicas continue after it."""
        slot.group.finish_join(slot, number)
        slot.take(last, shared=True)
        slot.last = -1
        self._mark_complete(slot)
        self.loop.call_soon(self.release, slot)

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
            self._waits += 1
            if not self._check_requested:
                self._check_requested = True
                self.loop.call_soon(self._check_when_quiet, self._waits)

    def abandon(self, member: Member, slot: Rendezvous) -> None:
        """Note that a replica was cancelled out of a collective."""
        if slot.complete or self.closed:
            return
        state = self.state_of(member)
        if member.abandoned is None or slot.number < member.abandoned:
            from aiodist._runtime.inspection import why_cancelled  # loaded only if something has gone wrong

            state.cancelled_in, state.cancelled_by = stacks.lines_here(), why_cancelled()
        member.group.abandon(member, slot)
        self.reconsider(member.group, member)

    def doom(self, group: Group, number: int) -> None:
        """Doom a group for a reason on another worker; once the replicas here have settled, the span is notified."""
        if not self.closed:
            group.doom(number)
            self.reconsider(group)

    def reconsider(self, group: Group, member: Member | None = None) -> None:
        """Analyse a doomed group if its members have settled, now that this member has done something."""
        if self.closed or self.loop is None:  # in that case `attach` reconsiders it
            return
        if member is not None:
            group.consider(member)
        trouble = self._troubles.setdefault(group, _Trouble())
        unsettled = group.unsettled
        if not unsettled:
            self._report(group)
        elif trouble.fewest is None or unsettled < trouble.fewest:
            trouble.fewest = unsettled
            trouble.until = self.now() + _SETTLE_SECONDS
            self._set_timer(trouble.until)

    def _report_after_turns(self, group: Group, turns: int = _TURNS) -> None:
        """Analyse a group after some turns of the loop, unless a replica settles in them, or the run is over."""
        trouble = self._troubles[group]
        if turns == _TURNS:
            trouble.until = None
        if self.closed or self.over or trouble.until is not None:
            return
        if turns:
            self.loop.call_soon(self._report_after_turns, group, turns - 1)
        else:
            self._report(group)

    def _report(self, group: Group, overdue: Overdue | None = None) -> None:
        if all(member.replica.end is not None for member in group.members):
            return  # no member is left to raise it in; if nobody else reports it, `conclude` does
        if self.span is not None:
            self.span.report_group(group, overdue)
        else:
            self.fail(self._analysed(overdue))

    def _analysed(self, overdue: Overdue | None = None, **more: Any) -> CollectiveError:
        """Return the error for the ledger's state, with other fields of `Snapshot`.

        A bug in the analysis must not leave replicas waiting.
        """
        try:
            from aiodist._core.analysis import analyse, error_of  # loaded only if something has gone wrong

            return error_of(analyse(self.snapshot(**more), overdue=overdue))
        except Exception as error:  # noqa: BLE001  (see above)
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
        self.closed = True
        for slot in self._open_slots():
            if not slot.under_way:
                self.fail_slot(slot)
        if self.loop is not None:  # otherwise its replicas find it closed when they begin
            self.loop.cancel()

    def close(self) -> None:
        """End the run because a replica has failed: cancel the others.

        Those that wait in shielded scopes, which no cancellation reaches, get an error instead; those that wait from
        now on get it from their handle.
        """
        self.closed = True
        self.loop.cancel()
        for slot in self._open_slots():
            if slot.has_waiters() and not slot.matched:
                self.fail_slot(slot)

    def _open_slots(self) -> list[Rendezvous]:
        return [slot for slot in self.ledger.open_slots() if isinstance(slot, Rendezvous)]

    def fail_slot(self, slot: Rendezvous) -> None:
        """Complete a collective of a run that has failed, with the run's error, or an echo of a replica's failure."""
        slot.fail(self.error or self._echo)
        self._mark_complete(slot)
        slot.released = True
        self.loop.wake_failed(slot)

    @cached_property
    def _echo(self) -> CollectiveError:
        """The error for replicas that wait after another's failure has ended the run.

        The run raises the failure itself, so all get the same error: analysing thousands of replicas for each of them
        would take minutes.
        """
        return self._analysed()

    def shut_down(self) -> None:
        """Release the threads, and raise an error in tasks that outlive the run and wait in a collective."""
        self.closed = self.over = True
        for threads in filter(None, (self.device_threads, self.threads)):
            threads.close()
        for slot in self._open_slots():
            if slot.has_waiters():
                self.fail_slot(slot)
            slot.clear()

    def conclude(self) -> CollectiveError | None:
        """Return the run's error, once all replicas have ended; None if there was no trouble."""
        if self.error is None and not self.closed and self.ledger.doomed_groups:
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

    def _set_timer(self, at: float) -> None:
        """Have due work done at that time at the latest."""
        if not self.closed and (self._timer_at is None or at < self._timer_at):
            self._timer_at = at
            self.loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        """Do what is due (a deadline, the end of a delay, another check), and set the timer for what comes next."""
        self._timer_at = None
        now = self.now()
        timed = [(slot.deadline, slot) for slot in self._open_slots() if slot.deadline not in (None, _PASSED)]
        for deadline, slot in sorted(timed, key=lambda each: each[0]):
            if deadline <= now and not (self.closed or slot.complete):
                self._expire(slot, deadline)
        for group, trouble in list(self._troubles.items()):
            if trouble.until is not None and trouble.until <= now:
                self._report_after_turns(group)
        if self._checks_again and self._not_before <= now:
            self._check_for_deadlock()
        coming = [deadline for deadline, _ in timed if deadline > now]
        coming += [trouble.until for trouble in self._troubles.values() if trouble.until is not None]
        if self._checks_again:
            coming.append(self._not_before)
        if coming:
            self._set_timer(min(coming))

    def _expire(self, slot: Rendezvous, deadline: float) -> None:
        slot.deadline = _PASSED  # reported once, even if later posts have time limits of their own
        number = None if slot is slot.group.joining else slot.number
        self._report(slot.group, Overdue(slot.group.key, number, deadline - slot.started))

    # Replicas that wait for each other.

    def _check_when_quiet(self, waits: int) -> None:
        """Check for deadlocks if no replica has begun to wait in the last turn of the loop."""
        if waits != self._waits and not self.closed:
            self.loop.call_soon(self._check_when_quiet, self._waits)
            return
        self._check_requested = False
        self._check_for_deadlock()

    def _check_for_deadlock(self) -> None:
        """Check for replicas that wait for each other across groups, unless a report is pending."""
        self._checks_again = False
        if self.closed or self.ledger.doomed_groups:
            return
        if self.now() < self._not_before:
            self._check_again()
            return
        began = time.perf_counter()
        suspects = self.ledger.stuck()
        if suspects:
            certain = self.deadlocked_replicas()
            if self.span is not None and certain:
                self.span.stuck(certain)
            elif certain & suspects and self._is_proven(certain):
                self._end_by_deadlock(certain)
                return
        took = time.perf_counter() - began
        self._not_before = self.now() + max(_PAUSE_SECONDS if suspects else 0.0, _PAUSE_PER_CHECK * took)
        if suspects:
            self._check_again()

    def _check_again(self) -> None:
        if any(replica.end is None for replica in self.ledger.replicas):  # otherwise the end of the run reports it
            self._checks_again = True
            self._set_timer(self._not_before)

    def _is_proven(self, certain: set[int]) -> bool:
        """Return whether these replicas are deadlocked, and the others have ended, or have had time to reach the cycle.

        If the loop does not show its timers, one may help, unless nothing has moved for a second.
        """
        shows_timers, now = self.loop.pending() is not None, self.now()
        seen = tuple(sorted(certain)) if shows_timers else self.ledger.progress()
        if seen != self._seen:
            self._seen, self._seen_since = seen, now
        delay = 0.0 if self._are_all_left(certain) else _SETTLE_SECONDS
        return now - self._seen_since >= (delay if shows_timers else PROOF_SECONDS)

    def _are_all_left(self, certain: set[int]) -> bool:
        return certain.issuperset(replica.id for replica in self.ledger.replicas if replica.end is None)

    def deadlocked_replicas(self) -> set[int]:
        """Return the ids of local replicas that are certain to wait only for other replicas."""
        from aiodist._runtime.inspection import deadlocked  # loaded only if there is something to inspect

        return deadlocked(self.ledger, self.loop.pending() or ())

    def look_for_deadlock(self) -> None:
        """End the run if some of its replicas will certainly never continue; called when nothing moves."""
        from aiodist._runtime.inspection import waits_for_others  # loaded only if nothing moves

        if self.closed or self.ledger.doomed_groups or self.span is not None:
            return
        waiting = {m.replica_id for slot in self.ledger.open_slots() for m in slot.group.members if m.has_posted(slot)}
        if not waiting:  # then all must be stuck; thousands that sleep are not inspected for nothing
            first = next((state.awaitable for state in self._states if state.awaitable is not None), None)
            if not waits_for_others(first, self.ledger.root.size):
                return
        certain = self.deadlocked_replicas()
        if certain & waiting or (certain and self._are_all_left(certain)):
            self._end_by_deadlock(certain)

    def _end_by_deadlock(self, certain: set[int]) -> None:
        from aiodist._runtime.inspection import inspect_loop

        headline = f"{ids(certain)} wait for each other, and nothing else can wake them"
        text = inspect_loop().report(headline, replicas_alone=True)
        among = tuple(sorted(certain))
        self.fail(self._analysed(blocked=among, deadlocked=among, cycle_text=text))

    # What is known of the replicas.

    def snapshot(self, **more: Any) -> Snapshot:
        """Return what every replica called and where it is, including waits outside of collectives."""
        from aiodist._runtime.inspection import Inspection, handled_in, inspect_run  # loaded only in trouble

        # If the event loop is blocked, another thread asks; after the run's end, its loop may be gone.
        is_here = get_ident() == self.thread
        inspects, reads = is_here and not self.over, is_here or stacks.can_read_other_threads()
        found = inspect_run(self.ledger) if inspects else Inspection()
        facts = tuple(
            ReplicaFacts(
                replica.id,
                self.device_of(replica.id),
                replica.end,
                stacks.await_chain(state.awaitable if reads else None),
                found.waits.get(replica.id),
                *_how_it_returned(state),
                state.cancelled_in,
                child_calls=found.calls.get(replica.id, ()),
                cancelled_by=state.cancelled_by,
                handles=handled_in(state.awaitable if reads else None),
            )
            for replica, state in zip(self.ledger.replicas, self._states, strict=True)
        )
        return self.ledger.snapshot(facts, **{"cycle_text": found.cycle_text, **more})


JOIN = Request.of_kind(kinds.JOIN)


def _how_it_returned(state: _State) -> tuple[str | None, Location | None]:
    """Return what a replica's function returned, as text, and where."""
    if state.returned is None:
        return None, None
    value, frame = state.returned
    simple = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    text = repr(value) if simple else f"<{type(value).__qualname__}>"
    text = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
    return text, None if frame is None else place(frame.f_code, frame.f_lasti).location


def new_detached_run(run: Run) -> Run:
    """Return a run for contexts that a program makes itself.

    A single replica needs no event loop: whatever it issues is complete at once. If there are several, none runs.
    """
    if run.ledger.root.size > 1:
        run.thread = NO_RUN
    else:
        run.attach(SoloLoop(partial(merge, run.strategy, run.finish_merge)), ANY_THREAD)
    return run


def run_replicas(run: Run, calls: Sequence[Call]) -> Coroutine[Any, Any, list[Any]]:
    """Run one function call on each replica of a new run; return their results in replica order."""
    return _Replicas(run, calls).results()


class _Replicas:
    """The replicas of one run: their tasks, their threads, and what they returned or raised."""

    def __init__(self, run: Run, calls: Sequence[Call]) -> None:
        self._run = run
        self._calls = calls
        self._results: list[Any] = [None] * len(calls)
        # By replica id: its own failure, what it was handling when it got the run's error, and its own cancellation.
        self._failures: dict[int, BaseException] = {}
        self._handled: dict[int, Exception] = {}
        self._cancellations: dict[int, BaseException] = {}
        self._noted: set[int] = set()  # identities of failures that have a note
        self._running = len(calls)
        self._watch: StallWatch | None = None
        self._called_from: FrameType | None = None

    async def results(self) -> list[Any]:
        """Run the replicas and return what they return."""
        run = self._run
        self._called_from = stacks.program_frame(sys._getframe(1))  # noqa: SLF001  (documented, despite its name)
        observer = current_observer()
        self._watch = watch_here()
        try:
            async with create_task_group() as tasks:
                self._attach(new_loop(tasks), observer)
                members, name = run.ledger.root.members, stacks.function_name(self._calls[0][0])
                names = [f"replica {m.replica_id} of {name} ({run.device_of(m.replica_id)})" for m in members]
                run.loop.start([partial(self._drive, member) for member in members], names)
            if run.span is not None:  # returns at once, unless the last replica was cancelled in this call
                await run.span.finish(self._failures)
            reported = run.conclude()
            if reported is not None or self._cancellations:
                await checkpoint_if_cancelled()  # the caller may be: on trio, a task group does not raise that
        except get_cancelled_exc_class() as cancellation:
            error = outcome.error_of_run(None, self._failures, {})
            if error is not None:
                raise outcome.without_frames_of_ours(error) from None
            raise cancellation.with_traceback(None)  # noqa: B904
        except BaseExceptionGroup as group:  # trio's, of a Ctrl-C that meets this task where it waits for the replicas
            interrupt = outcome.interrupt_in(group)
            if interrupt is not None:
                raise outcome.without_frames_of_ours(interrupt) from None
            raise
        finally:
            self._release()
        error = outcome.error_of_run(reported, self._failures, self._handled)
        if error is None and self._cancellations:
            replica_id = min(self._cancellations)
            error = RuntimeError(
                f"replica {replica_id} was cancelled, and nobody has cancelled the run; was its task cancelled, or did "
                "one of asyncio's timeouts end in a cancel scope of anyio's that was cancelled, too?"
            )
            error.__cause__ = self._cancellations[replica_id]
        if error is not None:
            raise outcome.without_frames_of_ours(error)
        return self._results

    def _release(self) -> None:
        """Release what the run has used, however it ends."""
        run = self._run
        self._called_from = None
        if self._watch is not None:
            self._watch.remove(run)
        run.shut_down()
        if run.observer is not None:
            run.observer.run_ended(run)

    def _attach(self, loop: AsyncioLoop | TrioLoop, observer: Observer | None) -> None:
        run = self._run
        run.attach(loop, get_ident())
        loop.hold_interrupts_back(ReplicaContext, Participant, loop.handle)
        if self._watch is not None:
            self._watch.add(run)
        if observer is not None:
            from aiodist._runtime.observed import observed  # loaded only for observers

            run.observer, run.handle = observed(run, observer)
            observer.run_begun(run, self._calls[0][0])

    @stacks.drives_tasks
    async def _drive(self, member: Member) -> None:
        """Run one replica's function to its end, and note how it ended."""
        run = self._run
        me = Participant(run, member)
        state = run.state_of(member)
        end = ReplicaState.CANCELLED
        frame = None
        try:
            if not run.closed:
                result = self._call(me)
                if inspect.isawaitable(result):
                    state.awaitable = result
                    frame = getattr(result, "cr_frame", None)  # kept, for it will tell where the function returned
                    if frame is not None and not stacks.is_plumbing(frame):
                        me.awaits.frame = frame
                    result = await result
                check_awaited(result, "result")
                state.returned = (result, frame)
                self._results[member.position] = result
                if not run.ending:  # a cancelled replica cannot await what it has issued
                    me.awaits.warn(member.replica_id)
                end = ReplicaState.EXITED
        except GeneratorExit:
            run.ledger.end(member.replica, ReplicaState.FAILED)  # its task is being destroyed
            raise
        except BaseException as error:  # noqa: BLE001  (`outcome` decides what the run raises)
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
        await self._settle(is_last=is_last)

    async def _settle(self, *, is_last: bool) -> None:
        """Wait for collectives that a replica has not awaited: after the run, its arrays are its own again."""
        run = self._run
        if run.threads.under_way:
            await run.threads.settle()
        if is_last and run.span is not None:  # here, while merge functions that no replica awaits can still be started
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
        if run.closed:
            return
        if end is ReplicaState.FAILED:
            run.close()
            return
        for group in sorted(run.ledger.doomed_groups, key=lambda group: group.serial):
            run.reconsider(group)

    def _note(self, member: Member, error: BaseException) -> ReplicaState:
        """Note what a replica's function has raised, and return the replica's state."""
        run = self._run
        cancelled = get_cancelled_exc_class()
        error = outcome.interrupt_in(error) or outcome.without_cancellations(error, cancelled)
        if isinstance(error, KeyboardInterrupt):
            run.loop.was_interrupted = True
        if outcome.is_only(error, cancelled):
            if not run.closed:
                self._cancellations[member.replica_id] = error
            return ReplicaState.CANCELLED
        if run.closed and outcome.is_only(error, CollectiveError, cancelled):
            origin = outcome.origin_of(error)
            if origin is not None:
                self._handled[member.replica_id] = origin
            return ReplicaState.FAILED
        if id(error) not in self._noted:
            self._noted.add(id(error))
            device = run.device_of(member.replica_id)
            error.add_note(outcome.note_of_failure(run.ledger, member.replica, device, first=not self._failures))
        self._failures[member.replica_id] = error
        return ReplicaState.FAILED
