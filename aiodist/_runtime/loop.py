"""Event loops: what the scheduler needs of asyncio (including uvloop) and trio.

Replicas are resumed in a fixed order. On asyncio one callback of the loop resumes all tasks that wait in a collective,
one after the other: each task has left its wake-up in the future that it awaits. trio runs the tasks of a batch in
random order, so only the first is rescheduled, and each task, when it runs, reschedules the next before it continues
(`Chain`).
"""

from __future__ import annotations

import importlib
import math
import signal
import sys
import time
from asyncio import AbstractEventLoop, BaseEventLoop, Event, Future, TimerHandle, get_running_loop
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

from anyio import CancelScope, current_effective_deadline, sleep_until
from anyio.abc import TaskGroup

from aiodist._core.errors import ReplicaContextError
from aiodist._runtime.handle import AsyncioHandle, CollectiveHandle, SoloHandle, TrioHandle
from aiodist._runtime.outcome import interrupt_in
from aiodist._runtime.rendezvous import Rendezvous
from aiodist._runtime.stacks import drives_tasks

if TYPE_CHECKING:
    import trio

with suppress(ImportError):  # anyio loads its backend at the first use, which would cost the first run 10 ms
    importlib.import_module("anyio._backends._asyncio")

_MOST_SECONDS_OF_A_TURN = 0.001

Start: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


