"""Engines: what a sync group needs of the event loop that it runs on, for asyncio (uvloop too) and trio."""

from __future__ import annotations

import importlib
import sys
import time
from asyncio import (
    AbstractEventLoop,
    BaseEventLoop,
    Future,
    InvalidStateError,
    TimerHandle,
    all_tasks,
    get_running_loop,
)
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeAlias

from anyio import CancelScope, sleep_until
from anyio.abc import TaskGroup

from aiodist._collectives.work import Work
from aiodist._core.errors import ReplicaContextError
from aiodist.collective.rendezvous import Rendezvous
from aiodist.replica.certainty import contexts_of, only_wait, trio_tasks
from aiodist.replica.chain import Chain, Parked
from aiodist.replica.handle import (
    AsyncioHandle,
    CollectiveHandle,
    ObservedAsyncioHandle,
    ObservedTrioHandle,
    SoloHandle,
    TrioHandle,
    watched,
)
from aiodist.replica.reducers import Done, Reducers

with suppress(
    ImportError
):  # anyio loads its backend at the first use, and 10 ms belong to an import, not to a first run
    importlib.import_module("anyio._backends._asyncio")

if TYPE_CHECKING:
    from aiodist._core.report import Location
    from aiodist._runtime.waits import Look
    from aiodist.collective.group import SyncGroup
    from aiodist.replica.races import RaceWatch

Start: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
Merge: TypeAlias = "Callable[[SyncGroup, Rendezvous], Coroutine[Any, Any, None]]"


