"""The layout: which replicas live on which worker."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from itertools import accumulate


class Layout:
    """The replicas of a job by worker: worker 0's first, then worker 1's; a worker may have any number of them.

    Args:
        rank: this worker.
        devices: by worker, the devices of its replicas.

    Attributes:
        names: the devices of all replicas by replica id, as a report names them.
    """

    def __init__(self, rank: int, devices: Sequence[Sequence[str]]) -> None:
        self.devices = tuple(map(tuple, devices))
        self.workers = len(self.devices)
        self.counts = tuple(map(len, self.devices))
        self._offsets = (0, *accumulate(self.counts))
        self.replicas = self._offsets[-1]
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

    def offset_of(self, worker: int) -> int:
        """Return the id of a worker's first replica."""
        return self._offsets[worker]

    def worker_of(self, replica_id: int) -> tuple[int, int]:
        """Return the worker that a replica lives on, and the replica's place there."""
        if not 0 <= replica_id < self.replicas:
            raise IndexError(replica_id)
        worker = bisect_right(self._offsets, replica_id) - 1
        return worker, replica_id - self._offsets[worker]
