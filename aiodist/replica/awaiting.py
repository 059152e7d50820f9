"""Awaiting what an engine has begun, without blocking the event loop.

Engines make progress when they are asked whether they are done. A request that tells when it is done is waited for as
anything else is. The others are asked again and again, at every turn of the loop, and between two turns for as long as
some turns take, if nobody else had anything to do in the last one: for a fifth of a millisecond, since most steps are
that short. Where values move, which takes both sides' attention all the time, they are asked at every turn for two
milliseconds, and other processes are given way to. Then they are asked after naps, which grow with the time that has
passed. Who asks for one keeps the loop's other tasks from asking, so all that is waited for in the loop is asked for,
until one of it is complete. A request that goes on by itself, in threads of the engine's, is asked after naps from the
beginning: asking all the time would take the core that those need. Event loops round their timers up to a millisecond,
so that naps are taken on a timer of the system's that the loop reads, where there is one (Linux).

What was rejected: a thread that blocks in the engine (it burns a core, and takes the interpreter lock from everyone at
each wake-up); timers of the event loop (2 ms a wake-up, where a step takes 0.02).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from threading import get_ident
from types import coroutine
from typing import Final, TypeVar

import anyio
from anyio import CancelScope, get_cancelled_exc_class, sleep, wait_readable

from aiodist.replica.engine import running_on_trio
from aiodist.workers.communicator import Request
from aiodist.workers.transfers import Steps

T = TypeVar("T")

LONGEST_TURN_SECONDS: Final = 500e-6
"""How long the loop may be kept from its other tasks by steps that need not be waited for."""

_SPIN_SECONDS: Final = 200e-6
_SPIN_SECONDS_OF_VALUES: Final = 2e-3
_IDLE_TURN_SECONDS: Final = 30e-6
_BETWEEN_TURNS_SECONDS: Final = 50e-6
_SHORTEST_NAP: Final = 100e-6
_SHORTEST_NAP_BY_ITSELF: Final = 50e-6
_LONGEST_NAP: Final = 4e-3
_LONGEST_NAP_OF_VALUES: Final = 100e-6


napping: Final[set[int]] = set()
"""The timers of the system's on which somebody sleeps."""


class InterruptedStep(Exception):  # noqa: N818  (no error: somebody has rung)
    """A request is not waited for any longer."""


class Bell:
    """Wakes one waiting task, from any thread.

    Args:
        call_soon_threadsafe: calls a function in the event loop.
        for_values: requests move large values, which engines do only while they are asked; else they wait for other
            workers, which may take long.

    Attributes:
        interrupts: requests are not waited for any longer.
        spin_seconds: how long to ask at every turn of the loop.
    """

    def __init__(self, call_soon_threadsafe: Callable[..., object], *, for_values: bool = False) -> None:
        self._call = call_soon_threadsafe
        self._longest = _LONGEST_NAP_OF_VALUES if for_values else _LONGEST_NAP
        self.spin_seconds = _SPIN_SECONDS_OF_VALUES if for_values else _SPIN_SECONDS
        self._thread = get_ident()
        self._event = anyio.Event()
        self._nap: _Timer | None = None
        self.interrupts = False

    def ring(self) -> None:
        """Wake who waits, or who waits next."""
        if get_ident() == self._thread:
            self._event.set()
        else:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self._call(self._event.set)

    def interrupt(self) -> None:
        """Let no request be waited for from now on."""
        self.interrupts = True
        self.ring()

    async def wait(self) -> None:
        """Wait until it rings."""
        await self._event.wait()
        self._event = anyio.Event()

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so, which whoever makes it so rings for; at most for so long."""
        with anyio.move_on_after(seconds):
            while not condition():
                await self.wait()

    async def nap(self, elapsed: float, *, by_itself: bool = False) -> None:
        """Wait for a short time, the longer the longer it has been waited.

        Args:
            elapsed: that.
            by_itself: what is waited for goes on without being asked.
        """
        if self._nap is None:
            self._nap = _Timer()
        shortest, longest = (_SHORTEST_NAP_BY_ITSELF, _LONGEST_NAP) if by_itself else (_SHORTEST_NAP, self._longest)
        await self._nap.sleep(min(longest, max(shortest, elapsed / 8)))

    def close(self) -> None:
        """Give back what it has of the system."""
        if self._nap is not None:
            self._nap.close()


async def until(request: Request, bell: Bell) -> bool:
    """Wait until a request is complete; return whether the loop has had a turn meanwhile.

    Raises:
        InterruptedStep: the bell has interrupted it.
        Exception: what went wrong in the engine.
    """
    if request.test():
        return False
    await _wait(request, bell)
    return True


async def _wait(request: Request, bell: Bell) -> None:
    tell = getattr(request, "add_done_callback", None)  # which a `TellingRequest` has; to ask its type takes 20 µs
    if tell is not None:
        tell(bell.ring)
        while not request.test():
            _check(bell)
            await bell.wait()
        return
    if getattr(request, "by_itself", False):  # which an `IndependentRequest` has
        begun = time.perf_counter()
        while not request.test():
            _check(bell)
            await bell.nap(time.perf_counter() - begun, by_itself=True)
        return
    requests = _asked_for.requests
    requests.append(request)
    try:
        await _ask(request, bell)
    finally:
        requests.remove(request)


class _AskedFor(threading.local):
    """The requests that tasks of a thread's event loop ask for: while one asks, the others cannot."""

    def __init__(self) -> None:
        self.requests: list[Request] = []


