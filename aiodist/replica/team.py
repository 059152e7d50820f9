"""A team: the workers of a strategy, as one of them sees them. What is called outside of replicas, and lanes for runs.

Operations outside of replicas (`run`, `reduce`, the creation of a variable) have lane 0 for themselves, and are
meetings too, in which each local replica stands for its part of the strategy. The caller's task drives them, one after
the other. A run takes a lane that all workers have free, or a new one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, Final

from anyio import move_on_after

from aiodist._arrays.environment import stall_seconds
from aiodist._arrays.options import CommunicationOptions, OrderCheck
from aiodist._core.errors import CollectiveError, ReplicaContextError
from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import Signature
from aiodist.collective.spanned import SpannedGroup
from aiodist.collective.wording import place
from aiodist.replica.asked import Asked
from aiodist.replica.awaiting import InterruptedStep
from aiodist.replica.crossing import Crossing
from aiodist.replica.group_lanes import GroupLanes
from aiodist.replica.home_loop import HomeLoop
from aiodist.replica.refusal import check_all_workers_are_here
from aiodist.replica.root_crossing import RootCrossing
from aiodist.replica.root_engine import RootEngine
from aiodist.replica.turns import Turn, Turns
from aiodist.workers.calls import Digests
from aiodist.workers.communicator import Communicator
from aiodist.workers.crossing import Span
from aiodist.workers.ending import GAVE_UP
from aiodist.workers.joining import made_differently, warn
from aiodist.workers.lane import Lane
from aiodist.workers.lane_book import Grant, Unmade
from aiodist.workers.lost import cut_link, lost_worker
from aiodist.workers.record import ALL_FREE
from aiodist.workers.state import WorkerState
from aiodist.workers.tribunal import Control, LaneKey, Reply, Verdict, judge, with_lines

_ROOT: Final = (0, 0)


class Team:
    """The workers of a strategy.

    Args:
        communicator: its own.
        control: the control plane.
        span: the layout.
        order_check: what call sites are compared by.
        options: of which the timeout holds outside of replicas, too.
        places: where each worker has made the strategy.

    Attributes:
        lost: what has ended the strategy: a worker is lost, or there was a verdict.
        failed: this worker has given it up.
        asked_of_runs: what others ask of runs that have no crossing here.
    """

    def __init__(
        self,
        communicator: Communicator,
        control: Control,
        span: Span,
        order_check: OrderCheck,
        options: CommunicationOptions,
        places: Sequence[str] = (),
    ) -> None:
        self.span = span
        self.digests = Digests(order_check)
        self.lost: CollectiveError | None = None
        self.failed = False
        self._control = control
        self._order_check = order_check
        self._options = options
        self._lanes = {0: Lane(communicator, 0)}
        self._in_use: set[int] = {0}
        self._crossings: dict[LaneKey, Crossing] = {}
        self.asked_of_runs = Asked(self)
        self._root: RootCrossing | None = None
        self._turns = Turns(self._end_of_trouble, self._abandon_before)
        self._home = HomeLoop()
        self._places = places
        self._waits_in: object = None  # the operation outside of replicas, and since when
        self._since = 0.0
        self.group_lanes = GroupLanes(communicator, control)
        control.listen(self)

    def call_soon_threadsafe(self, fn: Callable[..., object], *args: Any) -> None:
        """Call a function in the event loop; now, where none runs any more."""
        self._home.call_soon_threadsafe(fn, *args)

    # What the control plane calls, in any thread.

    def asked(self, key: LaneKey, trouble: int | None) -> None:
        """Report what there is to tell of a lane, in which that meeting cannot complete, as far as it is known."""
        self.call_soon_threadsafe(self.ask, key, trouble)

    def judged(self, key: LaneKey, verdict: Verdict) -> None:  # noqa: ARG002  (whichever lane it is on, all ends)
        """Hear the verdict on a lane."""
        self.call_soon_threadsafe(self._judge, verdict)

    def booked(self, reply: Reply) -> None:
        """Hear what the coordinator replies of groups."""
        self.call_soon_threadsafe(self._hear_booked, reply)

    def _hear_booked(self, reply: Reply) -> None:
        if isinstance(reply, Grant):
            self.group_lanes.granted(reply)
        elif isinstance(reply, Unmade):
            if reply.run in self._crossings:
                self._crossings[reply.run].hear_unmade(reply.groups)
        elif reply.run in self._crossings:
            self._crossings[reply.run].watch(reply.number)

    def lose(self, rank: int, why: str) -> None:
        """Hear that a worker is gone."""
        self._lose_by(lost_worker(self.span.layout, rank, why))

    def cut(self, one: int, other: int) -> None:
        """Hear that two workers do not reach each other."""
        self._lose_by(cut_link(self.span.layout, one, other))

    def _lose_by(self, error: CollectiveError) -> None:
        if self.lost is None:
            self.lost = error
            self.call_soon_threadsafe(self._lose)

    def state_of(self, key: LaneKey, note: str) -> WorkerState | None:
        """Return what there is to tell of a lane, for an event loop that does not answer."""
        crossing = self._crossings.get(key)
        if crossing is None or crossing.told or self.failed:
            return None
        failing = any(group.failed is not None for group in crossing.group.groups())  # which it is about to tell
        return None if failing else crossing.state(note=note)

    def warn_in_time(self) -> None:
        """Warn, in the event loop, of an operation outside of replicas that has waited for long."""
        root, seconds = self._root, stall_seconds()
        meeting = None if root is None or root._step is None else root._step.meeting
        now, waits_in = time.monotonic(), None if root is None or meeting is None else (root.key, meeting.number)
        if waits_in != self._waits_in:
            self._waits_in, self._since = waits_in, now
        if meeting is None or not seconds or now - self._since < seconds:
            return
        waited, self._since = now - self._since, math.inf
        rank, where = self.span.layout.rank, location(meeting.code, meeting.offset)
        warn(
            f"worker {rank} has waited {waited:.3g} s in {call_text(meeting.signature)} at {place(where)}, of the "
            f"strategy that it made at {self._places[rank]} (AIODIST_STALL_SECONDS sets the time, 0 turns this off)"
            f"\n{made_differently(self._places)}".rstrip(),
            where,
        )

    def ask(self, key: LaneKey, trouble: int | None) -> None:
        """Report it, in the event loop."""
        if self.lost is not None:
            return
        if self._root is None and key == _ROOT:
            self._root_crossing()
        crossing = self._crossings.get(key)
        if crossing is not None:
            crossing.ask(trouble)
        else:
            self.asked_of_runs.ask(key, trouble)

    def _judge(self, verdict: Verdict) -> None:
        if self.lost is None:
            self.lost = verdict.error()
            self._lose()

    def _lose(self) -> None:
        assert self.lost is not None
        crossings = list(self._crossings.values())
        self._crossings.clear()
        for crossing in crossings:
            crossing.lose(_like(self.lost))
        self._turns.go_on()

    # What crossings call.

    def enter(self, crossing: Crossing) -> None:
        """Let a crossing hear of its lane."""
        self._crossings[crossing.key] = crossing
        self.asked_of_runs.take(crossing)
        if self.lost is not None:
            crossing.lose(_like(self.lost))

    def leave(self, crossing: Crossing) -> None:
        """Let a crossing go, whose lane is free again."""
        self._crossings.pop(crossing.key, None)
        self.asked_of_runs.end_well(crossing)

    def report(self, key: LaneKey, state: WorkerState) -> None:
        """Tell the coordinator."""
        if not self.failed:
            self._control.report(key, state)

    def judge(self, state: WorkerState) -> CollectiveError:
        """Return the verdict on what this worker alone has to tell."""
        return judge({state.rank: state}, self.span.layout, self._order_check).error()

    # Outside of replicas.

    def begin(self, signature: Signature, code: CodeType, offset: int, value: Any) -> Rendezvous:
        """Begin an operation that the next one that is awaited carries over: the creation of a variable.

        Raises:
            CollectiveError: the strategy has ended.
            ReplicaContextError: this is a merge function of a group.
        """
        check_all_workers_are_here()
        return self._begin(signature, code, offset, value)

    def _begin(self, signature: Signature, code: CodeType, offset: int, value: Any) -> Rendezvous:
        group = self._root_crossing().group
        meetings = [group.arrive(member, signature, code, offset, value) for member in group.members]
        made: Rendezvous = meetings[-1]
        return made

    def refuse(self, signature: Signature, code: CodeType, offset: int, error: Exception) -> None:
        """Tell the others that a call was refused for its arguments; where no event loop runs, the next one does."""
        if self.span.layout.workers > 1:
            self._turns.refuse(error, signature, code, offset)
            with suppress(ReplicaContextError):
                self._move_in()
                self._turns.go_on()

    async def perform(self, signature: Signature, code: CodeType, offset: int, value: Any, ready: Any = None) -> Any:
        """Carry out an operation with all workers, once what it brings is ``ready``; return its result.

        Raises:
            CollectiveError: the workers do not meet in it.
            Exception: what it raises on all of them.
        """
        async with self.turn(signature, code, offset) as turn:
            await turn.wait_for(ready)
            meeting = self.begin(signature, code, offset, value)
            await self._carry(meeting, None)
            return meeting.result

    async def open_run(
        self,
        signature: Signature,
        code: CodeType,
        offset: int,
        group: SpannedGroup,
        options: CommunicationOptions | None,
    ) -> Crossing:
        """Begin a run with all workers; return its crossing.

        Raises:
            CollectiveError: the workers do not meet in it.
            RuntimeError: too many runs at a time.
        """
        async with self.turn(signature, code, offset):
            meeting = self.begin(signature, code, offset, None)
            opening = self._root_crossing().open_run(meeting, group)
            with opening:
                root = self._root_crossing()
                await self._carry(meeting, options)
                if not opening.decided and root.error is not None:
                    raise root.error
        return opening.run

    @property
    def free_lanes(self) -> int:
        """The lanes that this worker has free, a bit each."""
        return ALL_FREE & ~sum(1 << index for index in self._in_use)

    def close_run(self, crossing: Crossing) -> None:
        """Take back a run's lane."""
        if crossing.clean:
            self._in_use.discard(crossing.lane.index)
        elif not crossing.judged.is_set():
            crossing.tell()  # whatever has ended the run, the others hear of it

    def close(self) -> None:
        """Tell the others that this worker ends, and leave them."""
        self._control.close()

    # Lane 0.

    def turn(self, *call: Any) -> Turn:
        """Return a turn at lane 0, for a call: its signature, and its place."""
        self._move_in()
        return self._turns.turn(*call)

    def _move_in(self) -> None:
        if self._home.move_in() and self._root is not None:
            self._root.move_to_this_loop()

    def _abandon_before(self, signature: Signature, code: CodeType, offset: int, refusal: str = "") -> None:
        """Tell the others that a caller has left before its turn, which is now."""
        with suppress(CollectiveError):  # where the strategy has ended
            self._abandon(self._root_crossing(), self._begin(signature, code, offset, None), refusal)

    def _root_crossing(self) -> RootCrossing:
        if self.lost is not None:
            error = type(self.lost)(with_lines(self.lost.report, ["That has ended this strategy: make a new one."]))
            raise error from self.lost.__cause__
        if self._root is None:
            layout = self.span.layout
            group = SpannedGroup(layout.devices[layout.rank], self._order_check, self._options)
            group.attach(RootEngine(), 0)
            self._root = RootCrossing(self, self._lanes[0], _ROOT, group)
        return self._root

    @property
    def complete(self) -> int:
        """How many of lane 0's operations are complete."""
        return 0 if self._root is None else self._root.complete

    @property
    def paths(self) -> bool:
        """Whether calls are compared by the places of all their callers."""
        return self._order_check is OrderCheck.CALL_PATH

    @property
    def root_key(self) -> LaneKey:
        """What the present use of lane 0 is called between workers."""
        return self._root_crossing().key

    async def _carry(self, last: Rendezvous, options: CommunicationOptions | None) -> None:
        """Carry everything that has begun on lane 0 over.

        Raises:
            CollectiveError: the workers do not meet.
            Exception: what the last raises on all of them.
        """
        root = self._root_crossing()
        seconds = self._options.merge(options).timeout_seconds
        try:
            with move_on_after(seconds) as limit, suppress(InterruptedStep):
                await root.carry_over()
            if not last.complete:
                if limit.cancelled_caught:
                    root.tell(overdue=(last.number, seconds or 0.0))
                await root.judged.wait()
        except BaseException:
            if not last.complete:
                self._abandon(root, last)
            raise
        if last.error is not None:
            raise last.error

    def _abandon(self, root: Crossing, last: Rendezvous, refusal: str = "") -> None:
        """Tell the others that this worker's caller has left an operation: it was cancelled, or refused, say."""
        for member in root.group.members:
            member.abandon(last.number)
            member.refusal = refusal
        root.tell()

    async def _end_of_trouble(self) -> None:
        """Wait for the verdict on what was called last, if there was trouble."""
        if self._root is not None and self._root.told:
            await self._root.judged.wait()

    def strand(self, key: LaneKey) -> None:
        """Hear that something of a lane waits for others for ever."""
        self._control.strand(key)

    def give_up(self, error: BaseException) -> None:
        """End the strategy on all workers: this one cannot carry out its part of a step, for its engine fails, say."""
        if self.lost is None:
            self.failed = True
            why = f"{GAVE_UP}: {type(error).__name__}: {error}".partition("\n")[0]
            lost = lost_worker(self.span.layout, self.span.layout.rank, why)
            lost.__cause__ = error
            self._control.give_up(why)
            self._lose_by(lost)


def _like(error: CollectiveError) -> CollectiveError:
    """Return an error that is raised in the place of another one, which is kept, and is to keep no frames."""
    found = type(error)(error.report)
    found.__cause__ = error.__cause__
    return found
