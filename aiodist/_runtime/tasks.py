"""The tasks of a run's replicas: what their functions return or raise, and what the run raises.

    run_replicas
     └─ task group ── replica 0, replica 1, …        one task each, started in replica order
                   └─ merge functions                one at a time, each in a task of its own

No exception leaves a replica's task, so the task group never decides what is raised; when all replicas have ended,
`outcome` does. A cancellation of the caller passes through the task group unchanged.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

from anyio import create_task_group, get_cancelled_exc_class
from anyio.lowlevel import checkpoint_if_cancelled

from aiodist._core.errors import CollectiveError
from aiodist._core.instrument import Observer, current_observer
from aiodist._core.ledger import Member
from aiodist._core.terms import ReplicaState
from aiodist._runtime import outcome, stacks
from aiodist._runtime.arguments import check_awaited
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import current
from aiodist._runtime.loop import AsyncioLoop, TrioLoop, new_loop
from aiodist._runtime.participant import Participant
from aiodist._runtime.scheduler import Run
from aiodist._runtime.stall import StallWatch, watch_here

ReplicaCall = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def run_replicas(run: Run, calls: Sequence[ReplicaCall]) -> Coroutine[Any, Any, list[Any]]:
    """Run one function call on each replica of a new run; return their results in replica order."""
    return _Replicas(run, calls).results()


class _Replicas:
    """The replicas of one run: their tasks, their threads, and what they returned or raised."""

    def __init__(self, run: Run, calls: Sequence[ReplicaCall]) -> None:
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
        observer, name = current_observer(), stacks.function_name(self._calls[0][0])
        self._watch = watch_here()
        try:
            async with create_task_group() as tasks:
                self._attach(new_loop(tasks), observer, name)
                members = run.ledger.root.members
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
                raise outcome.without_frames_before(error) from None
            raise cancellation.with_traceback(None)  # noqa: B904
        except BaseExceptionGroup as group:  # trio's, of a Ctrl-C that meets this task where it waits for the replicas
            interrupt = outcome.interrupt_in(group)
            if interrupt is not None:
                raise outcome.without_frames_before(interrupt) from None
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
            raise outcome.without_frames_before(error)
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

    def _attach(self, loop: AsyncioLoop | TrioLoop, observer: Observer | None, name: str) -> None:
        run = self._run
        run.attach(loop, get_ident())
        loop.hold_interrupts_back(ReplicaContext, Participant, loop.handle)
        if self._watch is not None:
            self._watch.add(run)
        if observer is not None:
            from aiodist._runtime.observed import observed  # loaded only for observers

            run.observer, run.handle = observed(run, observer)
            observer.run_begun(run, name)

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