_asked_for: Final = _AskedFor()


async def _ask(request: Request, bell: Bell) -> None:
    begun = time.perf_counter()
    while not request.test():
        _check(bell)
        now = time.perf_counter()
        elapsed = now - begun
        if elapsed < bell.spin_seconds:
            late = elapsed > _SPIN_SECONDS
            if late:
                give_way()
            await next_turn()
            turned = time.perf_counter()
            idle = turned - now < _IDLE_TURN_SECONDS and not late
            if idle and asked_until(request, turned + _BETWEEN_TURNS_SECONDS):
                return
        else:
            await bell.nap(elapsed)


def asked_until(request: Request, moment: float) -> bool:
    """Ask a request again and again, until it is complete, which is returned; or until that moment, or another is."""
    others = [other for other in _asked_for.requests if other is not request]
    while not request.test():
        if time.perf_counter() > moment or (others and any(map(_is_over, others))):
            return False
    return True


def _is_over(request: Request) -> bool:
    """Whether who waits for a request has something to do."""
    try:
        return request.test()
    except Exception:  # noqa: BLE001  (of the engine, for who waits)
        return True


give_way: Final[Callable[[], object]] = getattr(os, "sched_yield", int)
"""Lets another process have this core, where there are more workers than cores; where the system has a call for it."""


async def next_turn() -> None:
    """Let the loop's other tasks run; anyio's checkpoint does the same, in three times the time."""
    if running_on_trio():
        from trio.lowlevel import checkpoint

        await checkpoint()
    else:
        await _turn()


@coroutine
def _turn() -> Generator[None, None, None]:
    yield


def _check(bell: Bell) -> None:
    if bell.interrupts:
        raise InterruptedStep


async def outlast(wait: Callable[[], Awaitable[T]], before: Callable[[T], object] | None = None) -> T:
    """Wait for something, whoever is cancelled meanwhile; be cancelled after it.

    Args:
        wait: waits for it; is called again where asyncio's own cancellation, which no shield keeps out, has ended it.
        before: is called with what that returns, before a cancellation is raised.
    """
    cancelled: BaseException | None = None
    found: list[T] = []
    with CancelScope(shield=True):
        while not found:
            try:
                found.append(await wait())
            except get_cancelled_exc_class() as error:
                cancelled = error
    if cancelled is None:
        return found[0]
    if before is not None:
        before(found[0])
    raise cancelled


async def complete(steps: Steps[T], bell: Bell) -> T:
    """Carry out steps that yield requests; return what they return.

    Raises:
        InterruptedStep: the bell has interrupted one.
        Exception: what they raise.
    """
    try:
        while True:
            await until(next(steps), bell)
    except StopIteration as end:
        result: T = end.value
        return result


class _Timer:
    """Short sleeps on a timer of the system's, read by the event loop; on the loop's own where there is none."""

    _CLOCK_MONOTONIC: Final = 1
    _NONBLOCK_CLOEXEC: Final = 0o4000 | 0o2000000

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._fd = self._libc.timerfd_create(self._CLOCK_MONOTONIC, self._NONBLOCK_CLOEXEC) if self._libc else -1

    async def sleep(self, seconds: float) -> None:
        if self._fd < 0 or self._libc is None:
            await sleep(seconds)
            return
        whole, rest = divmod(seconds, 1.0)
        spec = (ctypes.c_long * 4)(0, 0, int(whole), max(1, int(rest * 1e9)))  # no interval, then the first expiry
        self._libc.timerfd_settime(self._fd, 0, spec, None)
        napping.add(self._fd)
        try:
            await wait_readable(self._fd)
        finally:
            napping.discard(self._fd)
        with suppress(BlockingIOError):
            os.read(self._fd, 8)

    def close(self) -> None:
        if self._fd >= 0 and self._fd not in napping:  # who sleeps on it would not wake
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Give it back, where its user has been left behind in a loop that is over."""
        self.close()
