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
the order is by the threads' names.
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
from contextvars import Context, copy_context
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from aiodist._checking.schedule import DEFER, Change, Order
from aiodist._checking.threads import busy_threads, let_threads_finish
from aiodist._core.errors import CollectiveError
from aiodist._core.terms import Reason

_TURNS_AT_ONCE = 64
_RESOLUTION = time.get_clock_info("monotonic").resolution
"""Within which of now a timer is due to asyncio."""
_METHODS = frozenset(dir(Task))
"""What is no step of a task: ``call_soon(task.cancel)`` is an ordinary callback."""
_MOST_TURNS = 200
"""For how many turns a task is deferred at most while others, which may be waiting for it in a loop, go on."""
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

    def wakes(self) -> Iterator[Task[Any]]:
        """Yield the tasks that wait for a future among its arguments, or for the event that it sets."""
        for thing in (*(self._args or ()), getattr(self._callback, "__self__", None)):
            event = getattr(thing, "_event", thing)  # anyio's event has asyncio's inside
            for future in getattr(event, "_waiters", None) or (event,):
                for callback, _ in getattr(future, "_callbacks", None) or ():
                    task = getattr(callback, "__self__", None)
                    if isinstance(task, Task):
                        yield task


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

    @property
    def follows_cancellation(self) -> bool:
        """Whether what the task awaited has been cancelled."""
        return bool(self._args) and bool(self._args[0].cancelled())


OnPoint: TypeAlias = "Callable[[int, Step, Step | None, Iterable[Callback]], object]"
"""Is called at a point: its number, the step whose turn it is, the one that runs instead (the first itself where it is
deferred, None where nothing changes), and what else is ready."""
OnStuck: TypeAlias = "Callable[[ControlledLoop, Reason], object]"
"""Is called when runs cannot go on (`Reason.DEADLOCK`), have taken too long (`Reason.TIMEOUT`), or may be polling for
ever (`Reason.LIVELOCK`): makes something run, raises what is to come out of the loop or, in the last case alone, does
nothing."""


