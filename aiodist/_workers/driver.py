"""The driver waits for requests on the event loop. Nothing else in this package knows about the loop.

The driver runs `Steps`, generators that yield requests. An engine makes progress only while a request is tested, so the
driver polls:

1. When steps are started, it polls for some microseconds at once. Workers usually reach a step at about the same time,
   and then the step is complete before the last replica awaits its handle.
2. After that, one of the tasks that wait for the strategy (`Driver.until`) polls for all steps: at every turn of the
   loop, and between turns if the loop is idle. It does so for 0.2 ms, which is enough for most steps, or for 20 ms
   while values are being moved, because engines move them only while they are polled.
3. Then it sleeps between polls, longer and longer. Event loops round timers up to a millisecond, so on Linux the sleep
   uses a timerfd.

A request that announces its completion is not polled. The announcement has the steps continue in a callback of the
loop, without waking a task.

Rejected: a thread that blocks in the engine (it occupies a core and takes the interpreter lock at each wake-up); the
event loop's timers (2 ms a wake-up, for steps of 0.02 ms).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any, Final

import anyio
from anyio import wait_readable
from anyio.lowlevel import checkpoint

from aiodist._runtime.loop import current_loop, running_on_trio
from aiodist._workers.transport import Request, Steps

_AT_ONCE_SECONDS: Final = 60e-6
_MOVING_SECONDS: Final = 150e-6
_SPIN_SECONDS: Final = 200e-6
_MOVING_SPIN_SECONDS: Final = 20e-3
_IDLE_TURN_SECONDS: Final = 30e-6
_BETWEEN_TURNS_SECONDS: Final = 50e-6
_SHORTEST_NAP: Final = 100e-6
_LONGEST_NAP: Final = 4e-3


@dataclass(slots=True, eq=False)
class _Process:
    """Steps in progress."""

    steps: Steps[Any]
    request: Request | None = None  # what they wait for; None before the first request
    announced: bool = False  # the request announces its completion


class _Waiter:
    """A task that waits, in its own event loop."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.event = _new_event()
        loop, self.call_soon_threadsafe = current_loop()
        self._call_soon: Any = self.call_soon_threadsafe
        if hasattr(loop, "call_soon"):  # of asyncio: quicker
            self._call_soon = partial(loop.call_soon, context=copy_context())
        self._thread = get_ident()

    def call(self, fn: Callable[[], object]) -> None:
        """Call a function in the task's loop, from any thread."""
        try:
            (self._call_soon if get_ident() == self._thread else self.call_soon_threadsafe)(fn)
        except RuntimeError:  # the loop is closed
            return  # nobody waits any more

    def wake(self) -> None:
        if get_ident() == self._thread:
            self.event.set()
        else:
            self.call(self.event.set)

    async def wait(self) -> None:
        await self.event.wait()
        self.event = _new_event()  # trio's events cannot be cleared


def _new_event() -> Any:
    """Return an event of the running loop, three times as fast as anyio's."""
    if not running_on_trio():
        return asyncio.Event()
    import trio

    return trio.Event()


