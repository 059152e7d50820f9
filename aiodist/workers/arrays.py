"""Arrays that nothing is reckoned with: each worker's given to all, or parts of each for everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from aiodist.workers import segments
from aiodist.workers.communicator import Array, Communicator
from aiodist.workers.transfers import SEGMENT, Hands, OfFixedSize, Steps, as_bytes, by_hand, sizes_of_all
from aiodist_kernels import policy


class Gathered(NamedTuple):
    """A leaf of all workers.

    Attributes:
        parts: by rank, what each has brought, in memory that may be used again.
        whole: these put together, where that is how they have come, in memory of their own.
    """

    parts: Sequence[Array]
    whole: Array | None


class ArrayGathering:
    """Leaves of each worker, given to all: of one dtype each, and of shapes that differ along an axis alone.

    Args:
        columns: by leaf, this worker's arrays, to be put together along the axis.
        axes: by leaf, the axis.
    """

    room = None

    def __init__(self, columns: Sequence[Sequence[Any]], axes: Sequence[int]) -> None:
        self._columns = columns
        self._axes = axes
        self._arrays: list[Array] | None = None
        self.nbytes = 8 * len(columns) + sum(array.nbytes for column in columns for array in column)
        self.is_light = not policy.blocks(sum(a.nbytes for column in columns if not is_plain(column) for a in column))

    def prepare(self) -> None:
        """Put this worker's arrays together, where they are several."""
        if self._arrays is None:
            self._arrays = [_together(column, axis) for column, axis in zip(self._columns, self._axes, strict=True)]

    @property
    def data(self) -> Array:
        """The leaves' lengths along their axes, and the leaves, as bytes."""
        return np.concatenate([as_bytes(self._lengths()), *map(as_bytes, self._leaves())])

    def fits(self, room: int, lengths: Sequence[int]) -> bool:
        """Return whether the leaves of every worker fit."""
        return max(lengths) <= room

    def from_records(self, parts: Sequence[memoryview | Array]) -> list[Gathered]:
        """Return the leaves."""
        count = len(self._columns)
        packed = [np.frombuffer(part, np.uint8) for part in parts]
        lengths = np.stack([part[: 8 * count] for part in packed]).view(np.int64)
        return self._unpack(range(count), lengths, [part[8 * count :] for part in packed])

    def carry_out(
        self,
        communicator: Communicator,
        lengths: Sequence[int] | None,
        hands: Hands,
    ) -> Steps[list[Gathered]]:
        """Gather what is small in one piece, after its size where that is not known; else one leaf after the other."""
        if lengths is None:
            lengths = yield from sizes_of_all(communicator, self.nbytes)
        if sum(lengths) <= SEGMENT:
            whole = yield from segments.gather(communicator, self.data, lengths)
            return self.from_records(segments.split(whole, lengths))
        return (yield from self._one_by_one(communicator, hands))

    def _one_by_one(self, communicator: Communicator, hands: Hands) -> Steps[list[Gathered]]:
        leaves = self._leaves()
        lengths = np.empty((communicator.size, len(leaves)), np.int64)
        yield communicator.iallgather(as_bytes(self._lengths()), lengths.reshape(-1).view(np.uint8))
        sizes = lengths * [leaf.itemsize * prod(self._shape(index, 1)) for index, leaf in enumerate(leaves)]
        small = sizes.max(axis=0) < segments.PACKED_BELOW
        found: dict[int, Gathered] = {}
        if small.any():
            indices = np.flatnonzero(small).tolist()
            counts = sizes[:, indices].sum(axis=1).tolist()
            parts = [as_bytes(leaves[index]) for index in indices]
            blocks = policy.blocks(counts[communicator.rank])
            own = (yield from by_hand(hands, np.concatenate, parts)) if blocks else np.concatenate(parts)
            whole = yield from segments.gather(communicator, own, counts)
            packed = segments.split(whole, counts)
            found.update(zip(indices, self._unpack(indices, lengths[:, indices], packed), strict=True))
        for index in np.flatnonzero(~small).tolist():
            counts = sizes[:, index].tolist()
            whole = yield from segments.gather(communicator, as_bytes(leaves[index]), counts)
            (leaf,) = self._unpack([index], lengths[:, [index]], segments.split(whole, counts))
            if lies_together(leaves[index].shape, self._axes[index]):
                shape = self._shape(index, int(lengths[:, index].sum()))
                leaf = leaf._replace(whole=np.ndarray(shape, leaves[index].dtype, whole))
            found[index] = leaf
        return [found[index] for index in range(len(leaves))]

    def _leaves(self) -> list[Array]:
        self.prepare()
        assert self._arrays is not None
        return self._arrays

    def _lengths(self) -> Array:
        return np.array([leaf.shape[axis] for leaf, axis in zip(self._leaves(), self._axes, strict=True)], np.int64)

    def _shape(self, index: int, length: int) -> tuple[int, ...]:
        """Return the shape of a leaf that is so long along its axis."""
        shape, axis = self._leaves()[index].shape, self._axes[index]
        return (*shape[:axis], length, *shape[axis + 1 :])

    def _unpack(self, indices: Sequence[int], lengths: Array, packed: Sequence[Array]) -> list[Gathered]:
        """Return leaves, of which each worker has packed its own, one behind the other.

        Args:
            indices: the leaves.
            lengths: by rank, how long they are along their axes.
            packed: by rank, the bytes.
        """
        at, found = [0] * len(packed), []
        for index, column in zip(indices, lengths.T.tolist(), strict=True):
            parts = []
            for rank, (length, data) in enumerate(zip(column, packed, strict=True)):
                part = np.ndarray(self._shape(index, length), self._leaves()[index].dtype, data, at[rank])
                at[rank] += part.nbytes
                parts.append(part)
            found.append(Gathered(parts, None))
        return found