class Execution:
    """One execution of a program, on one controlled loop or on several, one after the other.

    Attributes:
        deadline: when the program has taken too long, on the real clock; None for never.
        next_point: the next point at which `choose` is to be called.
        points: how many points there have been.
        changes: the differences from the default order.
    """

    def __init__(
        self, order: Order, on_stuck: OnStuck, *, on_point: OnPoint | None = None, deadline: float | None = None
    ) -> None:
        self.order = order
        self.on_stuck = on_stuck
        self.on_point = on_point
        self.deadline = deadline
        self.next_point = 0 if on_point is not None else order.next_point
        self.points = 0
        self.changes: list[Change] = []

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
        self._steps_to_come = 0  # how many of these are steps
        self._batch: deque[Callback] = deque()  # of the turn that goes on
        self._steps = 0
        self._deferred: list[Step] = []
        self._turns_deferred = 0
        self._turn_is_due = False
        self._turns_left = 0
        self._timer_is_due = False
        self._from_threads: list[tuple[str, Callback]] = []  # with the name of the thread
        self._turns_unread = 0
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
        # The second look is for a thread that has sent something and gone since the first; before a proof, it comes
        # after a longer pause.
        for pause in (_BEFORE_A_JUMP, *((_BEFORE_A_PROOF,) if timeout is None else ()), None):
            ready = self._poll(0)
            if ready or self._take_calls_of_threads():
                return ready
            if pause is not None and (self._watches() or busy_threads(pause=pause)):
                return self._wait(timeout)
        if timeout is not None:
            self._jump(timeout)
        else:
            self.execution.on_stuck(self, Reason.DEADLOCK)
        return []

    def _watches(self) -> bool:
        """Whether file descriptors or signals of the program's may come."""
        return len(self._watched) > self._own or bool(getattr(self, "_signal_handlers", None))

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

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Call a function when nothing else can run, for a thread whose work is done or, had it been faster, for it."""
        handle = Callback(callback, args, self, context)
        sent = threading.current_thread().name, handle
        self._from_threads.append(sent)
        try:
            super().call_soon_threadsafe(_wake_up)
        except RuntimeError:  # the loop is closed
            self._from_threads.remove(sent)
            raise
        return handle

    def _take_calls_of_threads(self) -> bool:
        """Let what other threads have sent run in the next turn; return whether there was anything.

        Threads that are at work get a moment to send what they have, so that a run does not depend on who was faster.
        """
        self._turns_unread = 0
        if not self._from_threads:
            return False
        began = time.monotonic()
        let_threads_finish()
        self._advance(time.monotonic() - began)
        sent, self._from_threads = self._from_threads, []
        self._queue.extend(callback for _, callback in sorted(sent, key=self._rank))
        self._ask_for_a_turn()
        return True

    def _rank(self, sent: tuple[str, Callback]) -> tuple[int, int, str]:
        """Return what calls of threads are sorted by: the task that waits for it, and the thread's name."""
        thread, callback = sent
        return min(map(self.number_of, callback.wakes()), default=-1), len(thread), thread

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
            self._steps_to_come += 1
            self._queue.append(handle)
            if args and args[0].cancelled():
                self._sort_in(handle)
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
            self._timer_is_due = True
            self._turns_left = 0
        return super().call_at(when, callback, *args, context=context)

    def stop(self) -> None:
        """Stop after this turn."""
        self._turns_left = 0
        super().stop()

    async def shutdown_asyncgens(self) -> None:
        """Close generators, also those whose end asyncio has sent like a call from a thread."""
        self._take_calls_of_threads()
        for _ in range(3):  # turns: the call, the task that it makes, its end
            await asyncio.sleep(0)
        await super().shutdown_asyncgens()

    async def shutdown_default_executor(self, *timeout: float | None) -> None:
        """Wait for threads as long as asyncio does, in this loop's time; which do not end, others say."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The executor did not finish", RuntimeWarning)
            await super().shutdown_default_executor(*timeout)

    def close(self) -> None:
        """Close the loop; what has not run does not."""
        super().close()
        self._turn_is_due = False
        self._queue.clear()
        self._deferred.clear()

    def _ask_for_a_turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            super().call_soon(self._turns)

    def _turns(self) -> None:
        """Run turn after turn, as long as asyncio's own loop would find nothing else to do between them."""
        self._turn_is_due = True
        others_may_come = self._timer_is_due or self._watches()
        self._turns_left = 1 if others_may_come else _TURNS_AT_ONCE
        self._timer_is_due = False
        try:
            while self._queue and self._turns_left:
                self._turns_left -= 1
                self._turn()
        finally:
            self._turn_is_due = False
            if self._queue:
                self._ask_for_a_turn()
            if self._from_threads:
                self._turns_unread += 1
                if self._turns_unread > _MOST_TURNS:  # a task that waits for a thread in a loop of sleep(0) never rests
                    self._take_calls_of_threads()

    def _turn(self) -> None:
        """Run what is in the queue now; what comes meanwhile runs in the next turn."""
        execution, batch = self.execution, self._queue
        handle: Callback | None
        self._batch, self._queue = batch, self._batch
        self._steps, self._steps_to_come = self._steps_to_come, 0
        try:
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
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._batch:  # an interruption came in the middle
            self._queue.extendleft(reversed(self._batch))
            self._steps_to_come += self._steps
            self._batch.clear()
        if self._deferred:  # they go on when nothing else can run, or after many turns
            self._turns_deferred += 1
            if not self._queue or self._turns_deferred > _MOST_TURNS:
                self._queue.extend(self._deferred)
                self._steps_to_come += len(self._deferred)
                self._deferred.clear()
                self._turns_deferred = 0

    def _choose(self, point: int, first: Step) -> Step | None:
        """Return the step that runs at this point; None when the one whose turn it is is deferred."""
        choice = self.execution.choose(point, self._steps + 1)
        chosen: Step | None = first
        if choice == DEFER:
            chosen = None
            self._deferred.append(first)
        elif choice:
            chosen = self._take(first, choice)
        if self.execution.on_point is not None:
            self.execution.on_point(point, first, (chosen or first) if choice else None, self._batch)
        return chosen

    def _take(self, first: Step, choice: int) -> Step:
        """Put the first step back and take another out of the batch; run the callbacks that are before it."""
        batch = self._batch
        has_callbacks = len(batch) > self._steps
        batch.appendleft(first)
        index = [i for i, one in enumerate(batch) if type(one) is Step][choice] if has_callbacks else choice
        chosen = batch[index]
        del batch[index]
        if has_callbacks:
            self._run_callbacks_before(index)
        assert isinstance(chosen, Step)
        return chosen

    def _run_callbacks_before(self, index: int) -> None:
        before = [self._batch.popleft() for _ in range(index)]
        self._batch.extendleft(handle for handle in reversed(before) if type(handle) is Step)
        for handle in before:
            if type(handle) is not Step and not handle.cancelled():
                handle.run()

    def _sort_in(self, step: Step) -> None:
        """Keep tasks that are cancelled together in the order of their creation.

        Whoever cancels several often holds them in a set, whose order differs from process to process.
        """
        queue, number = self._queue, self.number_of(step.task)
        index = len(queue) - 1
        while index:
            before = queue[index - 1]
            if not (isinstance(before, Step) and before.follows_cancellation and self.number_of(before.task) > number):
                break
            index -= 1
        if index < len(queue) - 1:
            queue.pop()
            queue.insert(index, step)


def step_of(frame: FrameType) -> Step | None:
    """Return the step that runs in the frame of a turn; None for any other frame, and between steps."""
    handle = frame.f_locals.get("handle") if frame.f_code is _TURN else None
    return handle if type(handle) is Step else None


_TURN = ControlledLoop._turn.__code__  # noqa: SLF001  (of this module)


def _wake_up() -> None:
    """Nothing: that it was to be called has woken the loop."""
