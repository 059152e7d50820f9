"""Iterators, plain and asynchronous: over a plain one, and over what a background thread makes ahead of the consumer.

The thread knows the elements, never the iterator that the consumer holds: so an iterator that is dropped (a `break`, an
exception, a cancelled task) is collected, which ends the thread. A consumer has nothing to remember. `close` also waits
for that end. An element stays the next one until it is taken: whoever is cancelled while waiting for it loses nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, Self, TypeAlias

import anyio
from anyio.lowlevel import checkpoint

from aiodist._runtime.loop import current_loop

_END: Final = object()
_Wanted: TypeAlias = SimpleQueue[Future[Any] | None]


class Steps:
    """An iterator over a plain one, asynchronous too: then each step lets other tasks run, and can be cancelled."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._elements)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        await checkpoint()
        for element in self._elements:
            return element
        raise StopAsyncIteration


class Prefetched(Steps):
    """Such an iterator over elements that a thread makes ahead of time.

    Args:
        elements: makes them; used in the thread alone.
        ahead: how many may be ready, or in the making, before they are asked for.
    """

    def __init__(self, elements: Iterator[Any], ahead: int) -> None:  # which this object itself does not hold
        self._lock = Lock()
        self._wanted: _Wanted = SimpleQueue()
        self._ahead: deque[Future[Any]] = deque()
        for _ in range(ahead):
            self._ask()
        weakref.finalize(self, _end, self._ahead, self._wanted)
        # No executor: it takes no work any more once the main thread has ended, and holds up the interpreter's exit.
        self._thread = Thread(target=_make_all, args=(elements, self._wanted), name="aiodist prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        with suppress(IndexError):  # there are no more
            wait([self._ahead[0]])
        element = self._take()
        if element is _END:
            raise StopIteration
        return element

    async def __anext__(self) -> Any:
        await checkpoint()
        while self._ahead and not self._ahead[0].done():
            event = anyio.Event()
            self._ahead[0].add_done_callback(_setter(event))
            await event.wait()
        element = self._take()
        if element is _END:
            raise StopAsyncIteration
        return element

    def _ask(self) -> None:
        future: Future[Any] = Future()
        self._ahead.append(future)
        self._wanted.put(future)

    def _take(self) -> Any:
        """Return the next element, which is there, or `_END`; raise what the thread raised, once."""
        with self._lock:
            if not self._ahead:
                return _END
            future = self._ahead.popleft()
            self._ask()
        element = future.result()
        if element is _END:
            self._end()
        return element

    def close(self) -> None:
        """End the thread, and wait for its end: at most for the element that it is making."""
        self._end()
        self._thread.join()

    def _end(self) -> None:
        with self._lock:
            _end(self._ahead, self._wanted)


def _end(ahead: deque[Future[Any]], wanted: _Wanted) -> None:
    """Have no more elements made. It may be called by a garbage collection, in any thread and at any point of it."""
    for future in ahead:
        future.cancel()
    ahead.clear()
    wanted.put(None)


def _make_all(elements: Iterator[Any], wanted: _Wanted) -> None:
    while (future := wanted.get()) is not None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(next(elements, _END))
            except BaseException as error:  # noqa: BLE001  (it is the consumer's)
                future.set_exception(error)
        del future  # and with it the element, which is the consumer's


def _setter(event: anyio.Event) -> Callable[[object], None]:
    """Return a function that sets an event of the running loop from any thread."""
    _, call = current_loop()

    def set_event(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            call(event.set)

    return set_event
