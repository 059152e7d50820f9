"""The protocol of engines, which exchange and reduce bytes between workers.

The operations of one communicator match in the order in which each worker begins them, as in MPI, and do not block. A
request tells when its operation is complete, and keeps the buffers until then. Operations that are incomplete when the
strategy ends remain so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from aiodist._runtime import threads
from aiodist_kernels import ReduceOp

Array = np.ndarray[Any, Any]
T = TypeVar("T")

RECORD_BYTES: Final = 512
"""The length of a record that every worker receives from every other in one collective."""


class Request(Protocol):
    """An operation in progress.

    A request may have a method ``add_done_callback(fn)``, which calls the function upon completion, in any thread, or
    at once if the operation is complete. Such a request need not be tested repeatedly.
    """

    def test(self) -> bool:
        """Make progress on the operation; return whether it is complete."""
        ...


abandoned: Final[list[Request]] = []
"""Requests that nobody waits for any more, with the buffers that the engine may still read and write."""

Steps: TypeAlias = Generator[Request, None, T]
"""A generator that yields requests and is resumed when each is complete."""


class Parts(NamedTuple):
    """A buffer of bytes with a part for each worker."""

    whole: Array  # the buffer
    counts: Sequence[int]  # by rank, the bytes in a part
    displacements: Sequence[int] | None = None  # by rank, where a part begins; None: each follows the one before it

    @property
    def begins(self) -> Sequence[int]:
        """By rank, where each part begins."""
        return list(accumulate(self.counts, initial=0))[:-1] if self.displacements is None else self.displacements

    def views(self) -> list[Array]:
        """Return the parts as views of the buffer."""
        return [self.whole[at : at + count] for at, count in zip(self.begins, self.counts, strict=True)]


class Communicator(Protocol):
    """Some workers, with their own order of operations. Engines derive from this."""

    engine: str  # the engine's name
    library: str  # the library under it, with its version
    rank: int  # of this worker in the communicator
    size: int  # the number of workers
    depth: int = 2  # how many operations are best in flight at a time
    records: Any = None  # the buffers of its records, once there are any; successive sessions share them
    record_bytes: int = RECORD_BYTES  # the longest record

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether `iallreduce` gives an op of this dtype the meaning that it has in aiodist."""
        ...

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> Request:
        """Reduce buffers over the workers. ``send`` may be ``receive`` itself; otherwise it is not changed."""
        ...

    def iallgather(self, send: Array, receive: Array) -> Request:
        """Concatenate buffers of bytes, all of one size, by rank."""
        ...

    def exchange_init(self, own: Array, everyone: Array) -> Callable[[int], Request]:
        """Return a function that sends all others the given number of a record's first bytes; all call it in order.

        Workers may give different numbers. ``everyone`` receives the records by rank, ``record_bytes`` for each; this
        worker's own may be missing there. By default all bytes are sent.
        """
        return lambda _: self.iallgather(own, everyone)

    def iallgatherv(self, send: Array, receive: Parts) -> Request:
        """Concatenate buffers of bytes, of several sizes, by rank."""
        ...

    def ibcast(self, buffer: Array, root: int) -> Request:
        """Overwrite a buffer of bytes with the root's."""
        ...

    def ialltoallv(self, send: Parts, receive: Parts) -> Request:
        """Send the k-th part of a buffer of bytes to worker k; receive worker k's part for this one as the k-th."""
        ...

    def dup(self) -> Steps[Communicator]:
        """Make another communicator of the same workers."""
        ...

    def create_group(self, ranks: Sequence[int], tag: int) -> Steps[Communicator]:
        """Make a communicator of some of the workers, given in ascending order; only these call it.

        The tag distinguishes it from others that are made at the same time. Workers make several in the same order.
        """
        ...


OF_VALUES: Final = (TypeError, ValueError, OverflowError)
"""Errors of values, which every worker has alike; any other is the engine's, and may be one worker's alone."""


def as_bytes(array: Array) -> Array:
    """Return the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


# Calls in worker threads, as requests.


class Job:
    """A call in a thread of the process-wide cache, as a request; it may have to wait for another job first."""

    def __init__(self, fn: Callable[[], Any], after: Job | None = None) -> None:
        self.future: Future[Any] = Future()
        thread = threads.take("aiodist transfer")
        thread.submit(partial(self._call, fn, after))
        thread.release()

    def _call(self, fn: Callable[[], Any], after: Job | None) -> None:
        if after is not None:
            wait([after.future])
        try:
            self.future.set_result(fn())
        except BaseException as error:  # noqa: BLE001  (the steps that wait raise it)
            self.future.set_exception(error)

    def test(self) -> bool:
        """Return whether the call has returned."""
        return self.future.done()

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Call a function in the worker thread when the call has returned."""
        self.future.add_done_callback(lambda _: fn())


class Serial:
    """Calls one function after the other in worker threads, which are daemons.

    A call that waits for a dead worker never returns, but nothing waits for that call.
    """

    def __init__(self) -> None:
        self._last: Job | None = None

    def call(self, fn: Callable[..., T], *args: Any) -> Steps[T]:
        """Call a function after all earlier calls have returned; return its result."""
        job = self._last = Job(partial(fn, *args), self._last)
        yield job
        result: T = job.future.result()
        return result


def in_thread(fn: Callable[..., T], *args: Any) -> Steps[T]:
    """Call a function in a worker thread; return its result."""
    return Serial().call(fn, *args)
