"""Iterators, plain and asynchronous: over a plain one, and over what a background thread makes ahead of the consumer.

The thread knows the elements, never the iterator that the consumer holds: so an iterator that is dropped (a `break`, an
exception, a cancelled task) is collected, and its thread given back. A consumer has nothing to remember. An element
stays the next one until it is taken: whoever is cancelled while waiting for it loses nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self

import anyio
from anyio.lowlevel import checkpoint

from aiodist._runtime import threads
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

    # No executor: it takes no work any more once the main thread has ended, and holds up the interpreter's exit until
    # all is made that was asked for. The threads of the process's cache are daemons.

    def __init__(self, elements: Iterator[Any], ahead: int) -> None:  # which this object itself does not hold
        self._worker = threads.take("aiodist prefetch")
        self._make = partial(next, elements, _END)
        self._ahead: deque[Future[Any]] = deque()
        for _ in range(ahead):
            self._ask()
        self._end = weakref.finalize(self, _end, self._ahead, self._worker)

    def __next__(self) -> Any:
        wait([*self._ahead][:1])
        return self._take(StopIteration)

    async def __anext__(self) -> Any:
        await checkpoint()
        while self._ahead and not self._ahead[0].done():
            event = anyio.Event()
            self._ahead[0].add_done_callback(_setter(event))
            await event.wait()
        return self._take(StopAsyncIteration)

    def _ask(self) -> None:
        future: Future[Any] = Future()
        self._ahead.append(future)
        self._worker.submit(partial(_carry_out, future, self._make))

    def _take(self, at_end: type[Exception]) -> Any:
        """Return the next element, which has been made; raise what the thread raised, once."""
        if not self._ahead:
            raise at_end
        future = self._ahead.popleft()
        self._ask()
        element = future.result()
        if element is _END:
            self.close()
            raise at_end
        return element

    def close(self) -> None:
        """Give the thread back, and wait for it: at most for the element that it is making."""
        wait(self._end() or ())


def _end(ahead: deque[Future[Any]], worker: threads.Worker) -> list[Future[Any]]:
    """Have no more elements made; return what is in the making. A garbage collection may call it, in any thread."""
    left = [future for future in ahead if not future.cancel()]
    ahead.clear()
    worker.release()
    return left


def _carry_out(future: Future[Any], make: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001  (it is the consumer's)
            future.set_exception(error)


def _setter(event: anyio.Event) -> Callable[[object], None]:
    """Return a function that sets an event of the running loop from any thread."""
    _, call = current_loop()

    def set_event(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            call(event.set)

    return set_event
