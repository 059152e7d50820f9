"""The controlled loop: an asyncio event loop on which the order of ready tasks is chosen, and time is virtual.

It differs from asyncio's own in four things, and in the default order runs what that runs, in the same order:

- **Order.** Callbacks go into a queue of ours instead of the loop's. A turn runs those that were there when it began,
  as a turn of asyncio's does. Where a task is to run and others of its turn are ready, too, the schedule may choose
  another, or defer the first until nothing else can run. Only tasks change places, with each other: a callback that is
  before a chosen task in the queue runs before it, for libraries build on that order. Every task gets its turn, so one
  that waits for another in a loop of `sleep(0)` does not wait forever.
- **Time** stands still while anything can run, and jumps to the next timer when nothing can. While a thread is at work
  or a file descriptor is watched, the loop waits for them in real time, and its clock follows.
- **Threads.** What other threads send comes in when nothing else can run, and when those that are at work have had a
  moment to send theirs, in an order that does not depend on which of them was faster.
- **Deadlock.** With nothing ready, no timer, and nothing outside that could act, nothing can ever run again.

asyncio asks its selector ``select(timeout)``: 0 when callbacks are ready, the time to the next timer when there is one,
None when there is nothing at all. That is all that a virtual clock and a proof of deadlock need, and it is documented:
`asyncio.SelectorEventLoop` takes any selector.

What it relies on beside documented interfaces (a selector of one's own, `call_soon`, `time`, `create_task`): that
tasks and futures schedule by ``loop.call_soon``, which every alternative loop relies on; and `asyncio.Handle`'s
attributes and ``_run``, which have been the same since they were written. What must not be reordered never enters our
queue: asyncio puts timers and I/O into its own. ``_signal_handlers`` says whether the program handles signals. For the
order of what threads send it looks which task waits for that (``_waiters``, ``_callbacks``); where it cannot be seen,
the order is by the threads' names. `asyncio.run` and its like make their loops by ``asyncio.events.new_event_loop``,
which `making_loops` replaces.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
import threading
import time
import warnings
from asyncio import Handle, Task, TimerHandle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from itertools import chain
from types import FrameType
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from aiodist._checking.schedule import DEFER, Change, Order
from aiodist._checking.threads import busy_threads, let_threads_finish
from aiodist._core.errors import CollectiveError
from aiodist._core.terms import Reason

T = TypeVar("T")

_TURNS_AT_ONCE = 64
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


class Callback(Handle):
    """A callback in the loop's queue."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: ControlledLoop, context: Context | None = None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None  # asyncio's own __init__ asks for the debug mode, each time

    run = Handle._run  # noqa: SLF001  (what asyncio's loop calls; see above)

    def first_woken(self, number_of: Callable[[Task[Any]], int]) -> int:
        """Return the least number of a task that waits for a future among its arguments, or for the event it sets."""
        things = (*(self._args or ()), getattr(self._callback, "__self__", None))
        events = (getattr(thing, "_event", thing) for thing in things)  # anyio's event has asyncio's inside
        futures = chain.from_iterable(getattr(event, "_waiters", None) or (event,) for event in events)
        wakes: Iterable[Any] = chain.from_iterable(getattr(future, "_callbacks", None) or () for future in futures)
        tasks = (getattr(wake, "__self__", None) for wake, _ in wakes)
        return min((number_of(task) for task in tasks if isinstance(task, Task)), default=-1)


class Step(Callback):
    """A callback that lets a task go on: what a schedule reorders."""

    __slots__ = ()

    @property
    def task(self) -> Task[Any]:
        """The task."""
        task: Task[Any] = self._callback.__self__
        return task

    @property
    def context(self) -> Context:
        """The task's context variables."""
        return self._context


OnPoint: TypeAlias = "Callable[[int, Step, Step | None, Iterable[Callback]], object]"
"""Is called at a point: its number, the step whose turn it is, the one that runs instead (the first itself where it is
deferred, None where nothing changes), and what else is ready."""
OnStuck: TypeAlias = "Callable[[ControlledLoop, Reason], object]"
"""Is called when runs cannot go on (`Reason.DEADLOCK`), have taken too long (`Reason.TIMEOUT`), or may be polling for
ever (`Reason.LIVELOCK`): makes something run, raises what is to come out of the loop or, in the last case alone, does
nothing."""


