"""Objects of one worker or of all, given to all: whatever can be pickled, and the arrays in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiodist.workers import segments
from aiodist.workers.coding import ALIGNMENT, Packed, decode, encode, unpack
from aiodist.workers.communicator import Array, Communicator
from aiodist.workers.transfers import SEGMENT, Hands, Steps, as_bytes, by_hand, sizes_of_all
from aiodist_kernels import policy


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

    def prepare(self) -> None:
        """Make the object, and encode it."""
        if self._data is None:
            self._data = encode(self._value if self._make is None else self._make(self._value))

    @property
    def nbytes(self) -> int:
        """How many bytes `data` has."""
        return len(self.data)

    @property
    def data(self) -> Array:
        """The object as bytes."""
        self.prepare()
        assert self._data is not None
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
        """Gather the bytes, after their sizes where those are not known."""
        if lengths is None:
            lengths = yield from sizes_of_all(communicator, self.nbytes)
        whole = yield from segments.gather(communicator, self.data, lengths, ALIGNMENT)
        return [decode(part) for part in segments.split(whole, lengths, ALIGNMENT)]


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
        self._packed: Packed | None = None
        self.root = root
        self._gives = rank == root
        self.is_light = not (self._gives and policy.blocks(nbytes))

    def prepare(self) -> None:
        """Pickle the object, where it is given; arrays in one piece are not copied."""
        if self._gives and self._packed is None:
            self._packed = Packed(self._value)

    @property
    def nbytes(self) -> int:
        """How many bytes `data` has."""
        self.prepare()
        return 0 if self._packed is None else self._packed.nbytes

    @property
    def data(self) -> Array:
        """The object as bytes, where it is given; else none."""
        self.prepare()
        return np.empty(0, np.uint8) if self._packed is None else self._packed.whole()

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
        hands: Hands,
    ) -> Steps[Any]:
        """Broadcast the bytes, after their number where that is not known; arrays from where they are, to their own."""
        (size,) = (yield from self._numbers(communicator, [self.nbytes])) if lengths is None else [lengths[self.root]]
        if size <= SEGMENT:
            whole = self.data if self._gives else segments.buffer(size)
            yield from segments.broadcast(communicator, whole, self.root)
            return decode(whole)
        sizes = [] if self._packed is None else self._packed.sizes
        (count,) = yield from self._numbers(communicator, [len(sizes)])
        sizes = yield from self._numbers(communicator, sizes or [0] * count)
        return unpack((yield from self._parts(communicator, sizes, hands)))

    def _numbers(self, communicator: Communicator, own: Sequence[int]) -> Steps[list[int]]:
        """Return as many numbers of the worker that gives as this one has."""
        numbers = np.array(own, np.int64)
        yield communicator.ibcast(as_bytes(numbers), self.root)
        return [int(number) for number in numbers]

    def _parts(self, communicator: Communicator, sizes: Sequence[int], hands: Hands) -> Steps[list[Array]]:
        """Return the parts of the packed object, those of few bytes after a way together."""
        small = [size if size < segments.PACKED_BELOW else 0 for size in sizes]
        together = segments.buffer(segments.places_of(small, ALIGNMENT)[-1])
        parts = segments.split(together, small, ALIGNMENT)
        own = [None] * len(sizes) if self._packed is None else self._packed.parts
        few = [
            (part, mine)
            for part, mine in zip(parts, own, strict=True)
            if mine is not None and mine.size < segments.PACKED_BELOW
        ]
        if few and policy.blocks(together.size):
            yield from by_hand(hands, _fill, few)
        else:
            _fill(few)
        yield from segments.broadcast(communicator, together, self.root)
        for index, size in enumerate(sizes):
            if size >= segments.PACKED_BELOW:
                part, mine = segments.buffer(size), own[index]
                if mine is None:
                    yield from segments.broadcast(communicator, part, self.root)
                else:
                    yield from segments.broadcast(communicator, mine, self.root, part)
                parts[index] = part
        return parts


def _fill(pairs: Sequence[tuple[Array, Array]]) -> None:
    for part, mine in pairs:
        part[...] = mine
