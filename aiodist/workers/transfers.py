"""Transfers: how one part a worker becomes what every worker needs. A small one travels in the record.

A transfer is carried out by a generator that yields requests, to be completed before it is resumed, and returns the
result: so nothing here knows how a request is waited for. What takes long by itself is given to worker threads, whose
jobs are requests, too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np

from aiodist.workers.communicator import Array, Communicator, Request

T = TypeVar("T")
Steps: TypeAlias = Generator[Request, None, T]

SEGMENT: Final = 1 << 20


class Done:
    """A request that is complete."""

    def test(self) -> bool:
        """Return that it is."""
        return True


class Job(Request, Protocol):
    """A call in a worker thread."""

    def result(self) -> Any:
        """Return what it has returned, or raise what it has raised; it is complete."""


class Hands(Protocol):
    """Worker threads."""

    def begin(self, fn: Callable[..., Any], *args: Any) -> Job:
        """Call a function in one."""
        ...


class AtOnce:
    """The thread that asks, for who is in a worker thread already."""

    def begin(self, fn: Callable[..., Any], *args: Any) -> Job:
        """Call a function now."""
        return _Made(fn(*args))


class _Made(Done):
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        """Return it."""
        return self._value


def by_hand(hands: Hands, fn: Callable[..., T], *args: Any) -> Steps[T]:
    """Call a function in a worker thread, and return what it returns."""
    job = hands.begin(fn, *args)
    yield job
    result: T = job.result()
    return result


class Transfer(Protocol):
    """Something to be exchanged by all workers."""

    @property
    def is_light(self) -> bool:
        """Whether `prepare` takes the event loop no time worth speaking of."""
        ...

    def prepare(self) -> None:
        """Make what is to be exchanged, where that takes long; what needs it does so too."""

    @property
    def nbytes(self) -> int:
        """How many bytes `data` has, of what has no fixed size; to tell it takes no copies."""
        ...

    @property
    def data(self) -> Array:
        """This worker's part, as bytes."""
        ...

    @property
    def room(self) -> int | None:
        """How many bytes it needs in a record, the same on every worker; None where that is for its data to say."""
        ...

    def fits(self, room: int, lengths: Sequence[int]) -> bool:
        """Return whether the parts of all workers fit into so many bytes, where ``lengths`` are theirs."""
        ...

    def from_records(self, parts: Sequence[memoryview]) -> Any:
        """Return the result from all workers' parts, by rank."""
        ...

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None, hands: Hands) -> Steps[Any]:
        """Exchange the parts; return the result.

        Args:
            communicator: the lane's.
            lengths: by rank, how many bytes each worker brings; None where that is not known.
            hands: worker threads.
        """
        ...


class OfFixedSize:
    """A transfer whose size in a record everybody knows, and of which nothing takes long before it is carried out."""

    __slots__ = ()

    is_light = True
    nbytes = 0

    def prepare(self) -> None:
        """Do nothing."""


def as_bytes(array: Array) -> Array:
    """Return an array's bytes, in the order of its elements."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def sizes_of_all(communicator: Communicator, own: int) -> Steps[list[int]]:
    """Return by rank what number each worker has brought."""
    received = np.empty(communicator.size, np.int64)
    yield communicator.iallgather(as_bytes(np.array([own], np.int64)), as_bytes(received))
    return [int(size) for size in received]
