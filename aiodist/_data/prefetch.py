"""Prefetching: a background thread that stays a bounded number of elements ahead of the consumer.

The thread knows the elements, never the iterator that the consumer holds: so an iterator that is dropped (a `break`, an
exception, a cancelled task) is collected, which ends the thread. A consumer has nothing to remember. `close` also waits
for that end. An element stays the next one until it is taken: whoever is cancelled while waiting for it loses nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
        self._thread = ThreadPoolExecutor(1, "aiodist prefetch")
        self._elements = elements
        self._ahead: deque[Future[Any]] = deque(self._make() for _ in range(ahead))
        weakref.finalize(self, self._thread.shutdown, wait=False, cancel_futures=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            wait([self._ahead[0]])
        element = self._take()
        if element is _END:
            raise StopIteration
        return element

    def __aiter__(self) -> Self:
        return self

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

    def _make(self) -> Future[Any]:
        return self._thread.submit(next, self._elements, _END)

    def _take(self) -> Any:
        """Return the next element, which is there, or `_END`; raise what the thread raised, once."""
        if not self._ahead:
            return _END
        future = self._ahead.popleft()
        self._ahead.append(self._make())
        element = future.result()
        if element is _END:
            self._end(wait=False)
        return element

    def close(self) -> None:
        """End the thread, and wait for its end: at most for the element that it is making."""
        self._end(wait=True)

    def _end(self, *, wait: bool) -> None:
        self._ahead.clear()
        self._elements = iter(())
        self._thread.shutdown(wait=wait, cancel_futures=True)


def _setter(event: anyio.Event) -> Callable[[object], None]:
    """Return a function that sets an event of the running loop from any thread."""
    _, call = current_loop()

    def set_event(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            call(event.set)

    return set_event