class _TaskLoop:
    """The common part of both event loops: replicas and merge functions are tasks of one task group."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.was_interrupted = False  # a Ctrl-C was raised in a replica
        self._tasks = tasks
        self._context = copy_context()  # of the run's caller, outside any replica

    def start_task(self, context: Context, fn: Callable[..., Any], *args: Any) -> None:
        """Start a task beside the replicas, in the given context."""
        context.run(self._tasks.start_soon, fn, *args)

    @property
    def ending(self) -> bool:
        """Whether all replicas, or the one that runs now, are being cancelled."""
        if self._tasks.cancel_scope.cancel_called:
            return True
        with suppress(RuntimeError):  # no event loop runs in this thread
            return current_effective_deadline() == -math.inf
        return False

    def cancel(self) -> None:
        """Cancel every replica."""
        self._tasks.cancel_scope.cancel()

    def hold_interrupts_back(self, *classes: type) -> None:
        """Delay a Ctrl-C that arrives in a method of these classes until the program continues."""


class AsyncioLoop(_TaskLoop):
    """asyncio, with any of its event loops.

    Attributes:
        handle: the class of handles.
        new_event: makes an event, in a third of the time that anyio needs to find the running loop.
        wakes_later: `wake` resumes no task in the current callback of the loop, so one that begins to wait in that
            callback is resumed, too.
        clock: returns the time in seconds.
        call_soon_threadsafe: calls a function in the loop, from any thread.
    """

    handle: type[CollectiveHandle[Any]] = AsyncioHandle
    new_event = Event
    wakes_later = True

    def __init__(self, tasks: TaskGroup) -> None:
        super().__init__(tasks)
        self.loop: AbstractEventLoop = get_running_loop()
        self._timer: TimerHandle | None = None
        # asyncio's own clock is the same with one more call; uvloop's has steps of a millisecond
        plain = type(self.loop).time is BaseEventLoop.time or type(self.loop).__module__ == "uvloop"
        self.clock: Callable[[], float] = time.monotonic if plain else self.loop.time
        self.call_soon_threadsafe = self.loop.call_soon_threadsafe
        self.run_next: Any = getattr(self.loop, "run_next", None)  # of the controlled loop, which reorders tasks
        self._resume = self._resume_at_once if self.run_next is None else self._resume_by_choice
        timed = plain and self.run_next is None  # any other clock may stand still until the loop takes a turn
        shown = getattr(self.loop, "_ready", None) if timed else None
        self._ready: Any = (None,) if shown is None else shown  # what the loop calls next; not empty if unknown
        self._woken: deque[Rendezvous] = deque()  # for each, a callback is scheduled
        self._resumes = False  # `_resume_at_once` is running
        self._next: Rendezvous | None = None  # the slot with which it continues
        self._done: Future[None] = Future(loop=self.loop)
        self._done.set_result(None)

    def start(self, replicas: Sequence[Start], names: Sequence[str]) -> None:
        """Start the replicas, in this order."""
        for replica, name in zip(replicas, names, strict=True):
            self._tasks.start_soon(replica, name=name)

    def wake_failed(self, slot: Rendezvous) -> None:
        """Resume the waiters of a collective that has failed, in replica order, before they can be cancelled."""
        for future in slot.waiters:
            if future is not None and not (future.done() or self.loop.is_closed()):
                future.set_result(None)

    def wake(self, slot: Rendezvous) -> None:
        """Resume the waiters of a complete collective, in replica order, after what is ready now."""
        if self._resumes and self._next is None and not self._ready:  # the callback would be the next in any case
            self._next = slot
        else:
            self._woken.append(slot)
            self.loop.call_soon(self._resume, context=self._context)

    @drives_tasks
    def _resume_at_once(self) -> None:  # noqa: C901  (every wake-up takes this path: one frame)
        """Resume the waiters of a slot one after the other; each runs to its next await.

        Their futures are never done: this takes the tasks' wake-ups from the futures and calls them. A future without
        one belongs to a task that was cancelled, or has been resumed. If a Ctrl-C is raised in a task or here, the
        other tasks are resumed in another callback.

        If this completes their next collective and nothing else is ready, they are resumed again without a turn of the
        loop, which costs as much as a small collective. Timers and I/O wait for a millisecond at most.
        """
        slot, done = self._woken.popleft(), self._done  # no argument: a callback's are kept alive until it returns
        resumed: Any = None  # a future, and the wake-up taken from it
        began = None
        self._resumes = True
        try:
            while True:
                slot.released = True
                for future in slot.waiters:
                    if future is not None and (callbacks := future._callbacks):  # noqa: SLF001
                        wake, context = callbacks[0]
                        resumed = future, wake, context
                        future.remove_done_callback(wake)
                        context.run(wake, done)
                following = self._next
                if following is None:
                    break
                self._next = None
                slot = following
                if began is None:
                    began = slot.started
                elif slot.started - began > _MOST_SECONDS_OF_A_TURN:
                    self._woken.append(slot)
                    self.loop.call_soon(self._resume, context=self._context)
                    break
        except BaseException as error:
            if resumed is not None and not isinstance(error, Exception):
                future, wake, context = resumed
                if future in slot.waiters and not future._callbacks:  # noqa: SLF001  (it has not been resumed yet)
                    future.add_done_callback(wake, context=context)
            following = self._next
            self._resumes, self._next = False, None
            self.wake(slot)
            if following is not None:
                self.wake(following)
            raise
        self._resumes = False

    def _resume_by_choice(self) -> None:
        """Let the controlled loop resume the waiters of a slot in an order of its choice."""
        slot = self._woken.popleft()
        slot.released = True
        wakes = []
        for future in slot.waiters:
            if future is not None and (callbacks := future._callbacks):  # noqa: SLF001
                wake, context = callbacks[0]
                future.remove_done_callback(wake)
                future.set_result(None)  # a cancellation from now on does not wake the task a second time
                wakes.append((wake, self._done, context))
        self.run_next(wakes)

    def call_at(self, at: float, fn: Callable[[], object]) -> None:
        """Call a function at that time of ``clock``, instead of what was to be called before."""
        self.close()
        self._timer = self.loop.call_at(at, fn, context=self._context)

    def call_soon(self, fn: Callable[..., object], /, *args: Any) -> None:
        """Call a function in the loop, after what is ready now, in the context of the run's caller."""
        self.loop.call_soon(fn, *args, context=self._context)

    @property
    def interrupted(self) -> bool:
        """Whether a Ctrl-C is cancelling the run: asyncio's runner, which handles the signal, counts them."""
        runner = getattr(getattr(signal.getsignal(signal.SIGINT), "func", None), "__self__", None)
        return self.was_interrupted or getattr(runner, "_interrupt_count", 0) > 0

    def pending(self) -> list[Context] | None:
        """Return the contexts of scheduled callbacks and timers; None if the loop does not show them.

        asyncio's own loops do, in undocumented attributes; uvloop's does not.
        """
        loop: Any = self.loop
        if not isinstance(loop, BaseEventLoop):
            return None
        handles = (*getattr(loop, "_scheduled", ()), *getattr(loop, "_ready", ()))
        return [handle._context for handle in handles if not handle.cancelled()]  # noqa: SLF001

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()


