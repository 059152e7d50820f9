"""Worker threads that fold and copy what would hold up the event loop, as requests that `driver` can wait for."""

from __future__ import annotations

import threading
from collections import deque
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


class Serial:
    """Calls one function after the other, in a thread while there is anything to call.

    The thread is a daemon: one that waits for a worker that has died waits for ever, and nobody waits for it then.

    Args:
        name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._to_call: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def begin(self, fn: Callable[[], Any]) -> Job:
        """Call a function when all that was to be called before has returned."""
        future: Future[Any] = Future()
        with self._lock:
            self._to_call.append((future, fn))
            first = len(self._to_call) == 1
        if first:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return Job(future)

    def _serve(self) -> None:
        while True:
            future, fn = self._to_call[0]
            try:
                result = fn()
            except Exception as error:  # noqa: BLE001  (it is for who waits)
                future.set_exception(error)
            else:
                future.set_result(result)
            with self._lock:
                self._to_call.popleft()
                if not self._to_call:
                    return


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
