"""The layout: which replicas live on which worker."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from itertools import accumulate, pairwise


class Layout:
    """Replicas by worker: worker 0's first, then worker 1's, and so on. Workers may have different numbers of them.

    Args:
        rank: this worker.
        devices: by worker, the devices of its replicas.

    Attributes:
        workers, replicas: how many there are in all.
        counts, ids, positions: by worker, how many replicas it has, and their ids, as ranges and as tuples.
        names: by replica id, its device as a report names it.
    """

    def __init__(self, rank: int, devices: Sequence[Sequence[str]]) -> None:
        self.rank = rank
        self.devices = tuple(map(tuple, devices))
        self.workers = len(self.devices)
        self.counts = tuple(map(len, self.devices))
        self._offsets = (0, *accumulate(self.counts))
        self.replicas = self._offsets[-1]
        self.ids: tuple[range, ...] = tuple(range(begin, end) for begin, end in pairwise(self._offsets))
        self.positions = tuple(map(tuple, self.ids))
        self.names = tuple(
            device if self.workers == 1 else f"worker {worker} {device}"
            for worker, devices in enumerate(self.devices)
            for device in devices
        )

    def seen_from(self, rank: int) -> Layout:
        """Return the same layout as another worker sees it; all that is large is one for both."""
        other = copy(self)
        other.rank = rank
        return other

    @property
    def own(self) -> range:
        """The ids of this worker's replicas."""
        return self.ids[self.rank]

    @property
    def offset(self) -> int:
        """The id of this worker's first replica."""
        return self._offsets[self.rank]

    @property
    def local(self) -> int:
        """How many replicas this worker has."""
        return self.counts[self.rank]

    def worker_of(self, replica_id: int) -> int:
        """Return the worker that a replica lives on.

        Raises:
            IndexError: there is no such replica.
        """
        if not 0 <= replica_id < self.replicas:
            raise IndexError(replica_id)
        return bisect_right(self._offsets, replica_id) - 1

    def members(self, replica_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return some of the replicas by worker, in ascending order of both; workers with none are left out."""
        found: dict[int, list[int]] = {}
        for replica_id in sorted(replica_ids):
            found.setdefault(self.worker_of(replica_id), []).append(replica_id)
        return {worker: tuple(ids) for worker, ids in found.items()}
