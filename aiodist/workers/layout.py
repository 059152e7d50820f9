"""The layout: which replicas live on which worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import TypeVar

T = TypeVar("T")


class Layout:
    """Replicas by worker.

    Args:
        rank: this worker.
        devices: by worker, the devices of its replicas; a worker may have any number of them.
        places: by worker, the ids of its replicas, ascending. None: worker 0's first, then worker 1's, and so on.
        size: how many ids there are; None for as many as replicas. Ids may be left out.
    """

    def __init__(
        self,
        rank: int,
        devices: Sequence[Sequence[str]],
        places: Sequence[Sequence[int]] | None = None,
        size: int | None = None,
    ) -> None:
        self.rank = rank
        self.devices = tuple(map(tuple, devices))
        self.workers = len(self.devices)
        self.counts = tuple(map(len, self.devices))
        self.replicas = sum(self.counts)
        self.size = self.replicas if size is None else size
        self.offset = sum(self.counts[:rank])
        self.local = self.counts[rank]
        self._places = places

    @cached_property
    def places(self) -> tuple[Sequence[int], ...]:
        """By worker, the ids of its replicas."""
        if self._places is not None:
            return tuple(self._places)
        ends = accumulate(self.counts)
        return tuple(range(end - count, end) for end, count in zip(ends, self.counts, strict=True))

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
        return self._places is None or self._order is None

    def in_order(self, by_worker: Sequence[Sequence[T]]) -> list[T]:
        """Return the items of all workers, one for each of their replicas, in the order of the ids."""
        items = list(chain(*by_worker))
        return items if self.in_blocks or self._order is None else [items[index] for index in self._order]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The devices of all replicas by replica id, as a report names them."""
        return tuple(
            device if self.workers == 1 else f"worker {worker} {device}"
            for worker, devices in enumerate(self.devices)
            for device in devices
        )

    def offset_of(self, worker: int) -> int:
        """Return the id of a worker's first replica."""
        return sum(self.counts[:worker])

    def worker_of(self, replica_id: int) -> tuple[int, int]:
        """Return the worker that a replica lives on, and the replica's place there."""
        if self._places is not None:
            worker = next(w for w, ids in enumerate(self._places) if replica_id in ids)
            return worker, list(self._places[worker]).index(replica_id)
        for worker, count in enumerate(self.counts):
            if replica_id < count:
                return worker, replica_id
            replica_id -= count
        raise IndexError(replica_id)
