"""The layout: which replicas live on which worker."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TypeVar

T = TypeVar("T")


class Layout:
    """Replicas by worker.

    Args:
        rank: this worker.
        devices: by worker, the devices of its replicas; a worker may have any number of them.
        places: by worker, the ids of its replicas, ascending. None: worker 0's first, then worker 1's, and so on.
        size: how many ids there are; None for as many as replicas. Ids may be left out.

    Attributes:
        places: by worker, the ids of its replicas.
        names: the devices of all replicas, worker by worker, as a report names them.
    """

    def __init__(
        self,
        rank: int,
        devices: Sequence[Sequence[str]],
        places: Sequence[Sequence[int]] | None = None,
        size: int | None = None,
    ) -> None:
        self.devices = tuple(map(tuple, devices))
        self.workers = len(self.devices)
        self.counts = tuple(map(len, self.devices))
        self._offsets = (0, *accumulate(self.counts))
        self.replicas = self._offsets[-1]
        self.size = self.replicas if size is None else size
        self._given = places is not None
        self.places = tuple(places or (range(begin, end) for begin, end in pairwise(self._offsets)))
        self.names = tuple(
            device if self.workers == 1 else f"worker {worker} {device}"
            for worker, devices in enumerate(self.devices)
            for device in devices
        )
        self._stand_at(rank)

    def _stand_at(self, rank: int) -> None:
        self.rank = rank
        self.offset = self._offsets[rank]
        self.local = self.counts[rank]

    def seen_from(self, rank: int) -> Layout:
        """Return the same layout as another worker sees it; all that is large is one for both."""
        other = copy(self)
        other._stand_at(rank)
        return other

    @property
    def mine(self) -> Sequence[int]:
        """The ids of this worker's replicas."""
        return self.places[self.rank]

    @cached_property
    def _order(self) -> list[int] | None:
        """By id, its index in the concatenation of all workers' replicas; None where those are in order."""
        ids = list(chain(*self.places))
        order = sorted(range(len(ids)), key=ids.__getitem__)
        return None if order == list(range(len(ids))) else order

    @property
    def in_blocks(self) -> bool:
        """Whether each worker's replicas follow on those of the worker before it."""
        return not self._given or self._order is None

    def in_order(self, by_worker: Sequence[Sequence[T]]) -> list[T]:
        """Return the items of all workers, one for each of their replicas, in the order of the ids."""
        items = list(chain(*by_worker))
        return items if self.in_blocks or self._order is None else [items[index] for index in self._order]

    def offset_of(self, worker: int) -> int:
        """Return how many replicas the workers before this one have."""
        return self._offsets[worker]

    def worker_of(self, replica_id: int) -> tuple[int, int]:
        """Return the worker that a replica lives on, and the replica's place there."""
        if self._given:
            worker = next(w for w, ids in enumerate(self.places) if replica_id in ids)
            return worker, list(self.places[worker]).index(replica_id)
        if not 0 <= replica_id < self.replicas:
            raise IndexError(replica_id)
        worker = bisect_right(self._offsets, replica_id) - 1
        return worker, replica_id - self._offsets[worker]
