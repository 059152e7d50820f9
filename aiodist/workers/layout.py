"""The layout: which replicas live on which worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property


class Layout:
    """The replicas of a job by worker: worker 0's first, then worker 1's; a worker may have any number of them.

    Args:
        rank: this worker.
        devices: by worker, the devices of its replicas.
    """

    def __init__(self, rank: int, devices: Sequence[Sequence[str]]) -> None:
        self.rank = rank
        self.devices = tuple(map(tuple, devices))
        self.workers = len(self.devices)
        self.counts = tuple(map(len, self.devices))
        self.replicas = sum(self.counts)
        self.offset = sum(self.counts[:rank])
        self.local = self.counts[rank]

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
        for worker, count in enumerate(self.counts):
            if replica_id < count:
                return worker, replica_id
            replica_id -= count
        raise IndexError(replica_id)
