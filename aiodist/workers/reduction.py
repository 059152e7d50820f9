"""Reductions over the workers, in segments: while one is on its way, the next is folded and the last one finished.

An engine reduces a segment where it does so with our meaning. Else each worker is given a share of it from all others,
folds that, and all gather the shares. In both ways a segment that needs no folding, since there is one local replica,
is sent from that replica's own memory. A segment takes the event loop's thread a fraction of a millisecond; those that
take more, since there are many local replicas, are folded in worker threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

import aiodist_kernels as kernels
from aiodist.workers.communicator import Array, Communicator, Request
from aiodist.workers.layout import Layout
from aiodist.workers.leaves import Fold, Leaf, Pack, packed
from aiodist.workers.transfers import SEGMENT, Done, Hands, Job, OfFixedSize, Steps
from aiodist_kernels import ReduceOp, policy
from aiodist_kernels.pool import results as pool

_AHEAD: Final = 2  # segments that worker threads fold before their turn
_BEHIND: Final = 2  # segments of which the shares, or the results, are still to come when the next is begun


class Folding:
    """What each worker brings to a reduction, and how that becomes one: a part each, in the order of the workers.

    Args:
        rank: this worker.
        counts: how many parts each worker brings.
    """

    def __init__(self, rank: int, counts: Sequence[int]) -> None:
        self.rank = rank
        self.counts = counts
        self.parts: Sequence[tuple[slice, Fold]] = [(slice(None), _in_order)]
        """Of which local replicas each part of this worker is, and how it is folded."""

    def fold(self, op: ReduceOp, parts: Sequence[Array]) -> Array:
        """Return the reduction of all parts, by worker; it lies in one of them."""
        return kernels.reduce(op, parts, out=parts[0]) if len(parts) > 1 else parts[0]


_known: Final[WeakKeyDictionary[Layout, Folding]] = WeakKeyDictionary()


def in_order_of(layout: Layout) -> Folding:
    """Return the folding of one part a worker."""
    found = _known.get(layout)
    if found is None:
        found = _known[layout] = Folding(layout.rank, [1] * layout.workers)
    return found


def _in_order(op: ReduceOp, parts: Sequence[Array], out: Array) -> None:
    kernels.reduce(op, parts, out=out)


class _Segment(NamedTuple):
    """A range of a pack on its way: what is to be complete, and where the outcome lies."""

    begin: int
    end: int
    request: Request
    outcome: Array


class Reduction(OfFixedSize):
    """Arrays to be reduced over the workers, each in its own accumulator. Its result is a list of their results.

    Args:
        op: SUM, PRODUCT, MIN or MAX.
        leaves: the arrays; of the same shapes and dtypes on every worker. They are left as they are.
        replicas: how many replicas there are over all workers.
        folding: what becomes one, and how.
        through_engine: the engine may reduce, in an order of its own.
    """

    def __init__(
        self, op: ReduceOp, leaves: Sequence[Leaf], replicas: int, folding: Folding, *, through_engine: bool = True
    ) -> None:
        self._op = op
        self._replicas = replicas
        self._folding = folding
        self._through_engine = through_engine
        self._packs, self._order = packed(op, leaves)
        self.room = max(folding.counts) * sum(pack.nbytes for pack in self._packs)

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return whether it fits, which is the same on every worker."""
        return self.room <= room

    @property
    def data(self) -> Array:
        """This worker's parts, one after the other by accumulator."""
        whole = []
        for pack in self._packs:
            for places, fold in self._folding.parts:
                part = np.empty(pack.size, pack.dtype)
                pack.fill(0, pack.size, part, places, fold)
                whole.append(part.view(np.uint8))
        return whole[0] if len(whole) == 1 else np.concatenate(whole)

    def from_records(self, parts: Sequence[memoryview]) -> list[Any]:
        """Return the results, of what stands in all workers' records."""
        at = 0
        for pack in self._packs:
            found: list[Array] = []
            for part, count in zip(parts, self._folding.counts, strict=True):
                rows = np.empty((count, pack.size), pack.dtype)
                rows.reshape(-1).view(np.uint8).data[:] = part[count * at : count * (at + pack.nbytes)]
                found.extend(rows)
            at += pack.nbytes
            pack.take(self._folding.fold(self._op, found), self._replicas)
        return self._results()

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None, hands: Hands) -> Steps[list[Any]]:  # noqa: ARG002
        """Reduce each pack, segment by segment."""
        for pack in self._packs:
            pack.prepare_results()
            if not pack.is_in_order() and policy.blocks(pack.nbytes):
                job = hands.begin(pack.flatten)
                yield job
                job.result()
            if communicator.size == 1:
                yield from self._alone(pack, hands)
            elif self._through_engine and communicator.reduces(self._op, pack.dtype):
                yield from self._by_engine(communicator, pack, hands)
            else:
                yield from self._by_shares(communicator, pack, hands)
        return self._results()

    def _results(self) -> list[Any]:
        results = [result for pack in self._packs for result in pack.results()]
        found = dict(zip(self._order, results, strict=True))
        return [found[index] for index in range(len(results))]

    # The ways of a segment.

    def _by_engine(self, communicator: Communicator, pack: Pack, hands: Hands) -> Steps[None]:
        depth = communicator.segment_depth
        source, totals = _Source(pack, self._folding, hands, depth), _Totals(pack, depth)
        pending: deque[_Segment] = deque()
        for index, (begin, end) in enumerate(source.segments):
            if len(pending) == depth:
                yield from self._finish(pack, pending)
            send = yield from source.take(index)
            total = totals.of(index, begin, end)
            pending.append(_Segment(begin, end, communicator.iallreduce(self._op, send, total), total))
        while pending:
            yield from self._finish(pack, pending)

    def _by_shares(self, communicator: Communicator, pack: Pack, hands: Hands) -> Steps[None]:
        """Exchange the shares of a segment, while those of the one before are folded and gathered."""
        source, totals = _Source(pack, self._folding, hands, _BEHIND, communicator.size), _Totals(pack, _BEHIND)
        received = _Ring(_BEHIND + 1, sum(self._folding.counts) * -(-source.step // communicator.size), pack.dtype)
        coming: deque[_Segment] = deque()
        pending: deque[_Segment] = deque()
        count = len(source.segments)
        for index in range(count + _BEHIND):
            if index < count:
                begin, end = source.segments[index]
                send = yield from source.take(index)
                coming.append(self._exchange(communicator, begin, end, send, received.take(index)))
            if 0 < index <= count:
                begin, end, request, parts = coming.popleft()
                yield request
                total = totals.of(index - 1, begin, end)
                pending.append(self._gather(communicator, begin, end, parts, total))
            if index > 1:
                yield from self._finish(pack, pending)

    def _exchange(self, communicator: Communicator, begin: int, end: int, send: Array, room: Array) -> _Segment:
        shares, counts, rank = _shares(communicator, begin, end), self._folding.counts, communicator.rank
        item = send.itemsize
        going = [share * counts[rank] * item for share in shares]
        coming = [shares[rank] * count * item for count in counts]
        parts = room[: sum(coming) // item]
        request = communicator.ialltoallv(send.view(np.uint8), going, parts.view(np.uint8), coming)
        return _Segment(begin, end, request, parts)

    def _gather(self, communicator: Communicator, begin: int, end: int, parts: Array, total: Array) -> _Segment:
        shares = _shares(communicator, begin, end)
        own = shares[communicator.rank]
        share = self._folding.fold(self._op, list(parts.reshape(-1, own))) if own else parts
        sizes = [share * total.itemsize for share in shares]
        request = communicator.iallgatherv(share.view(np.uint8), total.view(np.uint8), sizes)
        return _Segment(begin, end, request, total)

    def _alone(self, pack: Pack, hands: Hands) -> Steps[None]:
        """Fold what the local replicas have, where there are no others."""
        totals = _Totals(pack, _AHEAD)
        source = _Source(pack, self._folding, hands, _AHEAD, rooms=totals)
        for index, (begin, end) in enumerate(source.segments):
            total = yield from source.take(index)
            pack.finish(begin, end, total, self._replicas)
            yield Done()

    def _finish(self, pack: Pack, pending: deque[_Segment]) -> Steps[None]:
        begin, end, request, total = pending.popleft()
        yield request
        pack.finish(begin, end, total, self._replicas)


def shares_of(size: int, workers: int) -> list[int]:
    """Return how many elements each worker's share has."""
    share = -(-size // workers)
    return [max(0, min(share, size - worker * share)) for worker in range(workers)]


def _shares(communicator: Communicator, begin: int, end: int) -> list[int]:
    return shares_of(end - begin, communicator.size)


class _Ring:
    """Buffers that serve one segment after the other."""

    def __init__(self, count: int, size: int, dtype: np.dtype[Any]) -> None:
        self._buffers: list[Array | None] = [None] * count
        self._size, self._dtype = size, dtype

    def take(self, index: int) -> Array:
        """Return the buffer of a segment: that of the one ``count`` before it."""
        place = index % len(self._buffers)
        buffer = self._buffers[place]
        if buffer is None:
            buffer = self._buffers[place] = pool.empty((self._size,), self._dtype)
        return buffer


class _Totals:
    """Where segments' totals lie: in the results, where those have the accumulator's dtype; else in a ring."""

    def __init__(self, pack: Pack, in_flight: int) -> None:
        self._pack = pack
        self._ring = _Ring(in_flight + 1, min(pack.size, segment_size(pack)), pack.dtype)

    def of(self, index: int, begin: int, end: int) -> Array:
        """Return the memory of a segment."""
        room = self._pack.room_for(begin, end)
        return self._ring.take(index)[: end - begin] if room is None else room


def segment_size(pack: Pack) -> int:
    """Return how many elements a segment has."""
    return max(1, SEGMENT // pack.dtype.itemsize)


class _Source:
    """What this worker sends of each segment, folded in its turn, or some segments before in worker threads.

    Args:
        pack: the leaves.
        folding: what this worker brings.
        hands: the worker threads.
        in_flight: how many segments may be on their way.
        workers: how many each segment is cut into shares for.
        rooms: where the segments are to lie; None: in memory of its own, or a replica's.

    Attributes:
        step: how many elements a segment has.
        segments: the bounds of each.
    """

    def __init__(
        self,
        pack: Pack,
        folding: Folding,
        hands: Hands,
        in_flight: int,
        workers: int = 1,
        rooms: _Totals | None = None,
    ) -> None:
        self._pack, self._parts, self._hands, self._workers, self._rooms = pack, folding.parts, hands, workers, rooms
        self.step = min(pack.size, segment_size(pack))
        self.segments = [(a, min(a + self.step, pack.size)) for a in range(0, pack.size, self.step or 1)]
        self._slow = policy.blocks(max(leaf.cost() for leaf in pack.leaves) * self.step)
        self._ring = _Ring(in_flight + _AHEAD + 1, self.step * len(self._parts), pack.dtype)
        self._jobs: deque[tuple[Job, Array]] = deque()
        self._begun = 0

    def take(self, index: int) -> Steps[Array]:
        """Return a segment, the next one."""
        if self._rooms is None and len(self._parts) == 1:
            own = self._pack.own_memory(*self.segments[index])
            if own is not None:
                return own
        if not self._slow:
            room = self._room(index)
            self._fill(index, room)
            return room
        while self._begun < min(len(self.segments), index + 1 + _AHEAD):
            room = self._room(self._begun)
            self._jobs.append((self._hands.begin(self._fill, self._begun, room), room))
            self._begun += 1
        job, room = self._jobs.popleft()
        yield job
        job.result()
        return room

    def _room(self, index: int) -> Array:
        begin, end = self.segments[index]
        if self._rooms is not None:
            return self._rooms.of(index, begin, end)
        return self._ring.take(index)[: (end - begin) * len(self._parts)]

    def _fill(self, index: int, room: Array) -> None:
        """Fold a segment: for each worker its share of each part."""
        begin, end = self.segments[index]
        if len(self._parts) == 1:
            self._pack.fill(begin, end, room, *self._parts[0])
            return
        at = 0
        for low, high in pairwise(accumulate(shares_of(end - begin, self._workers), initial=begin)):
            for places, fold in self._parts:
                self._pack.fill(low, high, room[at : at + high - low], places, fold)
                at += high - low