class TrioLoop(_TaskLoop):
    """trio, also as the guest of another loop, with the attributes of `AsyncioLoop`."""

    handle: type[CollectiveHandle[Any]] = TrioHandle
    wakes_later = False

    def __init__(self, tasks: TaskGroup) -> None:
        from trio import Event, lowlevel

        super().__init__(tasks)
        self.new_event = Event
        token = lowlevel.current_trio_token()
        self._timer = CancelScope()
        self.chain = Chain()
        self.clock = lowlevel.current_clock().current_time  # this loop's own, which also works after the run
        self.call_soon = self.call_soon_threadsafe = token.run_sync_soon  # in a context of trio's own
        lowlevel.enable_ki_protection(TrioLoop._start_next)

    def start(self, replicas: Sequence[Start], names: Sequence[str]) -> None:
        """Start the replicas, in this order: each starts the next, because trio runs a batch in random order."""
        self._start_next(iter(zip(replicas, names, strict=True)))

    def _start_next(self, left: Iterator[tuple[Start, str]]) -> None:
        following = next(left, None)
        if following is not None:
            replica, name = following
            self._tasks.start_soon(self._start_one, replica, left, name=name)

    async def _start_one(self, replica: Start, left: Iterator[tuple[Start, str]]) -> None:
        self._start_next(left)
        await replica()

    def wake(self, slot: Rendezvous) -> None:
        """Resume the waiters of a complete collective, in replica order."""
        slot.released = True
        self.chain.extend(parked for parked in slot.waiters if parked is not None)

    def wake_failed(self, slot: Rendezvous) -> None:
        """Resume the waiters of a collective that has failed, before they can be cancelled."""
        self.chain.wake_now(parked for parked in slot.waiters if parked is not None)

    def call_at(self, at: float, fn: Callable[[], object]) -> None:
        """Call a function at that time of ``clock``, instead of what was to be called before.

        This happens even if the run's caller and all its tasks are cancelled, because a replica may be shielded.
        """
        self.close()
        self._timer = CancelScope(shield=True)
        self._context.run(self._tasks.start_soon, self._call_at, at, fn, self._timer)

    async def _call_at(self, at: float, fn: Callable[[], object], scope: CancelScope) -> None:
        with scope:
            await sleep_until(at)
            fn()

    def hold_interrupts_back(self, *classes: type) -> None:
        """Let trio delay a Ctrl-C while methods of these classes run; it is then raised in the main task.

        So do the functions that start tasks: a Ctrl-C between making a coroutine and starting it would leave that never
        awaited.
        """
        from trio import Nursery

        for each in classes:
            _hold_interrupts_back(each)
        for group in (type(self._tasks), Nursery):
            _hold_interrupts_back(group, "start_soon", "create_task")

    @property
    def interrupted(self) -> bool:
        """Whether a Ctrl-C is cancelling the run: a nursery around this task, or its own, holds it."""
        from trio.lowlevel import current_task

        nursery = current_task().parent_nursery
        while nursery is not None and not self.was_interrupted:
            errors = getattr(nursery, "_pending_excs", ())
            self.was_interrupted = any(interrupt_in(error) is not None for error in errors)
            nursery = nursery.parent_task.parent_nursery
        return self.was_interrupted

    def pending(self) -> list[Context] | None:
        """Return no contexts: trio runs everything in tasks."""
        return []

    def close(self) -> None:
        """Cancel the timer."""
        self._timer.cancel()


@cache
def _hold_interrupts_back(cls: type, *names: str) -> None:
    from trio.lowlevel import enable_ki_protection

    for base in cls.__mro__:
        ours = base.__module__.partition(".")[0] == "aiodist"
        for name, member in vars(base).items():
            function = getattr(member, "fget", getattr(member, "__func__", member))
            if isinstance(function, FunctionType) and (ours or name in names):
                enable_ki_protection(function)


