"""The driver: waits for requests on the event loop. Nothing else in this package knows that there is one.

The driver runs `Steps`: generators that yield requests. An engine makes progress only when it is asked whether a
request is complete, so the driver polls:

1. When steps are started, it polls for some microseconds at once. Mostly the other workers reach a step at the same
   moment, and then the step is over before the last replica awaits its handle.
2. After that, one of the tasks that await something of the strategy (`Driver.until`) polls for all steps: at every turn
   of the loop, and between two turns in which no other task had anything to do. It does this for 0.2 ms, since most
   steps are that short; while values are being moved, for 20 ms, since engines move them only when they are polled.
3. Then it sleeps between polls, longer and longer. Event loops round their timers up to a millisecond, so on Linux the
   sleep uses a timer of the system (timerfd) that the loop reads.

A request that announces its completion is not polled.

What was rejected: a thread that blocks in the engine (it uses a whole core, and takes the interpreter lock at each
wake-up); timers of the event loop (2 ms a wake-up, where a step takes 0.02 ms).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import Any, Final

import anyio
from anyio import wait_readable

from aiodist._runtime.loop import current_loop, running_on_trio
from aiodist._workers.transport import Request, Steps

_AT_ONCE_SECONDS: Final = 25e-6
_MOVING_SECONDS: Final = 150e-6
_SPIN_SECONDS: Final = 200e-6
_MOVING_SPIN_SECONDS: Final = 20e-3
_IDLE_TURN_SECONDS: Final = 30e-6
_BETWEEN_TURNS_SECONDS: Final = 50e-6
_SHORTEST_NAP: Final = 100e-6
_LONGEST_NAP: Final = 4e-3


@dataclass(slots=True, eq=False)
class _Process:
    """Steps that are under way."""

    steps: Steps[Any]
    request: Request | None = None  # what they wait for; None before the first
    announced: bool = False  # the request tells when it is complete


class _Waiter:
    """A task that awaits something, in its own event loop."""

    def __init__(self, done: Callable[[], bool]) -> None:
        self.done = done
        self.thread = get_ident()
        self.event = _new_event()
        _, self.call_soon_threadsafe = current_loop()

    def wake(self) -> None:
        if get_ident() == self.thread:
            self.event.set()
        else:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self.event.set()

    async def wait(self) -> None:
        await self.event.wait()
        self.renew()

    def renew(self) -> None:
        if isinstance(self.event, asyncio.Event):
            self.event.clear()
        else:  # trio's are for once
            self.event = _new_event()


def _new_event() -> Any:
    """Return an event of the loop that runs; anyio's own takes three times the time."""
    if not running_on_trio():
        return asyncio.Event()
    import trio

    return trio.Event()


