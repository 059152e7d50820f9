"""Worker threads that fold and copy what would hold up the event loop, as requests that `driver` can wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from aiodist._workers.transport import Steps, T

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


class Serial:
    """Calls one function after the other, each in a thread of its own.

    The threads are daemons: one that waits for a worker that has died waits for ever, and nobody waits for it then.

    Args:
        name: the threads'.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Future[Any] | None = None

    def begin(self, fn: Callable[[], Any]) -> Job:
        """Call a function when all that was to be called before has returned."""
        future: Future[Any] = Future()
        before, self._last = self._last, future

        def call() -> None:
            if before is not None:
                wait([before])
            try:
                future.set_result(fn())
            except Exception as error:  # noqa: BLE001  (it is for who waits)
                future.set_exception(error)

        threading.Thread(target=call, name=self._name, daemon=True).start()
        return Job(future)


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
