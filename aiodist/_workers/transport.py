"""The protocol of engines, which exchange and reduce bytes between workers.

Operations of one communicator match in the order in which each worker begins them, as in MPI; they do not block. A
request says when it is complete, and holds the buffers until then. Operations that are incomplete when the strategy
ends remain so.
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
"""How long a record is where every worker receives those of all others in one collective."""


class Request(Protocol):
    """An operation in progress.

    A request may have a method ``add_done_callback(fn)``, which calls the function upon completion, in any thread, or
    at once if it is complete. Such a request need not be tested repeatedly.
    """

    def test(self) -> bool:
        """Return whether it is complete, after making progress on it."""
        ...


in_the_air: Final[list[Request]] = []
"""Requests that nobody waits for any more; they keep the buffers that the engine may still read and write."""

Steps: TypeAlias = Generator[Request, None, T]
"""Something that goes on when the request it has yielded is complete."""


class Parts(NamedTuple):
    """A buffer of bytes with a part for each worker."""

    whole: Array  # the buffer
    counts: Sequence[int]  # by rank, how many bytes a part has
    places: Sequence[int] | None = None  # by rank, where it begins; None: each behind the one before it

    @property
    def begins(self) -> Sequence[int]:
        """By rank, where each part begins."""
        return list(accumulate(self.counts, initial=0))[:-1] if self.places is None else self.places

    def views(self) -> list[Array]:
        """Return the parts."""
        return [self.whole[at : at + count] for at, count in zip(self.begins, self.counts, strict=True)]


class Communicator(Protocol):
    """Some workers, with their own order of operations."""

    engine: str  # the engine's name
    library: str  # what the engine stands on, with its version
    rank: int  # this worker, among those of the communicator
    size: int  # how many they are
    depth: int  # how many operations are well begun before the first is complete
    records: Any  # the buffers of its records, once there are any: one session after the other uses them
    record_bytes: int  # how long a record may be

    def reduces(self, op: ReduceOp, dtype: np.dtype[Any]) -> bool:
        """Return whether `iallreduce` takes an op and a dtype with the meaning that they have here."""
        ...

    def iallreduce(self, op: ReduceOp, send: Array, receive: Array) -> Request:
        """Reduce buffers over the workers. ``send`` may be ``receive`` itself, and else is left as it is."""
        ...

    def iallgather(self, send: Array, receive: Array) -> Request:
        """Concatenate buffers of bytes, all of one size, by rank."""
        ...

    def exchange_init(self, own: Array, everyone: Array) -> Callable[[int], Request]:
        """Return what gives all others a record's first bytes, so many, again and again; all ask for it, in order.

        Workers may give different numbers of them. They lie in ``everyone`` by rank, ``record_bytes`` for each; whether
        one's own do is open.
        """
        ...

    def iallgatherv(self, send: Array, receive: Parts) -> Request:
        """Concatenate buffers of bytes by rank."""
        ...

    def ibcast(self, buffer: Array, root: int) -> Request:
        """Overwrite a buffer of bytes with that of one worker."""
        ...

    def ialltoallv(self, send: Parts, receive: Parts) -> Request:
        """Send the k-th part of a buffer of bytes to worker k; receive its part for this one."""
        ...

    def dup(self) -> Steps[Communicator]:
        """Make another communicator of the same workers."""
        ...

    def create_group(self, ranks: Sequence[int], tag: int) -> Steps[Communicator]:
        """Make a communicator of some of the workers. Only these call it, in the same order if for several groups.

        The ranks ascend; the tag distinguishes it from others that are being made at the same time.
        """
        ...


OF_VALUES: Final = (TypeError, ValueError, OverflowError)
"""Errors of values, which every worker has alike; any other is the engine's, and may be one worker's alone."""


def as_bytes(array: Array) -> Array:
    """Return the bytes of an array that lies in one piece."""
    return array.reshape(-1).view(np.uint8)


# Calls in worker threads, as requests.


class Job:
    """A call in a thread of the process's cache, as a request; after another job, if one is given."""

    def __init__(self, fn: Callable[[], Any], after: Job | None = None) -> None:
        self.future: Future[Any] = Future()
        self._fn, self._after = fn, after
        thread = threads.take("aiodist transfer")
        thread.submit(self._call)
        thread.release()

    def _call(self) -> None:
        fn, after = self._fn, self._after
        del self._fn, self._after
        if after is not None:
            wait([after.future])
        try:
            self.future.set_result(fn())
        except BaseException as error:  # noqa: BLE001  (it is for who waits)
            self.future.set_exception(error)

    def test(self) -> bool:
        """Return whether it has returned."""
        return self.future.done()

    def add_done_callback(self, fn: Callable[[], object], /) -> None:
        """Call a function, in the worker thread, when it has returned."""
        self.future.add_done_callback(lambda _: fn())


class Serial:
    """Calls one function after the other in threads, which are daemons.

    A call that waits for a dead worker waits for ever, but nothing waits for that call.
    """

    def __init__(self) -> None:
        self._last: Job | None = None

    def call(self, fn: Callable[..., T], *args: Any) -> Steps[T]:
        """Call a function after all earlier ones have returned; return its result."""
        job = self._last = Job(partial(fn, *args), self._last)
        yield job
        result: T = job.future.result()
        return result


def in_thread(fn: Callable[..., T], *args: Any) -> Steps[T]:
    """Call a function in a worker thread; return what it returns."""
    return Serial().call(fn, *args)
