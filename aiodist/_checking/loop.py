"""The controlled loop: an asyncio event loop on which the order of ready tasks is chosen, and time is virtual.

In the default order it runs what asyncio's own loop runs, in the same order. It differs in four things:

- **Order.** As on asyncio, a turn runs what was ready when it began. When a task is to run and others of its turn are
  ready, too, the schedule may choose another, or defer the first until nothing else can run. Only tasks change places,
  with each other: a callback that precedes a chosen task runs before it, because libraries rely on that. Every task
  gets its turn, so one that waits for another in a loop of `sleep(0)` does not wait forever.
- **Time** stands still while anything can run, and jumps to the next timer when nothing can. While a thread is at work
  or a file descriptor is watched, the loop waits for them in real time, and its clock follows.
- **Threads.** Calls from other threads are taken when nothing else can run and the threads at work have had a moment to
  send theirs, in an order that does not depend on which thread was faster.
- **Deadlock.** With nothing ready, no timer, and nothing outside that could act, nothing can ever run again.

`_run_once` does this in place of asyncio's method of that name. It relies on what has not changed since asyncio was
written: the queue of ready handles and the heap of timers (``_ready``, ``_scheduled``), a handle's attributes,
``_process_events``, ``_write_to_self``, ``_check_closed``, ``_stopping`` and ``_signal_handlers``; and that tasks and
futures schedule by ``loop.call_soon``, as on every alternative loop. Calls from threads are ordered by the task that
waits for them (``_waiters``, ``_callbacks``) or, where none is found, by the threads' names. `asyncio.run` and its like
make their loops by ``asyncio.events.new_event_loop``, which `making_loops` replaces.
"""

# ruff: noqa: SLF001  (see above)

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import signal
import threading
import time
from asyncio import Handle, Task, TimerHandle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from itertools import chain
from threading import current_thread, main_thread
from traceback import walk_stack
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from aiodist._checking.schedule import DEFER, Change, Order
from aiodist._checking.threads import at_work, let_threads_finish
from aiodist._core.errors import CollectiveError
from aiodist._core.terms import Location, Reason
from aiodist._runtime.blocking import BlockedLoop

Events: TypeAlias = list[tuple[selectors.SelectorKey, int]]

_RESOLUTION = time.get_clock_info("monotonic").resolution
"""A timer that is due within this time is due now, as on asyncio."""
_METHODS = frozenset(dir(Task))
"""Methods whose calls are no steps of a task: ``call_soon(task.cancel)`` is an ordinary callback."""
_MOST_TURNS = 200
"""After so many turns deferred tasks and calls from threads run, because others may wait for them in a loop."""
_POLL_SECONDS = 0.05
_DAY = 86400.0
"""How often, in virtual time, the loop looks for replicas that only sleep and poll,"""
_MOST_JUMPS = 1000
"""and how often its clock must have jumped since: a few long sleeps are no polling."""
_BEFORE_A_JUMP = 0.0002
_BEFORE_A_PROOF = 0.005


class Step(Handle):
    """A callback that resumes a task; schedules reorder these."""

    __slots__ = ()
    _callback: Any
    _context: Context

    @property
    def task(self) -> Task[Any]:
        """The task."""
        task: Task[Any] = self._callback.__self__
        return task

    @property
    def context(self) -> Context:
        """The task's context variables."""
        return self._context


class Timer(TimerHandle):
    """A callback at a time; of those at the same time, the one that was requested first runs first.

    asyncio leaves that to the shape of its heap, since in real time it hardly ever happens. Here a run would depend on
    aiodist's own timers, and so on how long it looks for deadlocks.
    """

    __slots__ = ("number",)
    number: int
    _scheduled: bool

    def __lt__(self, other: Any) -> bool:
        return (self.when(), self.number) < (other.when(), other.number)


