"""The controlled loop: an asyncio event loop on which the order of ready tasks is chosen, and time is virtual.

It differs from asyncio's own in four things, and in the default order runs what that runs, in the same order:

- **Order.** A turn runs what was ready when it began, as a turn of asyncio's does. Where a task is to run and others of
  its turn are ready, too, the schedule may choose another, or defer the first until nothing else can run. Only tasks
  change places, with each other: a callback that is before a chosen task runs before it, for libraries build on that
  order. Every task gets its turn, so one that waits for another in a loop of `sleep(0)` does not wait forever.
- **Time** stands still while anything can run, and jumps to the next timer when nothing can. While a thread is at work
  or a file descriptor is watched, the loop waits for them in real time, and its clock follows.
- **Threads.** What other threads send comes in when nothing else can run, and when those that are at work have had a
  moment to send theirs, in an order that does not depend on which of them was faster.
- **Deadlock.** With nothing ready, no timer, and nothing outside that could act, nothing can ever run again.

All of that is in `_run_once`, which replaces asyncio's method of this name. Besides, it uses of asyncio what has been
the same since it was written: the queue of ready handles and the heap of timers (``_ready``, ``_scheduled``), a
handle's attributes, ``_process_events``, ``_write_to_self``, ``_check_closed`` and ``_stopping``; and that tasks and
futures schedule by ``loop.call_soon``, as on every alternative loop. ``_signal_handlers`` says whether the program
handles signals. For the order of what threads send it looks which task waits for that (``_waiters``, ``_callbacks``);
where it cannot be seen, the order is by the threads' names. `asyncio.run` and its like make their loops by
``asyncio.events.new_event_loop``, which `making_loops` replaces.
"""

# ruff: noqa: SLF001  (see above)

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
import threading
import time
from asyncio import Handle, Task, TimerHandle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from aiodist._checking.schedule import DEFER, Change, Order
from aiodist._checking.threads import at_work, let_threads_finish
from aiodist._core.errors import CollectiveError
from aiodist._core.terms import Reason

Events: TypeAlias = list[tuple[selectors.SelectorKey, int]]

_RESOLUTION = time.get_clock_info("monotonic").resolution
"""Within which of now a timer is due to asyncio."""
_METHODS = frozenset(dir(Task))
"""What is no step of a task: ``call_soon(task.cancel)`` is an ordinary callback."""
_MOST_TURNS = 200
"""For how many turns tasks are deferred, and threads unheard, while others go on, which may wait for them in a loop."""
_POLL_SECONDS = 0.05
_DAY = 86400.0
"""How often, in virtual time, it is looked for replicas that only sleep and poll,"""
_MOST_JUMPS = 1000
"""and how often the clock has then jumped at least: a few long sleeps are no polling."""
_BEFORE_A_JUMP = 0.0002
_BEFORE_A_PROOF = 0.005


class Step(Handle):
    """A callback that lets a task go on: what a schedule reorders."""

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
    """A callback at a time. Of those at the same time the one that was asked for first goes first.

    asyncio leaves that to the shape of its heap, for in real time it hardly ever happens. Here a run would depend on
    aiodist's own timers, and so on how long its looks for deadlocks take.
    """

    __slots__ = ("number",)
    number: int
    _scheduled: bool

    def __lt__(self, other: Any) -> bool:
        return (self.when(), self.number) < (other.when(), other.number)


OnPoint: TypeAlias = Callable[[int, Step, Step | None], object]
"""Is called at a point: its number, the step whose turn it is, and the one that runs instead (the first itself where it
is deferred, None where nothing changes)."""
OnStuck: TypeAlias = "Callable[[ControlledLoop, Reason], object]"
"""Is called when runs cannot go on (`Reason.DEADLOCK`), have taken too long (`Reason.TIMEOUT`), or may be polling for
ever (`Reason.LIVELOCK`): makes something run, raises what is to come out of the loop or, in the last case alone, does
nothing."""


@dataclass(slots=True, eq=False)
class Execution:
    """One execution of a program, on one controlled loop or on several, one after the other."""

    order: Order
    on_stuck: OnStuck
    on_point: OnPoint | None = None
    deadline: float = math.inf  # when it has taken too long, on the real clock
    points: int = 0
    changes: list[Change] = field(default_factory=list)  # to the default order


