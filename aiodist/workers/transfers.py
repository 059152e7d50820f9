"""Transfers: how one part a worker becomes what every worker needs. A small one travels in the record.

A transfer is carried out by a generator that yields requests, to be completed before it is resumed, and returns the
result: so nothing here knows how a request is waited for. What takes long by itself is given to worker threads, whose
jobs are requests, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np

from aiodist.workers.coding import decode, encode
from aiodist.workers.communicator import Array, Communicator, Request
from aiodist_kernels import policy
from aiodist_kernels.pool import results as pool

T = TypeVar("T")
Steps: TypeAlias = Generator[Request, None, T]

SEGMENT: Final = 1 << 20
_IN_FLIGHT: Final = 2


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
        """Whether `data` takes the event loop no time worth speaking of, the first time too."""
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


def as_bytes(array: Array) -> Array:
    """Return an array's bytes, in the order of its elements."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Gathering:
    """An object of each worker, given to all.

    Args:
        value: this worker's.
        nbytes: about how many bytes that are, where they may be many.
        make: makes what is given of ``value``, in a worker thread if they are many; None: it is that itself.
    """

    room = None

    def __init__(self, value: Any, nbytes: int = 0, make: Callable[[Any], Any] | None = None) -> None:
        self._value = value
        self._make = make
        self._data: Array | None = None
        self.is_light = not policy.blocks(nbytes)

    @property
    def data(self) -> Array:
        """The object as bytes."""
        if self._data is None:
            self._data = encode(self._value if self._make is None else self._make(self._value))
        return self._data

    def fits(self, room: int, lengths: Sequence[int]) -> bool:
        """Return whether every worker's object fits."""
        return max(lengths) <= room

    def from_records(self, parts: Sequence[memoryview]) -> list[Any]:
        """Return the objects by rank."""
        return [decode(memoryview(bytearray(part))) for part in parts]

    def carry_out(
        self,
        communicator: Communicator,
        lengths: Sequence[int] | None,
        hands: Hands,  # noqa: ARG002
    ) -> Steps[list[Any]]:
        """Gather the bytes, after their sizes where those are not known, in segments."""
        if lengths is None:
            lengths = yield from _sizes(communicator, len(self.data))
        found = [pool.empty((length,), _BYTE) for length in lengths]
        pending: deque[_Pieces] = deque()
        step = max(1, SEGMENT // communicator.size)
        for at in range(0, max(lengths), step):
            if len(pending) == _IN_FLIGHT:
                yield from _take_apart(pending)
            pieces = [part[at : at + step] for part in found]
            counts = [len(piece) for piece in pieces]
            room = np.empty(sum(counts), np.uint8)
            request = communicator.iallgatherv(self.data[at : at + step], room, counts)
            pending.append((request, room, pieces))
        while pending:
            yield from _take_apart(pending)
        return [decode(part) for part in found]


_BYTE: Final = np.dtype(np.uint8)
_Pieces: TypeAlias = tuple[Request, Array, Sequence[Array]]


def _take_apart(pending: deque[_Pieces]) -> Steps[None]:
    """Put what has come together where its pieces belong."""
    request, room, pieces = pending.popleft()
    yield request
    for piece, (begin, end) in zip(pieces, pairwise(accumulate(map(len, pieces), initial=0)), strict=True):
        piece[...] = room[begin:end]


def _sizes(communicator: Communicator, own: int) -> Steps[list[int]]:
    received = np.empty(communicator.size, np.int64)
    yield communicator.iallgather(as_bytes(np.array([own], np.int64)), as_bytes(received))
    return [int(size) for size in received]


class Broadcast:
    """An object of one worker, given to all.

    Args:
        value: the object, on the worker that gives it.
        root: that worker.
        rank: this worker.
        nbytes: about how many bytes that are, where they may be many.
    """

    room = None

    def __init__(self, value: Any, root: int, rank: int, nbytes: int = 0) -> None:
        self._value = value
        self._data: Array | None = None
        self.root = root
        self._gives = rank == root
        self.is_light = not (self._gives and policy.blocks(nbytes))

    @property
    def data(self) -> Array:
        """The object as bytes, where it is given; else none."""
        if self._data is None:
            self._data = encode(self._value) if self._gives else np.empty(0, np.uint8)
        return self._data

    def fits(self, room: int, lengths: Sequence[int]) -> bool:
        """Return whether the object fits."""
        return lengths[self.root] <= room

    def from_records(self, parts: Sequence[memoryview]) -> Any:
        """Return the object."""
        return decode(memoryview(bytearray(parts[self.root])))

    def carry_out(
        self,
        communicator: Communicator,
        lengths: Sequence[int] | None,
        hands: Hands,  # noqa: ARG002
    ) -> Steps[Any]:
        """Broadcast the bytes, after their number where that is not known, in segments."""
        size = np.array([len(self.data) if lengths is None else lengths[self.root]], np.int64)
        if lengths is None:
            yield communicator.ibcast(size.view(np.uint8), self.root)
        buffer = self.data if self._gives else pool.empty((int(size[0]),), _BYTE)
        pending: deque[Request] = deque()
        for at in range(0, len(buffer), SEGMENT):
            if len(pending) == _IN_FLIGHT:
                yield pending.popleft()
            pending.append(communicator.ibcast(buffer[at : at + SEGMENT], self.root))
        while pending:
            yield pending.popleft()
        return decode(buffer)


class Exchange:
    """An array of bytes for each worker; every worker receives one from each.

    Args:
        make: returns, by rank, what that worker is to receive.
        counts: by rank, how many bytes those are.
        sizes: by rank, how many bytes come from that worker.
        most: how many bytes any worker sends any other, at most; the same on every worker.
    """

    room = 0
    is_light = True  # for there is nothing of it in records

    def __init__(
        self, make: Callable[[], Sequence[Array]], counts: Sequence[int], sizes: Sequence[int], most: int
    ) -> None:
        self._make = make
        self._counts = counts
        self._sizes = sizes
        self._most = most

    @property
    def data(self) -> Array:
        """Nothing: every worker receives every record, and this is for each its own."""
        return np.empty(0, np.uint8)

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return that it does not."""
        return False

    def from_records(self, parts: Sequence[memoryview]) -> list[Array]:
        """Never called: an exchange does not travel in records."""
        raise NotImplementedError

    def carry_out(
        self,
        communicator: Communicator,
        lengths: Sequence[int] | None,  # noqa: ARG002
        hands: Hands,
    ) -> Steps[list[Array]]:
        """Exchange, in segments; return bytes by rank."""
        large = policy.blocks(sum(self._counts))
        parts = (yield from by_hand(hands, self._make)) if large else self._make()
        found = [pool.empty((size,), _BYTE) for size in self._sizes]
        pending: deque[_Pieces] = deque()
        step = max(1, SEGMENT // communicator.size)
        for at in range(0, self._most, step):
            if len(pending) == _IN_FLIGHT:
                yield from _take_apart(pending)
            going = [part[at : at + step] for part in parts]
            pieces = [part[at : at + step] for part in found]
            counts, sizes = list(map(len, going)), list(map(len, pieces))
            room = np.empty(sum(sizes), np.uint8)
            pending.append((communicator.ialltoallv(np.concatenate(going), counts, room, sizes), room, pieces))
        while pending:
            yield from _take_apart(pending)
        return found
