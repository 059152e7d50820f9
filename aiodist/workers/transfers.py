"""Transfers: how one part a worker becomes what every worker needs. A small one travels in the record.

A transfer is carried out by a generator that yields requests, to be completed before it is resumed, and returns the
result: so nothing here knows how a request is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np

import aiodist_kernels as kernels
from aiodist.workers.coding import decode, encode
from aiodist.workers.communicator import Array, Communicator, Request
from aiodist_kernels import ReduceOp

T = TypeVar("T")
Steps: TypeAlias = Generator[Request, None, T]

SEGMENT: Final = 1 << 20


class Transfer(Protocol):
    """Something to be exchanged by all workers."""

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

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None) -> Steps[Any]:
        """Exchange the parts; return the result.

        Args:
            communicator: the lane's.
            lengths: by rank, how many bytes each worker brings; None where that is not known.
        """
        ...


class Reduction:
    """Arrays to be reduced over the workers, each in its own dtype.

    Args:
        op: SUM, PRODUCT, MIN or MAX.
        arrays: this worker's parts, of the same shapes and dtypes on every worker. They are left as they are.
    """

    def __init__(self, op: ReduceOp, arrays: Sequence[Array]) -> None:
        self._op = op
        self._arrays = arrays
        self._packs = _by_dtype(arrays)
        self.room = sum(array.nbytes for array in arrays)

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return whether it fits, which is the same on every worker."""
        return self.room <= room

    @property
    def data(self) -> Array:
        """The parts, one after the other by dtype."""
        return np.concatenate([as_bytes(_packed(self._arrays, pack)) for pack in self._packs])

    def from_records(self, parts: Sequence[memoryview]) -> list[Array]:
        """Return the arrays, reduced in the order of the workers."""
        totals, at = [], 0
        for pack in self._packs:
            dtype = self._arrays[pack[0]].dtype
            size = sum(self._arrays[index].nbytes for index in pack)
            rows = [np.frombuffer(bytes(part[at : at + size]), np.uint8).view(dtype) for part in parts]
            totals.append(kernels.reduce(self._op, rows))
            at += size
        return self._unpacked(totals)

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None) -> Steps[list[Array]]:  # noqa: ARG002
        """Reduce each pack by the engine where it does so with our meaning, else by moving parts."""
        totals = []
        for pack in self._packs:
            arrays = [self._arrays[index] for index in pack]
            if communicator.reduces(self._op, arrays[0].dtype):
                totals.append((yield from _reduce_in_engine(communicator, self._op, arrays)))
            else:
                flat = _packed(self._arrays, pack)
                totals.append((yield from _reduce_by_moving(communicator, self._op, flat)))
        return self._unpacked(totals)

    def _unpacked(self, totals: Sequence[Array]) -> list[Array]:
        found: dict[int, Array] = {}
        for pack, total in zip(self._packs, totals, strict=True):
            at = 0
            for index in pack:
                array = self._arrays[index]
                found[index] = total[at : at + array.size].reshape(array.shape)
                at += array.size
        return [found[index] for index in range(len(self._arrays))]


def _by_dtype(arrays: Sequence[Array]) -> list[list[int]]:
    packs: dict[np.dtype[Any], list[int]] = {}
    for index, array in enumerate(arrays):
        packs.setdefault(array.dtype, []).append(index)
    return list(packs.values())


def _packed(arrays: Sequence[Array], pack: Sequence[int]) -> Array:
    """Return a copy of these arrays, one after the other."""
    return np.concatenate([arrays[index].reshape(-1) for index in pack])