class Driver:
    """Runs the steps of one strategy.

    Args:
        failed: called with any error that steps raise.

    Attributes:
        moving: how many steps are moving values.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self.moving = 0
        self._failed = failed
        self._processes: dict[_Process, None] = {}  # in the order in which they were started
        self._waiters: list[_Waiter] = []
        self._calls: deque[Callable[[], object]] = deque()
        self._loop: Callable[..., object] | None = None
        self._timer: Timer | None = None
        self._started = 0.0

    def start(self, steps: Steps[Any]) -> None:
        """Start steps; what does not complete at once continues while a task waits in `until`."""
        process = _Process(steps)
        if not self._advance(process, _AT_ONCE_SECONDS):
            self._processes[process] = None
            self._started = perf_counter()
            if not process.announced:
                self.notify()

    def notify(self) -> None:
        """Wake the polling task, from any thread, because something may be complete."""
        timer = self._timer
        if timer is not None:
            timer.cut_short()
        for waiter in self._waiters[:1]:
            waiter.wake()

    def _announced(self, process: _Process) -> None:
        """Have steps continue whose request is complete; called from any thread."""
        if self._waiters:
            self._waiters[0].call(partial(self._advance_announced, process))

    def _advance_announced(self, process: _Process) -> None:
        self._advance_further(process)
        self._wake_done()
        if not process.announced:
            self.notify()

    def call(self, fn: Callable[[], object]) -> None:
        """Schedule a function, from any thread: it runs while a task waits, or at the strategy's next use."""
        self._calls.append(fn)
        self.notify()

    def carry_out_calls(self) -> None:
        """Run the functions scheduled by `call`."""
        while self._calls:
            self._calls.popleft()()

    @property
    def is_waited_for(self) -> bool:
        """Whether a task waits, so that calls and steps make progress."""
        return bool(self._waiters)

    @property
    def waiting_seconds(self) -> float:
        """For how long a task has waited for other workers without progress."""
        return perf_counter() - self._started if self._waiters and self._processes else 0.0

    def ask_loop(self, fn: Callable[[], object]) -> bool:
        """Schedule a function on the last event loop, from any thread; return whether that loop is open."""
        try:
            if self._loop is None:
                return False
            self._loop(fn)
        except RuntimeError:
            return False
        return True

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until a condition holds, and run steps meanwhile; check it after each step and each `notify`."""
        if done():
            return
        waiter = _Waiter(done)
        self._loop = waiter.call_soon_threadsafe
        self._waiters.append(waiter)
        try:
            while not done():
                self.carry_out_calls()
                if self._waiters[0] is waiter:
                    await self._poll(waiter)
                else:
                    await waiter.wait()
        finally:
            self._waiters.remove(waiter)
            if self._waiters:
                self._waiters[0].wake()  # which polls from now on

    async def _poll(self, waiter: _Waiter) -> None:
        """Poll once; then give the loop a turn, wait for an announcement, or sleep."""
        progressed = self._advance_all()
        self._wake_done()
        if progressed and waiter.done():
            return
        if all(process.announced for process in self._processes):
            await waiter.wait()
            return
        now = perf_counter()
        elapsed = now - self._started
        if not progressed and elapsed >= (_MOVING_SPIN_SECONDS if self.moving else _SPIN_SECONDS):
            self._timer = self._timer or Timer()
            await self._timer.sleep(min(_LONGEST_NAP, max(_SHORTEST_NAP, elapsed / 8)))
        else:
            await checkpoint()
            if perf_counter() - now < _IDLE_TURN_SECONDS:
                self._advance_all(_BETWEEN_TURNS_SECONDS)
        if waiter.event.is_set():
            waiter.event = _new_event()

    def _wake_done(self) -> None:
        for waiter in self._waiters:
            if waiter.done():
                waiter.wake()

    def _advance_all(self, seconds: float = 0.0) -> bool:
        """Poll every request once, or repeatedly for some time; return whether any steps made progress."""
        seconds /= len(self._processes) or 1
        progress = [self._advance_further(process, seconds) for process in list(self._processes)]
        return any(progress)

    def _advance_further(self, process: _Process, seconds: float = 0.0) -> bool:
        """Advance steps unless they are over; return whether they made progress."""
        if process not in self._processes:
            return False
        before = process.request
        if self._advance(process, seconds):
            self._processes.pop(process, None)  # which a call in these steps may have done
        elif process.request is before:
            return False
        self._started = perf_counter()
        return True

    def _advance(self, process: _Process, seconds: float = 0.0) -> bool:  # noqa: C901  (the hot path, in one frame)
        """Run steps as far as possible; return whether they are over.

        Requests are polled for the given time in all, or for longer while values are being moved, because then the
        other workers are polling, too.
        """
        steps = process.steps
        begun = 0.0
        try:
            while True:
                try:
                    if process.request is not None:
                        test = process.request.test
                        while not test():
                            if not seconds or process.announced:
                                return False
                            now = perf_counter()
                            begun = begun or now
                            if now - begun > (_MOVING_SECONDS if self.moving else seconds):
                                return False
                except Exception as error:  # noqa: BLE001  (the engine's; the steps may handle it)
                    process.request = steps.throw(error)
                else:
                    process.request = next(steps)
                announce = getattr(process.request, "add_done_callback", None)  # see `Request`
                process.announced = announce is not None
                if announce is not None:
                    announce(partial(self._announced, process))
                now = perf_counter()
                begun = begun or now
                if now - begun > _MOVING_SECONDS:
                    return False  # the loop's other tasks need a turn
        except StopIteration:
            return True
        except Exception as error:  # noqa: BLE001  (any error ends the strategy)
            self._failed(error)
            return True


class Timer:
    """Short sleeps by a timerfd that the event loop reads; by the loop's own timers on other systems."""

    _CLOCK_MONOTONIC: Final = 1
    _NONBLOCK_CLOEXEC: Final = 0o4000 | 0o2000000

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = self._libc.timerfd_create(self._CLOCK_MONOTONIC, self._NONBLOCK_CLOEXEC) if self._libc else -1
        self._asleep = False

    async def sleep(self, seconds: float) -> None:
        if self._fd < 0:
            await anyio.sleep(seconds)
            return
        self._set(seconds)
        self._asleep = True
        try:
            await wait_readable(self._fd)
        finally:
            self._asleep = False
        with suppress(BlockingIOError):
            os.read(self._fd, 8)

    def cut_short(self) -> None:
        """Wake the sleeping task, from any thread."""
        if self._asleep:
            self._set(1e-9)

    def _set(self, seconds: float) -> None:
        spec = (ctypes.c_long * 4)(0, 0, 0, max(1, int(seconds * 1e9)))  # the interval, none, and the first expiry
        self._libc.timerfd_settime(self._fd, 0, spec, None)

    def __del__(self) -> None:
        """Close the timer."""
        if self._fd >= 0:
            os.close(self._fd)
