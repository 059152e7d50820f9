"""The scheduler: completes the collectives of one run, and reports its trouble.

A `Run` owns a `Ledger`, which decides, and acts on its decisions in the event loop: it computes a matched collective
and wakes the replicas that wait for it, in replica order; when one can never be matched, it raises the report.

**Trouble.** When a group of the ledger is doomed, replicas that can still make a call keep running until all have
settled, or until none of them has settled for a tenth of a second. On a busy machine the whole process may not have run
in that time, so the tasks that are ready get a few more turns of the loop. Then the snapshot is analysed, and the error
is raised in all replicas that wait.

**Failure.** A replica's own exception closes the run at once: it is the cause, and what the others then raise is an
echo.

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

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

from aiodist._arrays.options import CommunicationOptions
from aiodist._collectives import kinds
from aiodist._core.call import OrderCheck
from aiodist._core.errors import CollectiveError, IncompleteCollectiveError
from aiodist._core.instrument import Observer
from aiodist._core.ledger import Group, Ledger, Member, Path
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import Overdue, ReplicaFacts, Snapshot
from aiodist._core.terms import Location, Reason
from aiodist._core.text import ids
from aiodist._runtime import stacks
from aiodist._runtime.handle import CollectiveHandle, fill_in
from aiodist._runtime.loop import AsyncioLoop, SoloLoop, TrioLoop
from aiodist._runtime.merge import merge
from aiodist._runtime.participant import ANY_THREAD, NO_RUN, Participant
from aiodist._runtime.rendezvous import Extras, Rendezvous
from aiodist._runtime.requests import Request
from aiodist._runtime.run_threads import DeviceThreads, ReductionThreads
from aiodist._runtime.stall import PROOF_SECONDS

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
        self.clock = loop.clock  # tells the time in seconds
        self._wake = loop.wake
        self._wakes_later = loop.wakes_later
        for group in list(self.ledger.doomed_groups):  # another worker was in trouble before this one began
            self.reconsider(group)

    def connect(self, span: Span) -> None:
        """Connect the run to the other workers."""
        self.span = span

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
        if group.spans and self.span is not None:
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
            slot.request, slot.started = JOIN, self.clock()
        slot.values = [member.rank]
        handle = fill_in(self.handle(), me, slot)
        if self.observer is not None:
            self.observer.posted(member, slot)
        each: Any
        for each in matched:
            if each.request is JOIN and not group.spans:
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
        if made.group.spans and self.span is not None:
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
            from aiodist._runtime.causes import why_cancelled  # loaded only if something has gone wrong

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
            group.update_settled(member)
        trouble = self._troubles.setdefault(group, _Trouble())
        unsettled = group.unsettled
        if not unsettled:
            self._report(group)
        elif trouble.fewest is None or unsettled < trouble.fewest:
            trouble.fewest = unsettled
            trouble.until = self.clock() + _SETTLE_SECONDS
            self._set_timer(trouble.until)

    def _report_after_turns(self, group: Group, turns: int = _TURNS) -> None:
        """Analyse a group after some turns of the loop, unless a replica settles in them, or the run is over."""
        trouble = self._troubles[group]
        if turns == _TURNS:
            trouble.until = None
        if self.closed or trouble.until is not None:
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
        now = self.clock()
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
        if self.clock() < self._not_before:
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
        self._not_before = self.clock() + max(_PAUSE_SECONDS if suspects else 0.0, _PAUSE_PER_CHECK * took)
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
        shows_timers, now = self.loop.pending() is not None, self.clock()
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
        from aiodist._runtime.causes import handled_in  # both loaded only in trouble
        from aiodist._runtime.inspection import Inspection, inspect_run

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
    return text, None if frame is None else stacks.place_of(frame)


def new_detached_run(run: Run) -> Run:
    """Return a run for contexts that a program makes itself.

    A single replica needs no event loop: whatever it issues is complete at once. If there are several, none runs.
    """
    if run.ledger.root.size > 1:
        run.thread = NO_RUN
    else:
        run.attach(SoloLoop(partial(merge, run.strategy, run.finish_merge)), ANY_THREAD)
    return run
