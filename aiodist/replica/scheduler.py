"""The scheduler: starts the replicas of one run, each as a task of its own, and returns when all of them have ended.

    run
     └─ task group ── replica 0, replica 1, …        one task each, started in replica order
                   └─ merge functions                one at a time, each in a task of its own

A replica's task ends in one of four ways, and none of them leaves the task as an exception, so the task group never
chooses for us: it returned; it raised (its own failure, which closes the sync group and cancels the others); it raised
the group's verdict, or an echo of another's failure; it was cancelled. When all have ended, `outcome` says what comes
out. A cancellation of the caller passes through the task group untouched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any

from anyio import create_task_group, get_cancelled_exc_class
from anyio.lowlevel import checkpoint_if_cancelled

from aiodist._core.errors import CollectiveError
from aiodist._core.report import ReplicaState
from aiodist.collective.group import SyncGroup
from aiodist.collective.judging import judge
from aiodist.collective.member import Ending, Member
from aiodist.collective.observer import Observer, who_listens
from aiodist.replica.context import ReplicaContext
from aiodist.replica.current import current
from aiodist.replica.engine import AsyncioEngine, TrioEngine, new_engine
from aiodist.replica.merge import merge
from aiodist.replica.outcome import error_of, note_of_failure, origin_of
from aiodist.replica.stacks import await_chain
from aiodist.replica.stall import StallWatch, watch_here
from aiodist.replica.worker import DeviceWorker

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


async def run_replicas(strategy: Any, group: SyncGroup, calls: Sequence[Call]) -> list[Any]:
    """Run one function call on each replica of a sync group; return what they return, in replica order.

    Args:
        strategy: the strategy that the replicas belong to.
        group: a fresh sync group.
        calls: function, positional and keyword arguments, one for each replica.

    Raises:
        CollectiveError: the replicas did not meet in a collective.
        ExceptionGroup: several replicas failed in different ways.
        Exception: what a replica raised.
        ReplicaContextError: no event loop that aiodist knows is running.
    """
    return await _Run(strategy, group, calls).result()


class _Run:
    """One run: its replicas' tasks, their workers, and what they returned or raised."""

    def __init__(self, strategy: Any, group: SyncGroup, calls: Sequence[Call]) -> None:
        self._strategy = strategy
        self._group = group
        self._calls = calls
        self._results: list[Any] = [None] * group.size
        self._failures: dict[int, BaseException] = {}
        self._handled: dict[int, Exception] = {}
        self._cancellations: dict[int, BaseException] = {}
        self._workers: list[DeviceWorker] = []
        self._running = group.size
        self._watch: StallWatch | None = None

    async def result(self) -> list[Any]:
        """Run the replicas and return what they return."""
        observer = who_listens()
        self._watch = watch_here()
        try:
            async with create_task_group() as tasks:
                engine = new_engine(self._group, tasks, partial(merge, self._strategy))
                self._attach(engine, observer)
                engine.start([partial(self._drive, member) for member in self._group.members])
            verdict = await self._conclude()
            if verdict is not None or self._cancellations:
                await checkpoint_if_cancelled()  # the caller's: on trio, a task group does not raise it
        except get_cancelled_exc_class():
            error = error_of(None, self._failures)
            if error is not None:
                raise error from None
            raise
        except BaseExceptionGroup as group:  # trio's, of a Ctrl-C that meets this task where it waits for the replicas
            if isinstance(group.exceptions[0], KeyboardInterrupt) and len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            self._let_go()
        error = error_of(verdict, self._failures, self._handled)
        if error is None and self._cancellations:
            error = self._cancellations[min(self._cancellations)]
        if error is not None:
            raise error
        return self._results

    def _let_go(self) -> None:
        """Give back what the run has had, however it ends."""
        if self._watch is not None:
            self._watch.remove(self._group)
        for worker in self._workers:
            worker.close()
        if self._group.engine is not None:
            self._group.engine.reducers.close()
        if self._group.observer is not None:
            self._group.observer.run_ended(self._group)

    async def _conclude(self) -> CollectiveError | None:
        if self._group.bridge is not None:
            await self._group.bridge.finish(self._failures)
        return self._group.conclude()

    def _attach(self, engine: AsyncioEngine | TrioEngine, observer: Observer | None) -> None:
        group = self._group
        if observer is not None:
            from aiodist.replica.races import RaceWatch  # which looks at tasks, and is loaded for who observes

            engine.handle = engine.observed_handle
            engine.races = RaceWatch()
        group.attach(engine, get_ident())
        if self._watch is not None:
            self._watch.add(group)
        if observer is not None:
            group.observer = observer
            observer.run_begun(group, self._calls[0][0])

    async def _drive(self, member: Member) -> None:
        """Run one replica's function to its end, and note how it ended."""
        context = self._context(member)
        state = ReplicaState.CANCELLED
        frame = None
        try:
            if not self._group.closed:
                result = self._call(member, context)
                if inspect.isawaitable(result):
                    member.stack = partial(await_chain, result)
                    frame = getattr(result, "cr_frame", None)  # held, it knows when it is over where it returned
                    result = await result
                member.ending = Ending(result, frame)
                self._results[member.position] = result
                state = ReplicaState.EXITED
        except GeneratorExit:
            member.end = ReplicaState.FAILED  # that is all that can be noted where its task is being destroyed
            raise
        except BaseException as error:  # noqa: BLE001  (whatever it is, `outcome` says what comes of it)
            state = self._fail(member, error)
        finally:
            frame = None
            context._retire()
            member.stack = tuple
            self._running -= 1
            if not self._running:
                self._group.engine.close()
        self._group.end(member, state, self._failures.get(member.replica_id))
        if state is ReplicaState.FAILED:
            self._tell_shielded()
        reducers = self._group.engine.reducers
        if reducers.under_way:  # what it has not awaited: its arrays are its own again when the run is over
            await reducers.settle()

    def _call(self, member: Member, context: ReplicaContext) -> Any:
        current.set(context)
        if self._group.observer is not None:
            self._group.observer.started(member)
        fn, args, kwargs = self._calls[member.position]
        return fn(*args, **kwargs)

    def _fail(self, member: Member, error: BaseException) -> ReplicaState:
        """Note what came out of a replica's function, and return how that has ended.

        A replica's own failure, the first, closes the group; what others then run into is an echo.
        """
        group = self._group
        if isinstance(error, get_cancelled_exc_class()):
            if not group.closed:
                self._cancellations[member.replica_id] = error
            return ReplicaState.CANCELLED
        if group.closed and _is_echo(error):
            origin = origin_of(error)
            if origin is not None:
                self._handled[member.replica_id] = origin
            return ReplicaState.FAILED
        if all(error is not known for known in self._failures.values()):
            error.add_note(note_of_failure(group, member))
        self._failures[member.replica_id] = error
        if not group.closed:
            group.close()
        return ReplicaState.FAILED

    def _tell_shielded(self) -> None:
        """Raise in replicas that wait where no cancellation reaches them: nobody will come."""
        for group in self._group.groups():
            for number in sorted(group.open):
                meeting = group.open[number]
                if meeting.has_waiters() and not meeting.agreed:
                    group._fail(meeting, judge(group))

    def _context(self, member: Member) -> ReplicaContext:
        worker = DeviceWorker(member.device, self._group.engine.call_soon_threadsafe)
        self._workers.append(worker)
        return ReplicaContext._of(self._strategy, member, worker)


def _is_echo(error: BaseException) -> bool:
    """Whether an error only tells of the group's own, be it out of a task group of a replica."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_echo(inner) for inner in error.exceptions)
    return isinstance(error, (CollectiveError, get_cancelled_exc_class()))