def as_bytes(array: Array) -> Array:
    """Return an array's bytes, in the order of its elements."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _reduce_in_engine(communicator: Communicator, op: ReduceOp, arrays: Sequence[Array]) -> Steps[Array]:
    """Reduce arrays, one behind the other, in segments, each of which is copied just before its turn."""
    flat = np.empty(sum(array.size for array in arrays), arrays[0].dtype)
    step = max(1, SEGMENT // flat.itemsize)
    pending: deque[Request] = deque()
    for begin, end in _filled(flat, arrays, step):
        if len(pending) == communicator.segment_depth:
            yield pending.popleft()
        segment = flat[begin:end]
        pending.append(communicator.iallreduce(op, segment, segment))
    while pending:
        yield pending.popleft()
    return flat


def _filled(flat: Array, arrays: Sequence[Array], step: int) -> Iterator[tuple[int, int]]:
    """Fill an array with others, one behind the other; yield the bounds of each segment when it is full."""
    filled = posted = 0
    for array in arrays:
        source = array.reshape(-1)
        for at in range(0, source.size, step):
            part = source[at : at + step]
            flat[filled : filled + part.size] = part
            filled += part.size
            while filled - posted >= step:
                yield posted, posted + step
                posted += step
    if filled > posted:
        yield posted, filled


def _reduce_by_moving(communicator: Communicator, op: ReduceOp, flat: Array) -> Steps[Array]:
    """Give each worker a share of the elements, let it fold them in the order of the workers, and gather the shares."""
    shares = shares_of(flat.size, communicator.size)
    received = yield from _exchange_shares(communicator, flat, shares)
    own = kernels.reduce(op, received)
    return (yield from gather_shares(communicator, own, shares))


def shares_of(size: int, workers: int) -> list[int]:
    """Return how many elements each worker's share has."""
    share = -(-size // workers)
    return [max(0, min(share, size - worker * share)) for worker in range(workers)]


def _exchange_shares(communicator: Communicator, flat: Array, shares: Sequence[int]) -> Steps[list[Array]]:
    """Return this worker's share of every worker's elements, by rank."""
    own, item = shares[communicator.rank], flat.itemsize
    received = np.empty(own * communicator.size, flat.dtype)
    counts, received_counts = [share * item for share in shares], [own * item] * communicator.size
    yield communicator.ialltoallv(as_bytes(flat), counts, as_bytes(received), received_counts)
    return list(received.reshape(communicator.size, own))


def gather_shares(communicator: Communicator, own: Array, shares: Sequence[int]) -> Steps[Array]:
    """Put the workers' shares together."""
    whole = np.empty(sum(shares), own.dtype)
    yield communicator.iallgatherv(as_bytes(own), as_bytes(whole), [share * own.itemsize for share in shares])
    return whole


class Gathering:
    """An object of each worker, given to all.

    Args:
        value: this worker's.
    """

    room = None

    def __init__(self, value: Any) -> None:
        self.data = encode(value)

    def fits(self, room: int, lengths: Sequence[int]) -> bool:
        """Return whether every worker's object fits."""
        return max(lengths) <= room

    def from_records(self, parts: Sequence[memoryview]) -> list[Any]:
        """Return the objects by rank."""
        return [decode(memoryview(bytearray(part))) for part in parts]

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None) -> Steps[list[Any]]:
        """Gather the bytes, after their sizes where those are not known."""
        if lengths is None:
            lengths = yield from _sizes(communicator, len(self.data))
        whole = np.empty(sum(lengths), np.uint8)
        yield communicator.iallgatherv(self.data, whole, lengths)
        bounds = np.cumsum([0, *lengths])
        return [decode(whole[a:b].copy()) for a, b in pairwise(bounds)]


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
    """

    room = None

    def __init__(self, value: Any, root: int, rank: int) -> None:
        self.root = root
        self.data = encode(value) if rank == root else np.empty(0, np.uint8)

    def fits(self, room: int, lengths: Sequence[int]) -> bool:
        """Return whether the object fits."""
        return lengths[self.root] <= room

    def from_records(self, parts: Sequence[memoryview]) -> Any:
        """Return the object."""
        return decode(memoryview(bytearray(parts[self.root])))

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None) -> Steps[Any]:
        """Broadcast the bytes, after their number where that is not known."""
        size = np.array([len(self.data) if lengths is None else lengths[self.root]], np.int64)
        if lengths is None:
            yield communicator.ibcast(size.view(np.uint8), self.root)
        buffer = self.data if communicator.rank == self.root else np.empty(int(size[0]), np.uint8)
        for at in range(0, len(buffer), SEGMENT):
            yield communicator.ibcast(buffer[at : at + SEGMENT], self.root)
        return decode(buffer)


class Exchange:
    """An array for each worker; every worker receives one from each.

    Args:
        parts: by rank, what that worker is to receive, of a size that it knows.
        sizes: by rank, how many bytes come from that worker.
    """

    room = 0

    def __init__(self, parts: Sequence[Array], sizes: Sequence[int]) -> None:
        self._counts = [part.nbytes for part in parts]
        self.data = np.concatenate([as_bytes(part) for part in parts])
        self._sizes = sizes

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return that it does not: every worker receives every record, and this is for each its own."""
        return False

    def from_records(self, parts: Sequence[memoryview]) -> list[Array]:
        """Never called: an exchange does not travel in records, which everybody receives."""
        raise NotImplementedError

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None) -> Steps[list[Array]]:  # noqa: ARG002
        """Exchange; return bytes by rank."""
        received = np.empty(sum(self._sizes), np.uint8)
        yield communicator.ialltoallv(self.data, self._counts, received, self._sizes)
        bounds = np.cumsum([0, *self._sizes])
        return [received[a:b] for a, b in pairwise(bounds)]
