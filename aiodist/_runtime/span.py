"""What a run needs of several workers: the protocol that `_workers` implements, handed to the run by the strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from aiodist._core.ledger import Group
from aiodist._core.snapshot import Overdue
from aiodist._runtime.rendezvous import Rendezvous


class Span(Protocol):
    """Takes matched collectives on to other workers, and trouble, once the local replicas have settled."""

    takes_all: bool  # also the collectives of groups whose members are all here

    def matched(self, slot: Rendezvous) -> None:
        """Agree with the other workers on what all local members have posted, move its values, and complete it."""

    def made(self, group: Group) -> None:
        """Hear of a group that local replicas make, and that has members elsewhere."""

    def troubled(self, group: Group, overdue: Overdue | None) -> None:
        """Have all workers' snapshots analysed: a group is doomed here, and every local member has settled."""

    def stuck(self, replica_ids: Collection[int]) -> None:
        """Hear which local replicas do nothing but wait in collectives."""

    async def finish(self, failures: Mapping[int, BaseException]) -> None:
        """Meet the other workers at the end of the run, with what local replicas raised on their own, by id."""
