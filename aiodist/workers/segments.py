"""Segments: bytes of any number, straight from the memory of who has them to where who needs them will read them.

A large operation would hold up the event loop, which carries it on; small ones, one behind the other, keep both the
engine and the loop at work. To send bytes packed, or to put them in their places when all are there, would be to read
and write each of them once more, in threads that the event loop has to share the cores with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from aiodist.workers.communicator import Array, Communicator, Request, parts_of
from aiodist.workers.transfers import SEGMENT, Steps
from aiodist_kernels.pool import results as pool

PACKED_BELOW: Final = 1 << 16
"""Arrays of fewer bytes are sent together, for to copy them takes less than an operation for each."""

_IN_FLIGHT: Final = 2
_BYTE: Final = np.dtype(np.uint8)
_FARTHEST: Final = 2**31 - 1
"""How far from the beginning of a buffer MPI 3 can put something, in bytes."""


def buffer(nbytes: int) -> Array:
    """Return so many bytes of any value."""
    return pool.empty((nbytes,), _BYTE)


def places_of(sizes: Iterable[int], unit: int = 1) -> list[int]:
    """Return where parts of these sizes begin, one behind the other at multiples of a unit, and where the last ends."""
    return list(accumulate((-(-size // unit) * unit for size in sizes), initial=0))


def split(whole: Array, sizes: Sequence[int], unit: int = 1) -> list[Array]:
    """Return the parts of these sizes, each at the next multiple of a unit behind those before it."""
    return parts_of(whole, sizes, places_of(sizes, unit)[:-1])


def broadcast(communicator: Communicator, part: Array, root: int, copy: Array | None = None) -> Steps[None]:
    """Overwrite bytes with those of one worker, who may have them copied, too."""

    def requests() -> Generator[Request]:
        for at in range(0, len(part), SEGMENT):
            yield communicator.ibcast(part[at : at + SEGMENT], root)
            if copy is not None:
                copy[at : at + SEGMENT] = part[at : at + SEGMENT]

    return _in_turns(requests())


def gather(communicator: Communicator, own: Array, sizes: Sequence[int], unit: int = 1) -> Steps[Array]:
    """Return the bytes of all workers, by rank, each at the next multiple of a unit behind those before it.

    Args:
        communicator: the lane's.
        own: this worker's bytes.
        sizes: by rank, how many bytes a worker has.
        unit: in bytes.
    """
    places = places_of(sizes, unit)
    whole = buffer(places[-1])
    if places[-1] > _FARTHEST:
        for root, part in enumerate(split(whole, sizes, unit)):
            if root == communicator.rank:
                yield from broadcast(communicator, own, root, part)
            else:
                yield from broadcast(communicator, part, root)
        return whole
    step = max(1, SEGMENT // communicator.size)

    def requests() -> Generator[Request]:
        for at in range(0, max(sizes), step):
            counts, begins = _segment(sizes, places, at, step)
            yield communicator.iallgatherv(own[at : at + step], whole, counts, begins)

    yield from _in_turns(requests())
    return whole


def exchange(
    communicator: Communicator, send: Array, counts: Sequence[int], sizes: Sequence[int], most: int
) -> Steps[Array]:
    """Return, by rank, the bytes that each worker has for this one.

    Args:
        communicator: the lane's.
        send: by rank, those that are for that worker.
        counts: by rank, how many those are.
        sizes: by rank, how many come from that worker.
        most: how many bytes any worker sends any other, at most; the same on every worker.
    """
    going, coming = places_of(counts), places_of(sizes)
    whole = buffer(coming[-1])
    step = max(1, SEGMENT // communicator.size)
    segments = ((_segment(counts, going, at, step), _segment(sizes, coming, at, step)) for at in range(0, most, step))
    if max(len(send), len(whole)) > _FARTHEST:
        for out, back in segments:
            room = np.empty(sum(back[0]), np.uint8)
            yield communicator.ialltoallv(np.concatenate(parts_of(send, *out)), out[0], room, back[0])
            for piece, part in zip(parts_of(whole, *back), parts_of(room, back[0]), strict=True):
                piece[...] = part
        return whole
    yield from _in_turns(
        communicator.ialltoallv(send, out[0], whole, back[0], out[1], back[1]) for out, back in segments
    )
    return whole


def _segment(sizes: Sequence[int], places: Sequence[int], at: int, step: int) -> tuple[list[int], list[int]]:
    """Return how much of each part is in a segment, and where that begins."""
    begins = [place + min(at, size) for place, size in zip(places, sizes, strict=False)]
    return [min(step, max(0, size - at)) for size in sizes], begins


def _in_turns(requests: Iterator[Request]) -> Steps[None]:
    """Wait for requests, of which a few are begun before the first of them is complete."""
    pending: deque[Request] = deque()
    for request in requests:
        pending.append(request)
        if len(pending) == _IN_FLIGHT:
            yield pending.popleft()
    while pending:
        yield pending.popleft()
