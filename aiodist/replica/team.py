"""A team: the workers of a strategy, as one of them sees them. What is called outside of replicas, and lanes for runs.

Operations outside of replicas (`run`, `reduce`, the creation of a variable) have the lane 0 for themselves, and are
meetings as well, in which each local replica stands for its part of the strategy. The caller's task drives them, one
after the other. A run takes a lane that all workers have free, or a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any

import anyio
from anyio import create_task_group, get_cancelled_exc_class, move_on_after

from aiodist.collective.callsite import location
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import Signature
from aiodist.collective.spanned import SpannedGroup
from aiodist.replica.awaiting import InterruptedStep
from aiodist.replica.crossing import Crossing
from aiodist.replica.engine import current_loop
from aiodist.replica.group_lanes import GroupLanes
from aiodist.replica.opening import open_run
from aiodist.replica.refusal import check_all_workers_are_here
from aiodist.replica.root_engine import RootEngine
from aiodist.replica.turns import is_late_for, turn
from aiodist.vocabulary.errors import CollectiveError
from aiodist.vocabulary.options import CommunicationOptions, OrderCheck
from aiodist.workers.calls import Digests
from aiodist.workers.communicator import Communicator
from aiodist.workers.crossing import Span
from aiodist.workers.lane import Lane
from aiodist.workers.lane_book import Grant, Unmade
from aiodist.workers.lost import cut_link, lost_worker
from aiodist.workers.record import ALL_FREE
from aiodist.workers.state import WorkerState
from aiodist.workers.tribunal import Control, LaneKey, Reply, Verdict, judge

if TYPE_CHECKING:
    from aiodist.workers.nccl_plane import DataPlane


class Team:
    """The workers of a strategy.

    Args:
        communicator: its own.
        control: the control plane.
        span: the layout.
        order_check: what call sites are compared by.
        options: of which the timeout holds outside of replicas, too.
        plane: NCCL; None where the workers do not use it.

    Attributes:
        lost: what to raise, once a worker is lost.
    """

    def __init__(
        self,
        communicator: Communicator,
        control: Control,
        span: Span,
        order_check: OrderCheck,
        options: CommunicationOptions,
        plane: DataPlane | None = None,
    ) -> None:
        self.span = span
        self._plane = plane
        self.digests = Digests(order_check)
        self.lost: CollectiveError | None = None
        self._control = control
        self._order_check = order_check
        self._options = options
        self._lanes = {0: Lane(communicator, 0)}
        self._in_use: set[int] = {0}
        self._ended: list[Crossing] = []
        self._crossings: dict[LaneKey, Crossing] = {}
        self._asked: dict[LaneKey, int | None] = {}
        self._incidents = 0
        self._runs = 0
        self._root: Crossing | None = None
        self._unheard: deque[CollectiveError] = deque()
        self._left: deque[tuple[Signature, CodeType, int]] = deque()
        self._loop: Any = None
        self._thread = 0
        self._call: Callable[..., object] = _call_now
        self.group_lanes = GroupLanes(communicator, control)
        control.listen(self)

    def call_soon_threadsafe(self, fn: Callable[..., object], *args: Any) -> None:
        """Call a function in the event loop; now, where none runs any more."""
        try:
            self._call(fn, *args)
        except RuntimeError:
            fn(*args)

    # What the control plane calls, in any thread.

    def asked(self, key: LaneKey, trouble: int | None) -> None:
        """Report what there is to tell of a lane, in which that meeting cannot complete, as far as it is known."""
        self.call_soon_threadsafe(self._ask, key, trouble)

    def judged(self, key: LaneKey, verdict: Verdict) -> None:
        """Hear the verdict on a lane."""
        self.call_soon_threadsafe(self._judge, key, verdict)

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
        return None if crossing is None or crossing.told else crossing.state(note=note)

    def _ask(self, key: LaneKey, trouble: int | None) -> None:
        if self._root is None and key == (0, self._incidents) and self.lost is None:
            self._root_crossing()
        crossing = self._crossings.get(key)
        if crossing is None:
            self._asked[key] = trouble
        elif crossing is self._root:
            crossing.tell()
        else:
            crossing.ask(trouble)

    def _judge(self, key: LaneKey, verdict: Verdict) -> None:
        crossing = self._crossings.pop(key, None)
        self.group_lanes.forget(key)
        if crossing is not None:
            crossing.judge(verdict)
            self._replace_root(crossing, verdict)

    def _lose(self) -> None:
        assert self.lost is not None
        if self._plane is not None:
            self._plane.abort()
        for crossing in [*self._crossings.values(), *self._ended]:
            crossing.lose(self.lost)

    # What crossings call.

    def enter(self, crossing: Crossing) -> None:
        """Let a crossing hear of its lane."""
        self._crossings[crossing.key] = crossing
        if crossing.key in self._asked:
            self.call_soon_threadsafe(self._ask, crossing.key, self._asked.pop(crossing.key))

    def leave(self, crossing: Crossing) -> None:
        """Let a crossing go, whose lane is free again."""
        self._crossings.pop(crossing.key, None)

    def report(self, key: LaneKey, state: WorkerState) -> None:
        """Tell the coordinator."""
        self._control.report(key, state)

    def judge(self, state: WorkerState) -> CollectiveError:
        """Return the verdict on what this worker alone has to tell."""
        return judge({state.rank: state}, self.span.layout, self._order_check).error()

    # Outside of replicas.

    def begin(self, signature: Signature, code: CodeType, offset: int, value: Any) -> Rendezvous:
        """Begin an operation that the next one that is awaited carries over: the creation of a variable.

        Raises:
            CollectiveError: a worker is lost; the others have failed where this one comes to only now.
            ReplicaContextError: this is a merge function of a group.
        """
        check_all_workers_are_here()
        group = self._root_crossing().group
        while self._unheard:
            error = self._unheard.popleft()
            if is_late_for(error, location(code, offset)):
                raise error
        meetings = [group.arrive(member, signature, code, offset, value) for member in group.members]
        made: Rendezvous = meetings[-1]
        return made

    async def perform(
        self, signature: Signature, code: CodeType, offset: int, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Carry out an operation with all workers; return its result.

        Raises:
            CollectiveError: the workers do not meet in it.
            Exception: what it raises on all of them.
        """
        async with self._turn(signature, code, offset):
            meeting = self.begin(signature, code, offset, value)
            await self._carry(meeting, options)
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
        return await open_run(self, signature, code, offset, group, options)

    def close_run(self, crossing: Crossing) -> None:
        """Take back a run's lane."""
        if crossing.clean:
            self._in_use.discard(crossing.lane.index)
        else:
            if not crossing.judged.is_set():
                crossing.tell()  # whatever has ended the run, the others hear of it
            self._ended.append(crossing)

    def close(self) -> None:
        """Tell the others that this worker ends, and leave them."""
        if self._plane is not None:
            self._plane.abort()
        self._control.close()

    @property
    def communicator(self) -> Communicator:
        """Lane 0's, which others are made of."""
        return self._lanes[0].communicator

    # Lane 0.

    def _turn(self, *call: Any) -> AbstractAsyncContextManager[None]:
        """Return a turn at lane 0, for a call: its signature, and its place."""
        return turn(self._enter(), self._prepare, partial(self._left.append, call))

    async def _prepare(self) -> None:
        """Bring lane 0 to where all workers have it, and what was left before its turn to its place in the sequence."""
        await self._end_of_trouble()
        while self._left:
            call = self._left.popleft()
            with suppress(CollectiveError):  # which the next call raises, too, where a worker is lost
                self._abandon(self._root_crossing(), self.begin(*call, None))
            await self._end_of_trouble()

    def _enter(self) -> anyio.Lock:
        """Return the lock of lane 0, in the event loop that runs now."""
        loop, call = current_loop()
        if loop is not self._loop:
            self._loop, self._call, self._thread = loop, call, get_ident()
            self._lock = anyio.Lock()
            if self._root is not None:
                self._root.move_to_this_loop()
        return self._lock

    def _root_crossing(self) -> Crossing:
        if self.lost is not None:
            raise type(self.lost)(self.lost.report)
        if self._root is None:
            layout = self.span.layout
            group = SpannedGroup(layout.devices[layout.rank], self._order_check, self._options)
            group.attach(RootEngine(), 0)
            lane = self._lanes[0]
            lane.begin(self._incidents)
            self._root = Crossing(self, lane, group)
        return self._root

    @property
    def paths(self) -> bool:
        """Whether calls are compared by the places of all their callers."""
        return self._order_check is OrderCheck.CALL_PATH

    @property
    def root_key(self) -> LaneKey:
        """What the present use of lane 0 is called between workers."""
        return self._root_crossing().key

    async def _carry(
        self, last: Rendezvous, options: CommunicationOptions | None, free: Callable[[], int] = lambda: ALL_FREE
    ) -> int:
        """Carry everything that has begun on lane 0 over; return what all workers have free.

        Raises:
            CollectiveError: the workers do not meet.
            Exception: what the last raises on all of them.
        """
        root = self._root_crossing()
        common = 0
        seconds = self._options.merge(options).timeout_seconds
        with move_on_after(seconds) as limit:
            try:
                if self._ended:
                    await self._recover()
                common = await root.carry_over(free())
            except InterruptedStep:
                pass
            except get_cancelled_exc_class():
                if not limit.cancel_called:
                    self._abandon(root, last)
                raise
        if limit.cancelled_caught and not last.complete:
            root.tell(overdue=(last.number, seconds or 0.0))
        if not last.complete:
            await root.judged.wait()
        if last.error is not None:
            raise last.error
        return common

    def _abandon(self, root: Crossing, last: Rendezvous) -> None:
        """Tell the others that this worker's caller was cancelled out of an operation."""
        for member in root.group.members:
            member.abandon(last.number)
        root.tell()

    def _replace_root(self, crossing: Crossing, verdict: Verdict) -> None:
        """Let lane 0 begin anew.

        Where this worker has not come to the operation that failed, it raises the verdict when it does, and does not
        meet there what the others do after they have.
        """
        if crossing is self._root:
            self._root = None
            self._incidents += 1
            self._ended.append(crossing)
            if all(member.sequence <= verdict.report.sequence_number for member in crossing.group.members):
                self._unheard.append(verdict.error())

    async def _end_of_trouble(self) -> None:
        """Wait for the verdict on what was called last, if there was trouble."""
        root = self._root
        if root is not None and root.told:
            await root.judged.wait()

    async def _recover(self) -> None:
        """Bring lanes that were left in the midst of something to where all workers have them.

        They are left in another order on each worker, so that none of them waits for another.
        """
        async with create_task_group() as tasks:
            for crossing in self._ended:
                tasks.start_soon(self._recover_from, crossing)

    async def _recover_from(self, crossing: Crossing) -> None:
        await crossing.judged.wait()
        if self.lost is None and await crossing.catch_up():
            self._ended.remove(crossing)
            if crossing.lane.index:
                self._in_use.discard(crossing.lane.index)

    @property
    def is_here(self) -> bool:
        """Whether this is the thread in which the engine is called."""
        return get_ident() == self._thread

    def settle(self, crossing: Crossing) -> None:
        """Hear that nothing of a crossing that was judged waits for other workers any more."""
        self._control.settle(crossing.key)


def _call_now(fn: Callable[..., object], *args: Any) -> None:
    fn(*args)
