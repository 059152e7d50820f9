"""Prefetching: a background thread that stays a bounded number of elements ahead of the consumer.

The thread knows the buffer and the elements, never the iterator that the consumer holds: so an iterator that is dropped
(a `break`, an exception, a cancelled task) is collected, which closes the buffer, which ends the thread. A consumer has
nothing to remember. `close` also waits for that end.

A plain consumer waits on the buffer's condition; an asynchronous one on an event that the thread sets through its event
loop, so that it can be cancelled while it waits, and nothing is lost then.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, Self

import anyio
from anyio.lowlevel import checkpoint

from aiodist._runtime.loop import current_loop

_END: Final = object()


class Prefetched:
    """An iterator, plain and asynchronous, over elements that a thread makes ahead of time.

    Args:
        elements: makes them; used in the thread alone.
        ahead: how many may be ready, or in the making, before they are asked for.
    """

    def __init__(self, elements: Iterator[Any], ahead: int) -> None:
        self._buffer = _Buffer(ahead)
        self._close = weakref.finalize(self, self._buffer.close)
        self._thread = threading.Thread(
            target=self._buffer.fill, args=(elements,), name="aiodist prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        element = self._buffer.take()
        if element is _END:
            raise StopIteration
        return element

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        await checkpoint()
        while not self._buffer.ready():
            event = anyio.Event()
            self._buffer.call_when_ready(_setter(event))
            await event.wait()
        element = self._buffer.take()
        if element is _END:
            raise StopAsyncIteration
        return element

    def close(self) -> None:
        """End the thread, and wait for its end: at most for the element that it is making."""
        self._close()
        self._thread.join()


class _Buffer:
    """Elements between a thread that makes them and consumers: in order, bounded, and `_END` stays the last.

    The lock can be taken twice by one thread: a garbage collection can close the buffer in the middle of its own use.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition(threading.RLock())
        self._elements: deque[Any] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._when_ready: list[Callable[[], None]] = []

    def fill(self, elements: Iterator[Any]) -> None:
        """Make elements while there is room, until they end, fail, or the buffer is closed."""
        try:
            while self._wait_for_room():
                element = next(elements, _END)
                if element is _END:
                    break
                self._put(element)
        except BaseException as error:  # noqa: BLE001  (it is the consumer's)
            self._error = error
        self._put(_END)

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._elements) < self._limit)
            return not self._closed

    def _put(self, element: Any) -> None:
        with self._changed:
            self._elements.append(element)
            self._announce()

    def _announce(self) -> None:
        self._changed.notify_all()
        callbacks, self._when_ready = self._when_ready, []
        for callback in callbacks:
            callback()

    def ready(self) -> bool:
        """Return whether `take` has something to give at once."""
        return bool(self._elements)

    def call_when_ready(self, fn: Callable[[], None]) -> None:
        """Call a function, from any thread, when it is ready, or now if it is."""
        with self._changed:
            self._when_ready.append(fn)
            if self._elements:
                self._announce()

    def take(self) -> Any:
        """Wait until it is ready, and return the next element, or `_END`; raise what the thread raised, once."""
        with self._changed:
            self._changed.wait_for(self.ready)
            if self._elements[0] is not _END:
                self._changed.notify_all()
                return self._elements.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        return _END

    def close(self) -> None:
        """Have no more elements made, and give none any more."""
        with self._changed:
            self._closed = True
            self._elements.clear()
            self._put(_END)


def _setter(event: anyio.Event) -> Callable[[], None]:
    """Return a function that sets an event of the running loop from any thread."""
    _, call = current_loop()

    def set_event() -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            call(event.set)

    return set_event