class _TaskEngine:
    """What engines of event loops have in common: replicas and merge functions are tasks of one task group.

    Args:
        group: the run's own sync group; the run's other groups use the engine, too.
        tasks: the task group that the replicas run in.
        merge: runs the merge function of a meeting.

    Attributes:
        reducers: the run's worker threads.
        races: looks for tasks of a replica that race, in a run that is observed.
    """

    reducers: Reducers
    races: RaceWatch

    def __init__(self, group: SyncGroup, tasks: TaskGroup, merge: Merge) -> None:
        self._group = group
        self._tasks = tasks
        self._merge = merge
        self._context = copy_context()  # that of the run's caller, which is no replica's

    def start_merge(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """Run the merge function of a meeting in a task of its own, with replica 0's context variables."""
        meeting.values[0].context.run(self._tasks.start_soon, self._merge, group, meeting)

    watched = staticmethod(watched)

    def carry_out(self, work: Work, done: Done) -> None:
        """Let worker threads make a result, and call ``done`` in the loop with what comes of it."""
        self.reducers.carry_out(work, done)

    def look(self, replicas: Collection[int], calls: Mapping[int, Location]) -> Look:
        """Look at the tasks of these replicas: what they wait for, as far as it can be seen."""
        from aiodist.replica.looking import look_at_replicas  # loaded when something has gone wrong

        return look_at_replicas(self._group, replicas, calls)

    @property
    def ending(self) -> bool:
        """Whether the replicas are being cancelled, all of them."""
        return self._tasks.cancel_scope.cancel_called

    def cancel(self) -> None:
        """Cancel every replica."""
        self._tasks.cancel_scope.cancel()


class AsyncioEngine(_TaskEngine):
    """An engine on asyncio, with any of its event loops."""

    handle: type[CollectiveHandle[Any]] = AsyncioHandle
    observed_handle = ObservedAsyncioHandle
    wakes_at_once = 512

    def __init__(self, group: SyncGroup, tasks: TaskGroup, merge: Merge) -> None:
        super().__init__(group, tasks, merge)
        self.loop: AbstractEventLoop = get_running_loop()
        self._alarm: TimerHandle | None = None
        plain = type(self.loop).time is BaseEventLoop.time
        self.clock: Callable[[], float] = time.monotonic if plain else self.loop.time  # the same, a call shorter
        own = isinstance(self.loop, BaseEventLoop)  # uvloop's stands still within a turn, and counts milliseconds
        self.fine_clock = self.clock if own else time.monotonic
        self.call_soon = self.loop.call_soon
        self.call_soon_threadsafe = self.loop.call_soon_threadsafe
        self.reducers = Reducers(self.call_plainly, self.call_soon_threadsafe)

    def start(self, replicas: Sequence[Start]) -> None:
        """Start the replicas, in this order."""
        for replica in replicas:
            self._tasks.start_soon(replica)

    def wake(self, waiters: Sequence[Future[None] | None]) -> None:
        """Resume these, in this order."""
        for waiter in waiters:
            if waiter is not None:
                try:
                    waiter.set_result(None)
                except InvalidStateError:  # cancelled in this very turn of the loop
                    continue

    wake_failed = wake

    def wake_in_turns(self, waiters: list[Future[None] | None], begin: int = 0) -> None:
        """Resume these, in this order, so many in each turn of the loop.

        Each that is woken is an entry among the loop's callbacks until its turn comes. Thousands of new entries at a
        time would set off the garbage collector, again and again, and it looks at all that all the replicas wait in.
        """
        end = begin + self.wakes_at_once
        self.wake(waiters[begin:end])
        waiters[begin:end] = [None] * len(waiters[begin:end])
        if end < len(waiters):
            self.call_plainly(self.wake_in_turns, waiters, end)

    def alarm(self, at: float) -> None:
        """Call the group's `ring` at that time, and not at the time that was set before."""
        self.close()
        self._alarm = self.loop.call_at(at, self._group.ring, context=self._context)

    def call_plainly(self, fn: Callable[..., object], /, *args: Any) -> None:
        """Call ``fn`` in the loop, after what is ready now, with no replica's context variables."""
        self.loop.call_soon(fn, *args, context=self._context)

    def only_wait(self, root: SyncGroup, replicas: Collection[int], waiters: Sequence[Future[None]]) -> set[int]:
        """Return those replicas of which it is certain that they do nothing but wait in collectives."""
        waiting = [context for waiter in waiters if not waiter.done() for context in contexts_of(waiter)]
        return only_wait(root, replicas, waiting, list(all_tasks(self.loop)))

    def close(self) -> None:
        """Leave nothing behind."""
        if self._alarm is not None:
            self._alarm.cancel()


class TrioEngine(_TaskEngine):
    """An engine on trio."""

    handle: type[CollectiveHandle[Any]] = TrioHandle
    observed_handle = ObservedTrioHandle
    wakes_at_once = sys.maxsize

    def __init__(self, group: SyncGroup, tasks: TaskGroup, merge: Merge) -> None:
        from trio import lowlevel

        super().__init__(group, tasks, merge)
        token = lowlevel.current_trio_token()
        self._alarm = CancelScope()
        self.chain = Chain()
        self.clock = lowlevel.current_clock().current_time  # also after the run, and what it reads is this loop's own
        self.fine_clock = self.clock
        self.call_soon = token.run_sync_soon
        self.call_soon_threadsafe = token.run_sync_soon
        self.reducers = Reducers(self.call_plainly, self.call_soon_threadsafe)

    def start(self, replicas: Sequence[Start]) -> None:
        """Start the replicas, in this order: each starts the next, for trio runs a batch in any order."""
        if replicas:
            self._tasks.start_soon(self._start_one, replicas, 0)

    async def _start_one(self, replicas: Sequence[Start], index: int) -> None:
        if index + 1 < len(replicas):
            self._tasks.start_soon(self._start_one, replicas, index + 1)
        await replicas[index]()

    def wake(self, waiters: Sequence[Parked | None]) -> None:
        """Resume these, in this order."""
        self.chain.extend(parked for parked in waiters if parked is not None)

    wake_in_turns = wake

    def wake_failed(self, waiters: Sequence[Parked | None]) -> None:
        """Resume these before they can be cancelled."""
        self.chain.wake_now(parked for parked in waiters if parked is not None)

    def alarm(self, at: float) -> None:
        """Call the group's `ring` at that time, and not at the time that was set before."""
        self.close()
        self._alarm = CancelScope()
        self._context.run(self._tasks.start_soon, self._ring_at, at, self._alarm)

    def call_plainly(self, fn: Callable[..., object], /, *args: Any) -> None:
        """Call ``fn`` in the loop, after what is ready now; trio does that in a context of its own."""
        self.call_soon(fn, *args)

    def only_wait(self, root: SyncGroup, replicas: Collection[int], waiters: Sequence[Parked]) -> set[int]:
        """Return those replicas of which it is certain that they do nothing but wait in collectives."""
        waiting = [parked.task.context for parked in waiters if parked.suspended and not parked.gone]
        return only_wait(root, replicas, waiting, trio_tasks())

    async def _ring_at(self, at: float, scope: CancelScope) -> None:
        with scope:
            await sleep_until(at)
            self._group.ring()

    def close(self) -> None:
        """Leave nothing behind."""
        self._alarm.cancel()


class SoloEngine:
    """The engine of a replica that is alone and outside any run: whatever it asks for is complete at once."""

    handle = SoloHandle
    ending = False
    wakes_at_once = 1

    def __init__(self, merge: Merge) -> None:
        self.clock = time.monotonic
        self.merge = merge

    def call_soon(self, fn: Callable[[], object], /) -> None:
        """Call ``fn`` now."""
        fn()

    def wake(self, waiters: Sequence[Any]) -> None:
        """Nobody waits."""

    wake_in_turns = wake_failed = wake

    def alarm(self, at: float) -> None:
        """Nothing can be late."""

    def call_plainly(self, fn: Callable[..., object], /, *args: Any) -> None:
        """Call ``fn`` now."""
        fn(*args)

    watched = staticmethod(watched)

    def only_wait(self, *_: object) -> set[int]:
        """Return none of them: who is alone waits for nobody."""
        return set()

    def start_merge(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """Leave the merge function to the await, which is in a task that can be cancelled."""

    def carry_out(self, work: Work, done: Done) -> None:
        """Make the result at once."""
        try:
            result = work.carry_out()
        except Exception as error:  # noqa: BLE001  (whatever it is, it is for the await)
            done(None, error)
        else:
            done(result, None)

    def look(self, replicas: Collection[int], calls: Mapping[int, Location]) -> Look:  # noqa: ARG002  (the protocol's)
        """See nothing: a replica that is alone waits for no other."""
        from aiodist._runtime.waits import Look

        return Look()

    def cancel(self) -> None:
        """There is no task to cancel."""


def new_engine(group: SyncGroup, tasks: TaskGroup, merge: Merge) -> AsyncioEngine | TrioEngine:
    """Return an engine on the event loop that runs now.

    Raises:
        ReplicaContextError: none runs, or one that aiodist does not know.
    """
    if running_on_trio():
        return TrioEngine(group, tasks, merge)
    try:
        return AsyncioEngine(group, tasks, merge)
    except RuntimeError as error:
        raise ReplicaContextError("replicas run on asyncio or trio, and neither runs here") from error


def current_loop() -> tuple[Any, Callable[..., object]]:
    """Return the event loop that runs now, and its function that calls others in it, from any thread.

    Raises:
        ReplicaContextError: none runs, or one that aiodist does not know.
    """
    if running_on_trio():
        from trio.lowlevel import current_trio_token

        token = current_trio_token()
        return token, token.run_sync_soon
    try:
        loop = get_running_loop()
    except RuntimeError as error:
        raise ReplicaContextError("replicas run on asyncio or trio, and neither runs here") from error
    return loop, loop.call_soon_threadsafe


def running_on_trio() -> bool:
    """Return whether the current task is one of trio's (also as a guest of another loop)."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())