class Execution:
    """One execution of a program, on one controlled loop or on several, one after the other."""

    def __init__(
        self, order: Order, on_stuck: OnStuck, *, on_point: OnPoint | None = None, deadline: float | None = None
    ) -> None:
        self.order = order
        self.on_stuck = on_stuck
        self.on_point = on_point
        self.deadline = deadline  # when it has taken too long, on the real clock
        self.next_point = 0 if on_point is not None else order.next_point  # at which `choose` is to be called
        self.points = 0
        self.changes: list[Change] = []  # to the default order

    def choose(self, point: int, ready: int) -> int:
        """Return who runs at a point, as in `Change`; 0 for the one whose turn it is."""
        order, choice = self.order, 0
        if point >= order.next_point:
            choice = order.choose(point, ready)
            if choice:
                self.changes.append(Change(point, choice))
        if self.on_point is None:
            self.next_point = order.next_point
        return choice


class ControlledLoop(asyncio.SelectorEventLoop):
    """An event loop whose order of ready tasks and whose clock are controlled; it belongs to an execution."""

    proves_deadlock = True  # so the stall watch sets no timer, which would look like something to come

    def __init__(self, execution: Execution) -> None:
        selector = selectors.DefaultSelector()
        super().__init__(selector)
        self._poll, selector.select = selector.select, self._select  # type: ignore[method-assign]
        self._watched = selector.get_map()
        self._own = len(self._watched)  # its wake-up pipe
        self.execution = execution
        self._now = 0.0
        self._jumps = 0
        self._look_at = _DAY
        self._queue: deque[Callback] = deque()  # for the next turn
        self._batch: deque[Callback] = deque()  # of the turn that goes on
        self._steps = 0  # how many of these are steps
        self._deferred: list[Step] = []
        self._turns_since_rest = 0
        self._turn_is_due = False
        self._others_come = False  # a timer that is due, or the end: asyncio's own loop is to go on after this turn
        self._not_begun: set[object] = set()  # work that executors have been given
        self._from_threads: deque[tuple[str, Callback]] = deque()  # by the thread's name
        self._numbers: WeakKeyDictionary[Task[Any], int] = WeakKeyDictionary()
        self._count = itertools.count()

    # Time, and what is outside.

    def _select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; with nothing ready, wait, or let the clock jump, or report a deadlock."""
        deadline = self.execution.deadline
        if deadline is not None and time.monotonic() > deadline:
            self.execution.on_stuck(self, Reason.TIMEOUT)
        if timeout is not None and timeout <= 0:
            return self._poll(0) if len(self._watched) > self._own else []
        pause = _BEFORE_A_PROOF if timeout is None else _BEFORE_A_JUMP
        for is_last in (False, True):  # the last look is for a thread that has sent something and gone since the first
            ready = self._poll(0)
            if ready or self._take_calls_of_threads():
                return ready
            if not is_last and (self._watches() or busy_threads(pause=pause)):
                return self._wait(timeout)
        if timeout is not None:
            self._jump(timeout)
        else:
            self.execution.on_stuck(self, Reason.DEADLOCK)
        return []

    def _watches(self) -> bool:
        """Whether file descriptors, signals, or a thread that an executor has not let begin yet may act."""
        watched = len(self._watched) > self._own
        return watched or bool(self._not_begun) or bool(getattr(self, "_signal_handlers", None))

    def _wait(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait in real time, which the loop's clock follows; not for long, for a thread may end without a word."""
        began = time.monotonic()
        ready = self._poll(_POLL_SECONDS if timeout is None else min(timeout, _POLL_SECONDS))
        self._advance(time.monotonic() - began)
        return ready

    def time(self) -> float:
        """Return the virtual time, in seconds since the loop was made."""
        return self._now

    def _advance(self, seconds: float) -> None:
        """Put the clock forward."""
        self._now += seconds
        if self._now + _RESOLUTION == self._now:  # so late that asyncio would find no timer to be due
            self._now = math.nextafter(self._now, math.inf)

    def _jump(self, seconds: float) -> None:
        """Put the clock forward to the next timer; after a day of nothing but that, say so."""
        self._advance(seconds)
        self._jumps += 1
        if self._now >= self._look_at and self._jumps >= _MOST_JUMPS:
            self._jumps, self._look_at = 0, self._now + _DAY
            self.execution.on_stuck(self, Reason.LIVELOCK)

    def number_of(self, task: Task[Any]) -> int:
        """Return a task's number: tasks are counted as they are created."""
        return self._numbers.get(task, -1)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run a function in a thread; until it has begun there, a thread is at work, though none may look so."""
        work = object()

        def begin() -> T:
            self._not_begun.discard(work)
            return func(*args)

        self._not_begun.add(work)
        future: asyncio.Future[T] = super().run_in_executor(executor, begin)
        future.add_done_callback(lambda _: self._not_begun.discard(work))  # also where it was cancelled
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Call a function when nothing else can run, for a thread whose work is done or, had it been faster, for it."""
        if callback == self.create_task:  # the end of an asynchronous generator, which asyncio sends from this thread
            return self.call_soon(callback, *args, context=context)
        handle = Callback(callback, args, self, context)
        super().call_soon_threadsafe(_wake_up)  # raises where the loop is closed
        self._from_threads.append((threading.current_thread().name, handle))
        return handle

    def _take_calls_of_threads(self) -> bool:
        """Let what other threads have sent run in the next turn; return whether there was anything.

        Threads that are at work get a moment to send what they have, so that a run does not depend on who was faster.
        """
        if not self._from_threads:
            return False
        began = time.monotonic()
        let_threads_finish()
        self._advance(time.monotonic() - began)
        sent = [self._from_threads.popleft() for _ in range(len(self._from_threads))]
        sent.sort(key=lambda one: (one[1].first_woken(self.number_of), len(one[0]), one[0]))
        self._queue.extend(call for _, call in sent)
        self._ask_for_a_turn()
        return True

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an exception that nobody took, but not a report on replicas: whoever runs the loop gets that."""
        if not isinstance(context.get("exception"), CollectiveError):
            super().default_exception_handler(context)

    # Order.

    def create_task(self, coro: Any, **options: Any) -> Task[Any]:
        """Start a task; tasks are numbered as they are created."""
        task: Task[Any] = super().create_task(coro, **options)
        self._numbers[task] = next(self._count)
        return task

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Call a function in the next turn."""
        handle: Callback
        owner = getattr(callback, "__self__", None)
        if isinstance(owner, Task) and getattr(callback, "__name__", "") not in _METHODS:
            handle = Step(callback, args, self, context)
            self._queue.append(handle)
            if args and args[0].cancelled():
                self._sort_in()
        else:
            handle = Callback(callback, args, self, context)
            self._queue.append(handle)
        if not self._turn_is_due:
            self._ask_for_a_turn()
        return handle

    def run_next(self, wakes: Iterable[tuple[Callable[..., object], Any, Context]]) -> None:
        """Let tasks go on before what else is in this turn: the wake-up of each, what it is given, and its context."""
        steps = [Step(wake, (given,), self, context) for wake, given, context in wakes]
        self._batch.extendleft(reversed(steps))
        self._steps += len(steps)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """Call a function at a time; where that has come already, behind the next turn."""
        if when == math.inf:  # of an endless sleep: no timer, for it never comes
            return TimerHandle(when, callback, args, self, context)
        if when <= self._now:
            self._others_come = True
        return super().call_at(when, callback, *args, context=context)

    def stop(self) -> None:
        """Stop after this turn."""
        self._others_come = True
        super().stop()

    async def shutdown_default_executor(self, *timeout: float | None) -> None:
        """Wait for threads as long as asyncio does, in this loop's time; which do not end, others say."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The executor did not finish", RuntimeWarning)
            await super().shutdown_default_executor(*timeout)

    def close(self) -> None:
        """Close the loop; what has not run does not."""
        super().close()
        self._turn_is_due = False
        for handles in (self._queue, self._batch, self._deferred):
            handles.clear()

    def _ask_for_a_turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            super().call_soon(self._turns)

    def _turns(self) -> None:
        """Run turn after turn, as long as asyncio's own loop would find nothing else to do between them."""
        is_only, self._others_come = self._others_come or self._watches(), False
        try:
            for _ in range(_TURNS_AT_ONCE):
                self._turn()
                if is_only or self._others_come or not self._queue:
                    break
        finally:
            self._turn_is_due = False
            if self._queue or self._batch:
                self._ask_for_a_turn()

    def _turn(self) -> None:
        """Run what is in the queue now; what comes meanwhile runs in the next turn."""
        execution, batch = self.execution, self._batch
        handle: Callback | None
        batch += self._queue  # after what an interruption has left
        self._queue.clear()
        self._steps = sum([type(handle) is Step for handle in batch])
        while batch:
            handle = batch.popleft()
            if type(handle) is Step:
                self._steps -= 1
                if self._steps:
                    execution.points = point = execution.points + 1
                    if point > execution.next_point:
                        handle = self._choose(point - 1, handle)
                        if handle is None:
                            continue
                if not handle._cancelled:  # noqa: SLF001  (and `run`, written out, for all that a step raises ends it)
                    handle._context.run(handle._callback, *handle._args)  # noqa: SLF001
            elif not handle.cancelled():
                handle.run()
        self._turns_since_rest += 1
        if self._turns_since_rest > _MOST_TURNS:
            self._take_calls_of_threads()
        if not self._queue or self._turns_since_rest > _MOST_TURNS:
            self._queue += self._deferred
            self._deferred.clear()
            self._turns_since_rest = 0

    def _choose(self, point: int, first: Step) -> Step | None:
        """Return the step that runs at this point; None when the one whose turn it is is deferred."""
        choice = self.execution.choose(point, self._steps + 1)
        chosen: Step | None = first
        if choice == DEFER:
            chosen = None
            self._deferred.append(first)
            self._turns_since_rest = 0
        elif choice:
            chosen = self._take(first, choice)
        if self.execution.on_point is not None:
            self.execution.on_point(point, first, (chosen or first) if choice else None, self._batch)
        return chosen

    def _take(self, first: Step, choice: int) -> Step:
        """Put the first step back and take another out of the batch; run the callbacks that are before it."""
        batch = self._batch
        batch.appendleft(first)
        steps = [i for i, one in enumerate(batch) if type(one) is Step] if len(batch) - 1 > self._steps else ()
        index = steps[choice] if steps else choice
        chosen = batch[index]
        del batch[index]
        if steps:
            before = [batch.popleft() for _ in range(index)]
            batch.extendleft(handle for handle in reversed(before) if type(handle) is Step)
            for handle in before:
                if type(handle) is not Step and not handle.cancelled():
                    handle.run()
        assert isinstance(chosen, Step)
        return chosen

    def _sort_in(self) -> None:
        """Keep tasks that are cancelled together in the order of their creation.

        Whoever cancels several often holds them in a set, whose order differs from process to process.
        """
        queue, index = self._queue, len(self._queue) - 1
        while index and self._cancelled_number(queue[index - 1]) > self._cancelled_number(queue[index]):
            queue[index - 1], queue[index] = queue[index], queue[index - 1]
            index -= 1

    def _cancelled_number(self, handle: Callback) -> int:
        """Return the number of the task that goes on since what it awaited was cancelled; -1 for anything else."""
        args = handle._args  # noqa: SLF001  (of this module)
        return self.number_of(handle.task) if isinstance(handle, Step) and args and args[0].cancelled() else -1


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


_TURN = ControlledLoop._turn.__code__  # noqa: SLF001  (of this module)


def _wake_up() -> None:
    """Nothing: that it was to be called has woken the loop."""