class ControlledLoop(asyncio.SelectorEventLoop):
    """An event loop whose order of ready tasks and whose clock are controlled; it belongs to an execution."""

    proves_deadlock = True  # so the stall watch sets no timer, which would look like something to come
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
        """Run what is ready now, and behind it I/O and timers, as asyncio does; what comes meanwhile waits."""
        execution, batch, ready = self.execution, self._batch, self._ready
        order, on_point = execution.order, execution.on_point
        self._look_outside()
        handle: Handle | None
        batch += ready  # behind what an interruption has left
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
        """Let what has come from outside, and timers that are due, run in this turn; with nothing ready, wait."""
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

    # Time, and what is outside.

    def _wait_for_more(self, when: float) -> Events:
        """Return what is ready outside, in real time; or let the clock jump to the next timer, or report a deadlock."""
        for is_last in (False, True):  # the last look is for a thread that has sent something and gone since the first
            events = self._poll(0)
            if events or self._take_calls_of_threads():
                return events
            pause = _BEFORE_A_PROOF if when == math.inf else _BEFORE_A_JUMP
            if not is_last and (self._watches() or at_work(pause=pause)):
                began = time.monotonic()  # and not for long, for a thread may end without a word
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

    def _watches(self) -> bool:
        """Whether file descriptors or signals may act."""
        return len(self._watched) > self._own or bool(getattr(self, "_signal_handlers", None))

    def time(self) -> float:
        """Return the virtual time, in seconds since the loop was made."""
        return self._now

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Call a function when nothing else can run, for a thread whose work is done or, had it been faster, for it."""
        if callback == self.create_task:  # the end of an asynchronous generator, which asyncio sends from this thread
            return self.call_soon(callback, *args, context=context)
        self._check_closed()
        handle = Handle(callback, args, self, context)
        self._from_threads.append((threading.current_thread().name, handle))
        self._write_to_self()
        return handle

    def _take_calls_of_threads(self) -> bool:
        """Let what other threads have sent run in the next turn; return whether there was anything.

        Threads that are at work get a moment to send what they have, so that a run does not depend on who was faster.
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
        """Return the least number of a task that waits for a future that a call is given, or for the event it sets."""
        things = (*(handle._args or ()), getattr(handle._callback, "__self__", None))
        events = (getattr(thing, "_event", thing) for thing in things)  # anyio's event has asyncio's inside
        futures = chain.from_iterable(getattr(event, "_waiters", None) or (event,) for event in events)
        wakes: Iterable[Any] = chain.from_iterable(getattr(future, "_callbacks", None) or () for future in futures)
        tasks = (getattr(wake, "__self__", None) for wake, _ in wakes)
        return min((self.number_of(task) for task in tasks if isinstance(task, Task)), default=-1)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an exception that nobody took, but not a report on replicas: whoever runs the loop gets that."""
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
        """Let tasks go on before what else is in this turn: the wake-up of each, what it is given, and its context."""
        steps = [Step(wake, (given,), self, context) for wake, given, context in wakes]
        self._batch.extendleft(reversed(steps))
        self._steps += len(steps)

    def _chosen(self, point: int, first: Step, choice: int) -> Step | None:
        """Return the step that runs at this point; None when the one whose turn it is is deferred."""
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
        """Put the first step back and take another out of the batch; run the callbacks that are before it."""
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
        """Keep tasks that are cancelled together in the order of their creation.

        Whoever cancels several often holds them in a set, whose order differs from process to process.
        """
        queue, index = self._ready, len(self._ready) - 1
        while index and self._cancelled_number(queue[index - 1]) > self._cancelled_number(queue[index]):
            queue[index - 1], queue[index] = queue[index], queue[index - 1]
            index -= 1

    def _cancelled_number(self, handle: Any) -> int:
        """Return the number of the task that goes on since what it awaited was cancelled; -1 for anything else."""
        is_cancelled = type(handle) is Step and handle._args and handle._args[0].cancelled()
        return self.number_of(handle.task) if is_cancelled else -1


@contextmanager
def making_loops(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Iterator[None]:
    """Let `asyncio.run`, `asyncio.Runner`, `anyio.run` and `asyncio.new_event_loop` make their loops by a function."""
    before = asyncio.events.new_event_loop
    asyncio.events.new_event_loop = asyncio.new_event_loop = new_loop
    try:
        yield
    finally:
        asyncio.events.new_event_loop = asyncio.new_event_loop = before


def step_of(frame: FrameType) -> Step | None:
    """Return the step that runs in the frame of a turn; None for any other frame, and between steps."""
    handle = frame.f_locals.get("handle") if frame.f_code is _TURN else None
    return handle if type(handle) is Step else None


_TURN = ControlledLoop._run_once.__code__