def is_large(column: Sequence[Any]) -> bool:
    """Return whether a leaf is likely to go by itself: it does where any worker's is large."""
    return sum(int(array.nbytes) for array in column) >= segments.PACKED_BELOW


def is_plain(column: Sequence[Any]) -> bool:
    """Return whether a leaf is an array whose bytes are those to be sent."""
    (first, *others) = column
    return not others and isinstance(first, np.ndarray) and first.flags.c_contiguous and first.dtype.isnative


def _together(column: Sequence[Any], axis: int) -> Array:
    if is_plain(column):
        return np.asarray(column[0])
    return np.ascontiguousarray(concatenated(column, axis))


def native(array: Array) -> Array:
    """Return an array in the machine's byte order."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def concatenated(arrays: Sequence[Any], axis: int) -> Array:
    """Return arrays put together along an axis, in the machine's byte order."""
    return np.concatenate([native(np.asarray(array)) for array in arrays], axis=axis)


def lies_together(shape: Sequence[int], axis: int) -> bool:
    """Return whether arrays of such a shape, put together along an axis, are one behind the other in memory."""
    return prod(shape[:axis]) == 1


class Exchange(OfFixedSize):
    """Bytes of each worker for each other one.

    Args:
        make: returns them, by rank, in one piece.
        counts: by rank, how many are for that worker.
        sizes: by rank, how many come from that worker.
        most: how many any worker sends any other, at most; the same on every worker.
        copied: how many bytes ``make`` copies.
    """

    room = 0  # for there is nothing of it in records

    def __init__(
        self, make: Callable[[], Array], counts: Sequence[int], sizes: Sequence[int], most: int, copied: int
    ) -> None:
        self._make = make
        self._counts = counts
        self._sizes = sizes
        self._most = most
        self._copied = copied

    @property
    def data(self) -> Array:
        """Nothing: every worker receives every record, and this is for each its own."""
        return np.empty(0, np.uint8)

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return that it does not."""
        return False

    def from_records(self, parts: Sequence[memoryview]) -> Array:
        """Never called: an exchange does not travel in records."""
        raise NotImplementedError

    def carry_out(
        self,
        communicator: Communicator,
        lengths: Sequence[int] | None,  # noqa: ARG002
        hands: Hands,
    ) -> Steps[Array]:
        """Exchange; return the bytes of all workers, by rank."""
        send = (yield from by_hand(hands, self._make)) if policy.blocks(self._copied) else self._make()
        return (yield from segments.exchange(communicator, send, self._counts, self._sizes, self._most))