OnPoint: TypeAlias = Callable[[int, Step, Step | None], object]
"""Called at a point with its number, the step whose turn it is, and the one that runs instead: the same if it is
deferred, None if nothing changes."""
OnStuck: TypeAlias = "Callable[[ControlledLoop, Reason], object]"
"""Called when runs cannot continue (`Reason.DEADLOCK`), have taken too long (`Reason.TIMEOUT`), or may be polling for
ever (`Reason.LIVELOCK`). Makes something run or raises an error out of the loop; in the last case it may do nothing."""


@dataclass(slots=True, eq=False)
class Execution:
    """One execution of a program, on one controlled loop or on several, one after the other."""

    order: Order
    on_stuck: OnStuck
    on_point: OnPoint | None = None
    deadline: float = math.inf  # on the real clock
    points: int = 0  # so far
    changes: list[Change] = field(default_factory=list)  # to the default order, so far


class ControlledLoop(asyncio.SelectorEventLoop):
    """An event loop of an execution, which controls the order of ready tasks, and the clock."""

    proves_deadlock = True  # so the stall watch sets no timer, which would count as something to come
    _ready: deque[Handle]
    _scheduled: list[TimerHandle]
    _stopping: bool
    _process_events: Callable[[Events], None]
    _write_to_self: Callable[[], None]
    _check_closed: Callable[[], None]

    def __init__(self, execution: Execution) -> None:
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        self._poll, self._watched = selector.select, selector.get_map()
        self._own = len(self._watched)  # its wake-up pipe
        self.execution = execution
        self._now = 0.0
        self._jumps = 0
        self._look_at = _DAY
        self._batch: deque[Handle] = deque()  # what is left of this turn
        self._steps = 0  # how many of these are steps
        self._deferred: list[Step] = []
        self._turns_since_rest = 0
        self._from_threads: deque[tuple[str, Handle]] = deque()  # by the thread's name
        self._numbers: WeakKeyDictionary[Task[Any], int] = WeakKeyDictionary()
        self._count = itertools.count()

    # A turn.

    def _run_once(self) -> None:
        """Run what is ready now, then I/O and timers, as asyncio does; what becomes ready meanwhile waits."""
        execution, batch, ready = self.execution, self._batch, self._ready
        order, on_point = execution.order, execution.on_point
        self._look_outside()
        handle: Handle | None
        batch += ready  # after what an interruption has left
        ready.clear()
        self._steps = [type(handle) for handle in batch].count(Step)
        while batch:
            handle = batch.popleft()
            if type(handle) is Step:
                self._steps -= 1
                if self._steps:
                    point = execution.points
                    execution.points = point + 1
                    choice = order(point, self._steps + 1)
                    if choice or on_point is not None:
                        handle = self._chosen(point, handle, choice)
                        if handle is None:
                            continue
            if not handle._cancelled:
                handle._run()
        self._turns_since_rest += 1
        is_long = self._turns_since_rest > _MOST_TURNS
        if is_long:
            self._take_calls_of_threads()
        if is_long or not ready:
            ready += self._deferred
            self._deferred.clear()
            self._turns_since_rest = 0

    def _look_outside(self) -> None:
        """Make events and timers that are due run in this turn; if nothing is ready, wait for something."""
        ready, timers = self._ready, self._scheduled
        if time.monotonic() > self.execution.deadline:
            self.execution.on_stuck(self, Reason.TIMEOUT)
        while timers and timers[0].cancelled():
            heapq.heappop(timers)
        if not (ready or self._batch or self._stopping):
            self._process_events(self._wait_for_more(timers[0].when() if timers else math.inf))
        elif len(self._watched) > self._own:
            self._process_events(self._poll(0))
        while timers and timers[0].when() <= self._now + _RESOLUTION:
            ready.append(heapq.heappop(timers))

    # Time, threads and file descriptors.

    def _wait_for_more(self, when: float) -> Events:
        """Wait for events in real time; or jump to the next timer, which is due at ``when``, or report a deadlock."""
        for is_last in (False, True):  # a thread may have sent something and ended since the first look
            events = self._poll(0)
            if events or self._take_calls_of_threads():
                return events
            pause = _BEFORE_A_PROOF if when == math.inf else _BEFORE_A_JUMP
            may_act = len(self._watched) > self._own or getattr(self, "_signal_handlers", None)
            if not is_last and (may_act or at_work(pause=pause)):
                began = time.monotonic()  # not for long, because a thread may end without sending anything
                events = self._poll(min(when - self._now, _POLL_SECONDS))
                self._now += time.monotonic() - began
                return events
        if when == math.inf:
            self.execution.on_stuck(self, Reason.DEADLOCK)
        else:
            self._now = max(self._now, when)
            self._jumps += 1
            if self._now >= self._look_at and self._jumps >= _MOST_JUMPS:
                self._jumps, self._look_at = 0, self._now + _DAY
                self.execution.on_stuck(self, Reason.LIVELOCK)
        return []

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """Call a function at a time."""
        self._check_closed()
        timer = Timer(when, callback, args, self, context)
        timer.number, timer._scheduled = next(self._count), True
        heapq.heappush(self._scheduled, timer)
        return timer

    def time(self) -> float:
        """Return the virtual time, in seconds since the loop was made."""
        return self._now

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Call a function for another thread, once nothing else can run."""
        if callback == self.create_task:  # of the end of an asynchronous generator, in this thread
            return self.call_soon(callback, *args, context=context)
        self._check_closed()
        handle = Handle(callback, args, self, context)
        self._from_threads.append((threading.current_thread().name, handle))
        self._write_to_self()
        return handle

    def _take_calls_of_threads(self) -> bool:
        """Make the calls from other threads ready; return whether there are any.

        Threads that are at work get a moment to send theirs, so that a run does not depend on which is faster.
        """
        if not self._from_threads:
            return False
        began = time.monotonic()
        let_threads_finish()
        self._now += time.monotonic() - began
        sent = [self._from_threads.popleft() for _ in range(len(self._from_threads))]
        sent.sort(key=lambda one: (self._first_woken(one[1]), len(one[0]), one[0]))
        self._ready.extend(call for _, call in sent)
        return True

    def _first_woken(self, handle: Any) -> int:
        """Return the least number of a task that waits for a future or event among a call's arguments, or its owner."""
        things = (*(handle._args or ()), getattr(handle._callback, "__self__", None))
        events = (getattr(thing, "_event", thing) for thing in things)  # anyio's event has asyncio's inside
        futures = chain.from_iterable(getattr(event, "_waiters", None) or (event,) for event in events)
        wakes: Iterable[Any] = chain.from_iterable(getattr(future, "_callbacks", None) or () for future in futures)
        tasks = (getattr(wake, "__self__", None) for wake, _ in wakes)
        return min((self.number_of(task) for task in tasks if isinstance(task, Task)), default=-1)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an exception that nobody has handled, except a report on replicas, which the loop's caller gets."""
        if not isinstance(context.get("exception"), CollectiveError):
            super().default_exception_handler(context)

    # Order.

    def create_task(self, coro: Any, **options: Any) -> Task[Any]:
        """Start a task; tasks and timers are numbered as they are created."""
        task: Task[Any] = super().create_task(coro, **options)
        self._numbers[task] = next(self._count)
        return task

    def number_of(self, task: Task[Any]) -> int:
        """Return a task's number."""
        return self._numbers.get(task, -1)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Call a function in the next turn."""
        self._check_closed()
        owner = getattr(callback, "__self__", None)
        is_step = isinstance(owner, Task) and getattr(callback, "__name__", "") not in _METHODS
        handle = (Step if is_step else Handle)(callback, args, self, context)
        self._ready.append(handle)
        if is_step and args and args[0].cancelled():
            self._sort_in()
        return handle

    def run_next(self, wakes: Iterable[tuple[Callable[..., object], Any, Context]]) -> None:
        """Resume tasks before what else is in this turn: the wake-up of each, its argument, and its context."""
        steps = [Step(wake, (given,), self, context) for wake, given, context in wakes]
        self._batch.extendleft(reversed(steps))
        self._steps += len(steps)

    def _chosen(self, point: int, first: Step, choice: int) -> Step | None:
        """Return the step that runs at this point; None if the first is deferred."""
        execution, chosen = self.execution, first
        if choice:
            execution.changes.append(Change(point, choice))
        if choice == DEFER:
            self._deferred.append(first)
            self._turns_since_rest = 0
        elif choice:
            chosen = self._take(first, choice)
        if execution.on_point is not None:
            execution.on_point(point, first, chosen if choice else None)
        return None if choice == DEFER else chosen

    def _take(self, first: Step, choice: int) -> Step:
        """Put the first step back and take another out of the batch; run the callbacks that precede it."""
        batch = self._batch
        batch.appendleft(first)
        index = [at for at, handle in enumerate(batch) if type(handle) is Step][choice]
        before = [batch.popleft() for _ in range(index)]
        chosen = batch.popleft()
        assert isinstance(chosen, Step)
        batch.extendleft(handle for handle in reversed(before) if type(handle) is Step)
        for handle in before:
            if type(handle) is not Step and not handle.cancelled():
                handle._run()
        return chosen

    def _sort_in(self) -> None:
        """Sort tasks that are cancelled together by creation: programs often cancel a set, whose order is arbitrary."""
        queue, index = self._ready, len(self._ready) - 1
        while index and self._cancelled_number(queue[index - 1]) > self._cancelled_number(queue[index]):
            queue[index - 1], queue[index] = queue[index], queue[index - 1]
            index -= 1

    def _cancelled_number(self, handle: Any) -> int:
        """Return the number of a task that resumes because its future was cancelled; -1 for any other handle."""
        is_cancelled = type(handle) is Step and handle._args and handle._args[0].cancelled()
        return self.number_of(handle.task) if is_cancelled else -1


@contextmanager
def making_loops(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[None]:
    """Make `asyncio.run`, `asyncio.Runner`, `anyio.run` and `asyncio.new_event_loop` create loops with a function."""
    before = asyncio.events.new_event_loop
    asyncio.events.new_event_loop = asyncio.new_event_loop = new_loop
    try:
        yield
    finally:
        asyncio.events.new_event_loop = asyncio.new_event_loop = before


_TURN = ControlledLoop._run_once.__code__


_ENDS_STEP: Any = getattr(signal, "SIGRTMAX", None)
"""The signal that ends a step which holds up the loop for too long. Programs use SIGALRM themselves."""


class HeldUpLoop(BlockedLoop):
    """The watch over steps that hold up the controlled loop in this thread; ``found`` has its texts and their lines.

    A step that takes longer than a run may is ended by a signal whose handler raises KeyboardInterrupt, because the
    loop, which enforces the time limit, does not run meanwhile.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.found: dict[str, Location] = {}
        self.ended_step = False
        self._seconds = seconds
        super().__init__(lambda: None, self.found.setdefault)

    def report_step(self, task: Any, where: Location, seconds: float) -> None:
        """Note what a step does, and end one that has taken too long."""
        super().report_step(task, where, seconds)
        if seconds > self._seconds and self.found:
            self.ended_step = True
            signal.pthread_kill(self._thread, _ENDS_STEP)

    @contextmanager
    def ending_steps(self) -> Iterator[None]:
        """Handle the signal that ends steps, which only the main thread can."""
        if current_thread() is not main_thread() or _ENDS_STEP is None:
            self._seconds = math.inf
            yield
            return
        before = signal.signal(_ENDS_STEP, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(_ENDS_STEP, before)

    def step_in(self, frame: FrameType) -> tuple[Any, Step | None]:
        """Return the task and the step that run."""
        handles = (outer.f_locals.get("handle") for outer, _ in walk_stack(frame) if outer.f_code is _TURN)
        step = next((handle for handle in handles if type(handle) is Step), None)
        return None if step is None else step.task, step
