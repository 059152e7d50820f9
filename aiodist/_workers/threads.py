"""Worker threads that fold and copy what would hold up the event loop, as requests that `driver` can wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from aiodist._workers.transport import Steps

T = TypeVar("T")
_MOST = 8


class Job:
    """A call in a worker thread, as a request."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self.result = future.result

    def test(self) -> bool:
        """Return whether it has returned."""
        return self._future.done()

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Call a function, in the worker thread, when it has returned."""
        self._future.add_done_callback(lambda _: fn())


class Threads:
    """Worker threads, which start with the first call, and end with `close`; they can be used again then."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def begin(self, fn: Callable[..., Any], *args: Any) -> Job:
        """Call a function in a worker thread."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_MOST, thread_name_prefix="aiodist transfer")
        return Job(self._executor.submit(fn, *args))

    def call(self, fn: Callable[..., T], *args: Any) -> Steps[T]:
        """Call a function in a worker thread, and return what it returns."""
        job = self.begin(fn, *args)
        yield job
        result: T = job.result()
        return result

    def close(self) -> None:
        """End the threads, when what they do is done."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
