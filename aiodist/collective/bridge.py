"""The bridge: the way from a group of local replicas to those of other workers, as the group sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Protocol

from aiodist._core.errors import CollectiveError
from aiodist.collective.rendezvous import Rendezvous

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.subgroup import SubGroup


class Bridge(Protocol):
    """Takes meetings on, once all local replicas have met in them, and trouble, once they have shown what they do."""

    @property
    def on_its_way(self) -> tuple[Rendezvous | None, int] | None:
        """The meeting whose values move, with how much of their way they have come; None where none do."""
        ...

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local replicas mean the same; `SyncGroup.finish_merge` completes it later."""

    def complain(self, group: SyncGroup, overdue: Rendezvous | None) -> None:
        """Have all workers judged, a group being in trouble; the run's own hears the verdict later, by `settle`."""

    def judge_alone(self) -> CollectiveError:
        """Return the verdict on what is known here, where replicas must be told at once."""
        ...

    def close(self) -> None:
        """Hear that no local replica will call anything more in the group."""


class RunBridge(Bridge, Protocol):
    """The bridge of a run's own group."""

    def new_part(
        self, parent: SyncGroup, positions: tuple[int, ...], name: str | None, code: CodeType, offset: int
    ) -> SubGroup:
        """Return a group of some of the replicas, as far as they are local; see `SubGroup`."""
        ...

    def tell_waits(self, certain: Collection[int]) -> None:
        """Tell the other workers which local replicas do nothing but wait in collectives: there may be a circle."""

    async def finish(self, failures: Mapping[int, BaseException]) -> None:
        """Meet the other workers at the end of the run; return when there is nothing more to hear from them.

        Args:
            failures: by id, what local replicas raised on their own.
        """
