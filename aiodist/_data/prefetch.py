"""Iterators that are plain and asynchronous, one of which makes elements ahead of time in a background thread.

The thread refers to the elements, but never to the iterator that the consumer holds. So an iterator that is dropped
(after a `break`, an exception or a cancellation) is collected, which releases its thread. An element stays the next one
until it is taken, so a consumer that is cancelled while it waits loses nothing.
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


class ElementIterator:
    """A plain and asynchronous iterator over a plain one. An asynchronous step is a checkpoint."""

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


class Prefetched(ElementIterator):
    """An iterator over elements of which a thread makes up to ``ahead`` in advance."""

    # A ThreadPoolExecutor would refuse work once the main thread has ended, and keep the interpreter from exiting. The
    # threads of the process-wide cache are daemons.

    def __init__(self, elements: Iterator[Any], ahead: int) -> None:
        self._worker = threads.take("aiodist prefetch")
        self._make = partial(next, elements, _END)
        self._ahead: deque[Future[Any]] = deque()
        for _ in range(ahead):
            self._request()
        self._release = weakref.finalize(self, _release, self._ahead, self._worker)

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

    def _request(self) -> None:
        future: Future[Any] = Future()
        self._ahead.append(future)
        self._worker.submit(partial(_carry_out, future, self._make))

    def _take(self, at_end: type[Exception]) -> Any:
        """Return the next element, which is ready, or raise the thread's exception, once."""
        if not self._ahead:
            raise at_end
        future = self._ahead.popleft()
        self._request()
        element = future.result()
        if element is _END:
            self.close()
            raise at_end
        return element

    def close(self) -> None:
        """Release the thread, and wait for it to finish the element that it is making."""
        wait(self._release() or ())


def _release(ahead: deque[Future[Any]], worker: threads.Worker) -> list[Future[Any]]:
    """Cancel elements, release the thread, and return what it is making; called by the collector in any thread."""
    started = [future for future in ahead if not future.cancel()]
    ahead.clear()
    worker.release()
    return started


def _carry_out(future: Future[Any], make: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001  (raised in the consumer)
            future.set_exception(error)


def _setter(event: anyio.Event) -> Callable[[object], None]:
    """Return a callback that sets an event of the running loop from any thread."""
    _, call = current_loop()

    def set_event(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            call(event.set)

    return set_event
