"""The bridge: the way from a group of local replicas to those of other workers, as the group sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from aiodist.collective.rendezvous import Rendezvous
from aiodist.vocabulary.errors import CollectiveError


class Bridge(Protocol):
    """Takes meetings on, once all local replicas have met in them, and trouble, once they have shown what they do."""

    def cross(self, meeting: Rendezvous) -> None:
        """Take a meeting at which all local replicas mean the same; `SyncGroup.finish_merge` completes it later."""

    def complain(self, overdue: Rendezvous | None) -> None:
        """Have all workers judged, this one being in trouble; `SyncGroup.settle` hears the verdict later."""

    def judge_alone(self) -> CollectiveError:
        """Return the verdict on what is known here, where replicas must be told at once."""
        ...

    async def finish(self, failures: Mapping[int, BaseException]) -> None:
        """Meet the other workers at the end of the run; return when there is nothing more to hear from them.

        Args:
            failures: by id, what local replicas raised on their own.
        """
