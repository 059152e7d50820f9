"""Iterators, plain and asynchronous: over a plain one, and over what a background thread makes ahead of the consumer.

The thread knows the elements, never the iterator that the consumer holds: so an iterator that is dropped (a `break`, an
exception, a cancelled task) is collected, and with it its pool, which ends the thread. A consumer has nothing to
remember. An element stays the next one until it is taken: whoever is cancelled while waiting for it loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self

import anyio
from anyio.lowlevel import checkpoint

from aiodist._runtime.loop import current_loop

_END: Final = object()


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
    """Such an iterator over elements that a thread makes, so many of them before they are asked for."""

    def __init__(self, elements: Iterator[Any], ahead: int) -> None:  # which this object itself does not hold
        self._pool = ThreadPoolExecutor(1, "aiodist prefetch")
        self._make = partial(next, elements, _END)
        self._ahead = deque(self._pool.submit(self._make) for _ in range(ahead))

    def __next__(self) -> Any:
        wait([*self._ahead][:1])
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

    def _take(self) -> Any:
        """Return the next element, which is there, or `_END`; raise what the thread raised, once."""
        if not self._ahead:
            return _END
        future = self._ahead.popleft()
        self._ahead.append(self._pool.submit(self._make))
        element = future.result()
        if element is _END:
            self.close()
        return element

    def close(self) -> None:
        """End the thread, and wait for its end: at most for the element that it is making."""
        self._ahead.clear()
        self._pool.shutdown(cancel_futures=True)


def _setter(event: anyio.Event) -> Callable[[object], None]:
    """Return a function that sets an event of the running loop from any thread."""
    _, call = current_loop()

    def set_event(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            call(event.set)

    return set_event
