"""The controlled loop: an asyncio event loop on which the order of ready tasks is chosen, and time is virtual.

It differs from asyncio's own in four things, and in its plain order runs what that runs, in the same order:

- **Order.** Callbacks go into a queue of ours instead of the loop's. A turn runs those that were there when it began,
  as a turn of asyncio's does. Where a task is to run and others of its turn are ready, too, the schedule may choose
  another, or let the first step aside until nothing else can run. Only tasks change places, with each other: a callback
  that stands before a chosen task runs before it, for libraries build on that order. Everyone has his turn, so a task
  that waits for another in a loop of `sleep(0)` does not wait for ever.
- **Time** stands still while anything can run, and jumps to the next timer when nothing can. While a thread is at work
  or a file descriptor is watched, the loop waits for them in real time, and its clock goes along.
- **Threads.** What other threads send comes in when nothing else can run, and when those that are at work have had a
  moment to send theirs, in an order that does not depend on who was faster.
- **Standstill.** With nothing ready, no timer, and nothing outside that could act, the loop says so (`stand_still`).

What it relies on, beside documented interfaces (a selector of one's own, `call_soon`, `time`, `create_task`): that
tasks and futures schedule by ``loop.call_soon``, which every alternative loop relies on; and `asyncio.Handle`'s
constructor, ``_run``, ``_callback`` and ``_args``, which have been the same since they were written. What must not be
reordered never enters our queue: asyncio puts timers and I/O into its own. For the order of what threads send it looks
which task waits for that (``_waiters``, ``_callbacks``); where it cannot be seen, the order is by the threads' names.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from asyncio import Handle, Task, TimerHandle
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary

from aiodist._core.errors import CollectiveError
from aiodist.checking.course import Course
from aiodist.checking.outside import let_threads_finish
from aiodist.checking.schedule import ASIDE
from aiodist.checking.selector import ControlledSelector

_TURNS_AT_ONCE = 64
_RESOLUTION = time.get_clock_info("monotonic").resolution
"""Within which of now a timer is due to asyncio."""
_PATIENCE = 200
"""For how many turns a task stays aside at most while others, which may be waiting for it in a loop, go on."""


class Step(Handle):
    """A callback that lets a task go on: what a schedule reorders."""

    __slots__ = ()

    @property
    def task(self) -> Task[Any]:
        """The task."""
        task: Task[Any] = self._callback.__self__  # type: ignore[attr-defined]
        return task


class ControlledLoop(asyncio.SelectorEventLoop):
    """An event loop whose order of ready tasks and whose clock are controlled.

    Args:
        course: the course of the run that it belongs to.
    """

    proves_standstill = True  # so no timer need look for one

    def __init__(self, course: Course) -> None:
        selector = ControlledSelector()
        super().__init__(selector)
        self._controlled_selector = selector
        self.course = course
        self._now = 0.0
        self._queue: deque[Handle] = deque()  # for the next turn, with that many steps in it
        self._steps_to_come = 0
        self._batch: deque[Handle] = deque()  # of the turn that goes on
        self._steps = 0
        self._aside: list[Step] = []
        self._patience = 0
        self._turn_is_due = False
        self._turns_left = 0
        self._timer_is_due = False
        self._signals: set[int] = set()
        self._inbox: list[tuple[str, Handle]] = []
        self._unread = 0
        self._numbers: WeakKeyDictionary[Task[Any], int] = WeakKeyDictionary()
        self._count = itertools.count()
        selector.begin(self)

    # Time, and the outside.

    def time(self) -> float:
        """Return the virtual time, in seconds since the loop was made."""
        return self._now

    def pass_time(self, seconds: float) -> None:
        """Put the clock forward."""
        self._now += seconds
        if self._now + _RESOLUTION == self._now:  # so late that asyncio would find no timer to be due
            self._now = math.nextafter(self._now, math.inf)

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Call a function when a signal comes: from now on something outside may act."""
        super().add_signal_handler(sig, callback, *args)
        self._signals.add(sig)

    def remove_signal_handler(self, sig: int) -> bool:
        """Call nothing any more when a signal comes."""
        self._signals.discard(sig)
        return super().remove_signal_handler(sig)

    def _selector_is_used(self) -> bool:
        return bool(self._signals) or self._controlled_selector.watches()

    def listens_to_signals(self) -> bool:
        """Return whether the program has set handlers of signals."""
        return bool(self._signals)

    def check_limit(self) -> None:
        """End the run when it has taken too long, in real time."""
        deadline = self.course.deadline
        if deadline is not None and time.monotonic() > deadline:
            self.course.on_end(self, proved=False)

    def stand_still(self) -> None:
        """End the run: nothing can ever run again."""
        self.course.on_end(self, proved=True)

    def number_of(self, task: Task[Any]) -> int:
        """Return a task's number: tasks are counted as they are created."""
        return self._numbers.get(task, -1)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Call a function when nothing else can run, for a thread whose work is done or, had it been faster, for it."""
        handle = Handle(callback, args, self, context)
        letter = threading.current_thread().name, handle
        self._inbox.append(letter)
        try:
            super().call_soon_threadsafe(_wake_up)
        except RuntimeError:  # the loop is closed
            self._inbox.remove(letter)
            raise
        return handle

    def _rank(self, letter: tuple[str, Handle]) -> tuple[int, int, str]:
        """Return what letters are sorted by: the task that waits for it, and the sender's name."""
        name, handle = letter
        waiting = [self.number_of(task) for task in _waiting_for(handle)]
        return min(waiting, default=-1), len(name), name

    def open_inbox(self) -> bool:
        """Let what other threads have sent run in the next turn; return whether there was anything.

        Threads that are at work get a moment to send what they have, so that a run does not depend on who was faster.
        """
        self._unread = 0
        if not self._inbox:
            return False
        began = time.monotonic()
        let_threads_finish()
        self.pass_time(time.monotonic() - began)
        letters, self._inbox = self._inbox, []
        for _, handle in sorted(letters, key=self._rank):
            self._queue.append(handle)
        if not self._turn_is_due:
            super().call_soon(self._turns)
            self._turn_is_due = True
        return True

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an exception that nobody took, but for the verdict on replicas: it is told by whoever runs the loop."""
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
        handle: Handle
        if isinstance(getattr(callback, "__self__", None), Task) and _is_step(callback):
            handle = Step(callback, args, self, context)
            self._steps_to_come += 1
            self._queue.append(handle)
            if args and args[0].cancelled():
                self._sort_in(handle)
        else:
            handle = Handle(callback, args, self, context)
            self._queue.append(handle)
        if not self._turn_is_due:
            super().call_soon(self._turns)
            self._turn_is_due = True
        return handle

    def close(self) -> None:
        """Close the loop; what has not run does not."""
        super().close()
        self._turn_is_due = False
        self._queue.clear()
        self._aside.clear()

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """Call a function at a time; where that has come already, behind the next turn."""
        if when == math.inf:  # of a sleep for ever: no timer, for it never comes
            return TimerHandle(when, callback, args, self, context)
        if when <= self._now:
            self._timer_is_due = True
            self._turns_left = 0
        return super().call_at(when, callback, *args, context=context)

    def stop(self) -> None:
        """Stop after this turn."""
        self._turns_left = 0
        super().stop()

    def _turns(self) -> None:
        """Run turn after turn, as long as asyncio's own loop would find nothing else to do between them."""
        self._turn_is_due = True
        self._turns_left = 1 if self._timer_is_due or self._selector_is_used() else _TURNS_AT_ONCE
        self._timer_is_due = False
        try:
            while self._queue and self._turns_left:
                self._turns_left -= 1
                self._turn()
        finally:
            self._turn_is_due = bool(self._queue)
            if self._queue:
                super().call_soon(self._turns)
            if self._inbox:
                self._unread += 1
                if self._unread > _PATIENCE:  # a task that waits for a thread in a loop of sleep(0) is always ready
                    self.open_inbox()

    def _turn(self) -> None:
        """Run what is in the queue now; what comes meanwhile runs in the next turn."""
        course, batch = self.course, self._queue
        handle: Handle | None
        self._batch, self._queue = batch, self._batch
        self._steps, self._steps_to_come = self._steps_to_come, 0
        try:
            while batch:
                handle = batch.popleft()
                if type(handle) is Step:
                    self._steps -= 1
                    if self._steps:
                        course.points = point = course.points + 1
                        if point > course.next_point:
                            handle = self._choose(point - 1, handle)
                            if handle is None:
                                continue
                if not handle._cancelled:
                    handle._run()
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._batch:  # an interruption came in the middle
            self._queue.extendleft(reversed(self._batch))
            self._steps_to_come += self._steps
            self._batch.clear()
        if self._aside:
            self._bring_back()

    def _choose(self, point: int, first: Step) -> Step | None:
        """Return the step that runs at this point; None when the one whose turn it is steps aside."""
        choice = self.course.choose(point, self._steps + 1)
        chosen: Step | None = first
        if choice == ASIDE:
            chosen = None
            self._aside.append(first)
        elif choice:
            chosen = self._take(first, choice)
        if self.course.on_point is not None:
            self.course.on_point(point, first, (chosen or first) if choice else None)
        return chosen

    def _take(self, first: Step, choice: int) -> Step:
        """Put the first step back and take another out of the batch; run the callbacks that stood before it."""
        batch = self._batch
        if len(batch) == self._steps:
            index = choice - 1 if choice > 0 else choice
            chosen = batch[index]
            del batch[index]
            batch.appendleft(first)
        else:
            batch.appendleft(first)
            index = [i for i, handle in enumerate(batch) if type(handle) is Step][choice]
            chosen = batch[index]
            del batch[index]
            self._run_callbacks_before(index)
        assert isinstance(chosen, Step)
        return chosen

    def _run_callbacks_before(self, index: int) -> None:
        before = [self._batch.popleft() for _ in range(index)]
        self._batch.extendleft(handle for handle in reversed(before) if type(handle) is Step)
        for handle in before:
            if type(handle) is not Step and not handle._cancelled:
                handle._run()

    def _bring_back(self) -> None:
        """Let those who stepped aside go on: when nothing else can run, or after some patience."""
        self._patience += 1
        if not self._queue or self._patience > _PATIENCE:
            self._queue.extend(self._aside)
            self._steps_to_come += len(self._aside)
            self._aside.clear()
            self._patience = 0

    def _sort_in(self, step: Step) -> None:
        """Keep tasks that are cancelled together in the order of their creation.

        Who cancels several often holds them in a set, whose order is another in every process.
        """
        queue, number = self._queue, self._number_of(step)
        index = len(queue) - 1
        while index and self._was_cancelled(queue[index - 1]) and self._number_of(queue[index - 1]) > number:
            index -= 1
        if index < len(queue) - 1:
            queue.pop()
            queue.insert(index, step)

    def _number_of(self, handle: Handle) -> int:
        return self.number_of(handle._callback.__self__)  # type: ignore[attr-defined]

    @staticmethod
    def _was_cancelled(handle: Handle) -> bool:
        return type(handle) is Step and bool(handle._args) and handle._args[0].cancelled()


def _waiting_for(handle: Handle) -> Iterator[Task[Any]]:
    """Yield the tasks that wait for a future among the arguments of a call, or for the event that it sets."""
    for thing in (*(handle._args or ()), getattr(handle._callback, "__self__", None)):  # type: ignore[attr-defined]
        event = getattr(thing, "_event", thing)  # anyio's event has asyncio's inside
        for future in getattr(event, "_waiters", None) or (event,):
            for callback, _ in getattr(future, "_callbacks", None) or ():
                task = getattr(callback, "__self__", None)
                if isinstance(task, Task):
                    yield task


def _wake_up() -> None:
    """Nothing: that it was to be called has woken the loop."""


_METHODS = frozenset(dir(Task))


def _is_step(callback: Callable[..., object]) -> bool:
    """Tell a task's own step from its methods: ``call_soon(task.cancel)`` is an ordinary callback."""
    return getattr(callback, "__name__", "") not in _METHODS