class Driver:
    """Carries out the steps of one strategy.

    Args:
        failed: is called with an error that steps raise.

    Attributes:
        moving: how many steps move values that all workers have come to.
    """

    def __init__(self, failed: Callable[[Exception], object]) -> None:
        self.moving = 0
        self._failed = failed
        self._processes: list[_Process] = []
        self._waiters: list[_Waiter] = []
        self._calls: deque[Callable[[], object]] = deque()
        self._loop: Callable[..., object] | None = None
        self._timer: Timer | None = None
        self._started = 0.0

    def start(self, steps: Steps[Any]) -> None:
        """Run steps as far as they go at once; the rest runs while a task waits in `until`."""
        process = _Process(steps)
        if not self._advance(process, _AT_ONCE_SECONDS):
            self._processes.append(process)
            self._started = perf_counter()
            if not process.announced:
                self.notify()

    def notify(self) -> None:
        """Wake the task that polls, from any thread: something may be complete."""
        timer = self._timer  # which another thread may just give back
        if timer is not None:
            timer.cut_short()
        for waiter in self._waiters[:1]:
            waiter.wake()

    def call(self, fn: Callable[[], object]) -> None:
        """Call a function, from any thread, where steps run: while a task waits there, or at the next use."""
        self._calls.append(fn)
        self.notify()

    def carry_out_calls(self) -> None:
        """Make the calls that `call` was given; in the thread that uses the strategy."""
        while self._calls:
            self._calls.popleft()()

    @property
    def is_waited_for(self) -> bool:
        """Whether a task waits, so that calls and steps are carried out."""
        return bool(self._waiters)

    @property
    def waiting_seconds(self) -> float:
        """How long a task has waited for other workers without any progress."""
        return perf_counter() - self._started if self._waiters and self._processes else 0.0

    def ask_loop(self, fn: Callable[[], object]) -> bool:
        """Have the event loop that was last used call a function, from any thread; return whether it is open."""
        try:
            if self._loop is None:
                return False
            self._loop(fn)
        except RuntimeError:
            return False
        return True

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until a condition holds, and run steps meanwhile. It is checked after each step and each `notify`."""
        if done():
            return
        waiter = _Waiter(done)
        self._loop = waiter.call_soon_threadsafe
        self._waiters.append(waiter)
        try:
            while not done():
                self.carry_out_calls()
                if self._waiters[0] is waiter:
                    await self._go_on(waiter)
                else:
                    await waiter.wait()
        finally:
            self._waiters.remove(waiter)
            if self._waiters:
                self._waiters[0].wake()  # the next waiter polls from now on

    async def _go_on(self, waiter: _Waiter) -> None:
        """Poll once and give the loop a turn; or wait for an announcement, or sleep."""
        gone_on = self._advance_all()
        for other in self._waiters[1:]:
            if other.done():
                other.wake()
        if gone_on and waiter.done():
            return
        if not [process for process in self._processes if not process.announced]:
            await waiter.wait()
            return
        now = perf_counter()
        elapsed = now - self._started
        if not gone_on and elapsed >= (_MOVING_SPIN_SECONDS if self.moving else _SPIN_SECONDS):
            await self._nap(min(_LONGEST_NAP, max(_SHORTEST_NAP, elapsed / 8)))
        else:
            await _next_turn()
            if perf_counter() - now < _IDLE_TURN_SECONDS:
                self._advance_all(_BETWEEN_TURNS_SECONDS)
        if waiter.event.is_set():
            waiter.renew()

    def _advance_all(self, seconds: float = 0.0) -> bool:
        """Poll every request once, or repeatedly for so long; return whether any steps made progress."""
        gone_on = False
        seconds /= len(self._processes) or 1
        for process in list(self._processes):
            if process not in self._processes:  # another, by what it did, has
                continue
            before = process.request
            if self._advance(process, seconds):
                self._processes.remove(process)
                gone_on = True
            elif process.request is not before:
                gone_on = True
        if gone_on:
            self._started = perf_counter()
        return gone_on

    def _advance(self, process: _Process, seconds: float = 0.0) -> bool:  # noqa: C901  (the way of every step)
        """Run steps as far as they go; return whether they are over.

        A request is polled for the given time, counted from the first one, or for longer while values are being moved:
        the other workers are moving them, too.
        """
        steps = process.steps
        begun = perf_counter() if process.request is not None else 0.0
        try:
            while True:
                try:
                    if process.request is not None:
                        test = process.request.test
                        while not test():
                            if not seconds or process.announced:
                                return False
                            if perf_counter() - begun > (_MOVING_SECONDS if self.moving else seconds):
                                return False
                except Exception as error:  # noqa: BLE001  (of the engine, for the steps)
                    process.request = steps.throw(error)
                else:
                    process.request = next(steps)
                announce = getattr(process.request, "add_done_callback", None)  # see `Request`
                process.announced = announce is not None
                if announce is not None:
                    announce(self.notify)
                now = perf_counter()
                begun = begun or now
                if now - begun > _MOVING_SECONDS:
                    return False  # the loop's other tasks have their turn
        except StopIteration:
            return True
        except Exception as error:  # noqa: BLE001  (whatever it is)
            self._failed(error)
            return True

    async def _nap(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = Timer()
        await self._timer.sleep(seconds)


async def _next_turn() -> None:
    """Let the loop's other tasks run; anyio's checkpoint does the same, in three times the time."""
    if running_on_trio():
        from trio.lowlevel import checkpoint

        await checkpoint()
    else:
        await asyncio.sleep(0)


class Timer:
    """Short sleeps on a timer of the system's, read by the event loop; on the loop's own where there is none."""

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
        """Wake who sleeps; from any thread."""
        if self._asleep:
            self._set(1e-9)

    def _set(self, seconds: float) -> None:
        spec = (ctypes.c_long * 4)(0, 0, 0, max(1, int(seconds * 1e9)))  # no interval, then the first expiry
        self._libc.timerfd_settime(self._fd, 0, spec, None)

    def __del__(self) -> None:
        """Give it back."""
        if self._fd >= 0:
            os.close(self._fd)
