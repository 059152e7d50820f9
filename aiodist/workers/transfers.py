"""Transfers: how one part a worker becomes what every worker needs. A small one travels in the record.

A transfer is carried out by a generator that yields requests, to be completed before it is resumed, and returns the
result: so nothing here knows how a request is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np

import aiodist_kernels as kernels
from aiodist.workers.coding import decode, encode
from aiodist.workers.communicator import Array, Communicator, Request
from aiodist.workers.layout import Layout
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
            flat = _packed(self._arrays, pack)
            if communicator.reduces(self._op, flat.dtype):
                yield from _reduce_in_engine(communicator, self._op, flat)
            else:
                flat = yield from _reduce_by_moving(communicator, self._op, flat)
            totals.append(flat)
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


def _reduce_in_engine(communicator: Communicator, op: ReduceOp, flat: Array) -> Steps[None]:
    step = max(1, SEGMENT // flat.itemsize)
    pending: deque[Request] = deque()
    for at in range(0, flat.size, step):
        if len(pending) == communicator.segment_depth:
            yield pending.popleft()
        pending.append(communicator.iallreduce(op, flat[at : at + step]))
    while pending:
        yield pending.popleft()


def _reduce_by_moving(communicator: Communicator, op: ReduceOp, flat: Array) -> Steps[Array]:
    """Give each worker a share of the elements, let it fold them in the order of the workers, and gather the shares."""
    shares = _shares(flat.size, communicator.size)
    received = yield from _exchange_shares(communicator, flat, shares)
    own = kernels.reduce(op, received)
    return (yield from _gather_shares(communicator, own, shares))


def _shares(size: int, workers: int) -> list[int]:
    share = -(-size // workers)
    return [max(0, min(share, size - worker * share)) for worker in range(workers)]


def _exchange_shares(communicator: Communicator, flat: Array, shares: Sequence[int]) -> Steps[list[Array]]:
    """Return this worker's share of every worker's elements, by rank."""
    own, item = shares[communicator.rank], flat.itemsize
    received = np.empty(own * communicator.size, flat.dtype)
    counts, received_counts = [share * item for share in shares], [own * item] * communicator.size
    yield communicator.ialltoallv(as_bytes(flat), counts, as_bytes(received), received_counts)
    return list(received.reshape(communicator.size, own))


def _gather_shares(communicator: Communicator, own: Array, shares: Sequence[int]) -> Steps[Array]:
    whole = np.empty(sum(shares), own.dtype)
    yield communicator.iallgatherv(as_bytes(own), as_bytes(whole), [share * own.itemsize for share in shares])
    return whole


class OrderedReduction(Reduction):
    """A reduction that gives the same bits however the replicas are laid out over workers.

    The sum is a balanced tree over replica ids: a node covers ids from k·2^h to (k+1)·2^h, and is the reduction of its
    two halves, or the one that has replicas. A worker brings the largest nodes that it has all replicas of.

    Args:
        op: SUM, PRODUCT, MIN or MAX.
        layout: the replicas' layout.
        values: by array, the local replicas' parts, in their order.
    """

    def __init__(self, op: ReduceOp, layout: Layout, values: Sequence[Sequence[Array]]) -> None:
        self._layout = layout
        self._nodes = [
            _largest_nodes(layout.offset_of(w), count, layout.replicas) for w, count in enumerate(layout.counts)
        ]
        own = [
            np.stack([_subtree(op, node, layout.offset, column) for node in self._nodes[layout.rank]])
            for column in values
        ]
        super().__init__(op, own)
        self.room = max(map(len, self._nodes)) * sum(array[0].nbytes for array in own)

    def from_records(self, parts: Sequence[memoryview]) -> list[Array]:
        """Return the arrays, reduced along the tree."""
        totals, at = [], [0] * len(parts)
        for pack in self._packs:
            shapes = [self._arrays[index].shape[1:] for index in pack]
            dtype = self._arrays[pack[0]].dtype
            for shape in shapes:
                nodes: dict[tuple[int, int], Array] = {}
                for worker, part in enumerate(parts):
                    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
                    for node in self._nodes[worker]:
                        data = bytearray(part[at[worker] : at[worker] + size])
                        nodes[node] = np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
                        at[worker] += size
                totals.append(self._root(nodes))
        return self._in_order(totals)

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None) -> Steps[list[Array]]:  # noqa: ARG002
        """Give each worker a share of the elements of every node, let it go up the tree, and gather the shares."""
        totals = []
        for pack in self._packs:
            for index in pack:
                stacked = self._arrays[index]
                total = yield from self._one(communicator, stacked.reshape(len(stacked), -1))
                totals.append(total.reshape(stacked.shape[1:]))
        return self._in_order(totals)

    def _one(self, communicator: Communicator, stacked: Array) -> Steps[Array]:
        shares = _shares(stacked.shape[1], communicator.size)
        bounds = np.cumsum([0, *shares])
        send = np.concatenate([stacked[:, a:b].reshape(-1) for a, b in pairwise(bounds)])
        own, item, rank = shares[communicator.rank], stacked.itemsize, communicator.rank
        counts = [share * len(self._nodes[rank]) * item for share in shares]
        received_counts = [own * len(nodes) * item for nodes in self._nodes]
        received = np.empty(sum(received_counts) // item, stacked.dtype)
        yield communicator.ialltoallv(as_bytes(send), counts, as_bytes(received), received_counts)
        nodes = [node for worker in self._nodes for node in worker]
        total = self._root(dict(zip(nodes, received.reshape(len(nodes), own), strict=True)))
        return (yield from _gather_shares(communicator, total, shares))

    def _root(self, nodes: dict[tuple[int, int], Array]) -> Array:
        return np.asarray(_up(self._op, (0, _power(self._layout.replicas)), nodes))

    def _in_order(self, totals: Sequence[Array]) -> list[Array]:
        order = [index for pack in self._packs for index in pack]
        found = dict(zip(order, totals, strict=True))
        return [found[index] for index in range(len(order))]


def _power(count: int) -> int:
    """Return the least power of two that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def _largest_nodes(offset: int, count: int, replicas: int) -> list[tuple[int, int]]:
    """Return the nodes, as begin and width, that cover these replicas and no others; missing ids count as covered."""
    found: list[tuple[int, int]] = []

    def visit(begin: int, width: int) -> None:
        end = min(begin + width, replicas)
        if begin >= end or end <= offset or begin >= offset + count:
            return
        if offset <= begin and end <= offset + count:
            found.append((begin, width))
            return
        visit(begin, width // 2)
        visit(begin + width // 2, width // 2)

    visit(0, _power(replicas))
    return found


def _subtree(op: ReduceOp, node: tuple[int, int], offset: int, values: Sequence[Array]) -> Array:
    leaves = {(offset + place, 1): value for place, value in enumerate(values)}
    found = _up(op, node, leaves)
    assert found is not None
    return found


def _up(op: ReduceOp, node: tuple[int, int], known: dict[tuple[int, int], Array]) -> Array | None:
    """Return the value of a node of the tree, from those of nodes below it; None where there are no replicas."""
    if node in known:
        return known[node]
    begin, width = node
    if width == 1:
        return None
    left = _up(op, (begin, width // 2), known)
    right = _up(op, (begin + width // 2, width // 2), known)
    if left is None or right is None:
        return left if right is None else right
    return kernels.reduce(op, [left, right])


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
        if lengths is None:
            lengths = yield from _sizes(communicator, len(self.data))
        buffer = self.data if communicator.rank == self.root else np.empty(lengths[self.root], np.uint8)
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