@dataclass(slots=True, eq=False)
class Parked:
    """A task on trio that waits for its turn in a `Chain`."""

    task: trio.lowlevel.Task
    gone: bool = False  # it no longer waits for its turn: it was cancelled, or woken by `wake_now`
    linked: bool = False  # its turn has come, so it must wake the next
    suspended: bool = False  # until then, it cannot be rescheduled
    woken: bool = False  # `wake_now` came before it was suspended


class Chain:
    """Tasks on trio that are resumed one after the other.

    If a Ctrl-C interrupted a task that has been added here and is not suspended yet, trio would be asked to reschedule
    a task that does not wait. So `park` delays it, as trio's own primitives do, until the task continues.
    """

    def __init__(self) -> None:
        from trio import lowlevel

        self._lowlevel = lowlevel
        self._parked: deque[Parked] = deque()
        self._linked = False
        _hold_interrupts_back(Chain)

    def new_parked(self) -> Parked:
        """Return a place for the current task, which it takes with ``park``."""
        return Parked(self._lowlevel.current_task())

    def extend(self, parked: Iterable[Parked]) -> None:
        """Resume these tasks in this order, after those before them."""
        self._parked.extend(parked)
        if not self._linked:
            self._wake_next()

    def wake_now(self, parked: Iterable[Parked]) -> None:
        """Resume these tasks at once, in any order."""
        for one in parked:
            if not one.suspended:
                one.woken = True
            elif not one.gone:
                one.gone = True  # so that nothing else wakes it
                self._lowlevel.reschedule(one.task)

    async def park(self, parked: Parked) -> None:
        """Suspend the current task until its turn comes; if that has come already, only yield."""
        if parked.woken:
            return
        if parked.linked:
            try:
                await self._lowlevel.checkpoint()
            finally:
                self._wake_next()
            return
        succeeded = self._lowlevel.Abort.SUCCEEDED

        def abort(_: object) -> trio.lowlevel.Abort:
            parked.gone = True
            return succeeded

        parked.suspended = True
        await self._lowlevel.wait_task_rescheduled(abort)
        linked: bool = parked.linked  # which the chain may have changed meanwhile
        if linked:
            self._wake_next()

    def _wake_next(self) -> None:
        self._linked = False
        while self._parked:
            one = self._parked.popleft()
            if not one.gone:
                self._linked = one.linked = True
                if one.suspended:
                    self._lowlevel.reschedule(one.task)
                return


class SoloLoop:
    """Replaces an event loop for a single replica outside any run, whose collectives are complete at once."""

    handle = SoloHandle
    ending = False
    wakes_later = False

    def __init__(self, merge: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        self.clock = time.monotonic
        self.merge = merge  # called in the await of a merge_call, by a task that can be cancelled

    def call_soon(self, fn: Callable[..., object], /, *args: Any) -> None:
        """Call ``fn`` now."""
        fn(*args)

    call_soon_threadsafe = call_soon

    def wake(self, *_: object) -> None:
        """Do nothing: nothing waits, nothing can be late, and there are no tasks."""

    wake_failed = call_at = start_task = cancel = close = wake


def new_loop(tasks: TaskGroup) -> AsyncioLoop | TrioLoop:
    """Return the running event loop, for a run whose tasks are in that group."""
    return TrioLoop(tasks) if running_on_trio() else AsyncioLoop(tasks)


def current_loop() -> tuple[Any, Callable[..., object]]:
    """Return the running event loop, and its function that calls another one in the loop from any thread."""
    if running_on_trio():
        from trio.lowlevel import current_trio_token

        token = current_trio_token()
        return token, token.run_sync_soon
    try:
        loop = get_running_loop()
    except RuntimeError as error:
        raise ReplicaContextError("replicas run on asyncio or trio, and neither is running here") from error
    return loop, loop.call_soon_threadsafe


def running_on_trio() -> bool:
    """Return whether the current task is a task of trio (also as a guest of another loop)."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())
