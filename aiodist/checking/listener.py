"""A listener: an observer that notes nothing, for those that note a little to stand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiodist._core.errors import CollectiveError
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.member import Member
    from aiodist.collective.rendezvous import Rendezvous


class Listener:
    """An observer (see `aiodist.collective.observer`) that notes nothing."""

    def run_begun(self, group: SyncGroup, fn: Callable[..., Any]) -> None:
        """A run begins."""

    def started(self, member: Member) -> None:
        """A replica starts."""

    def arrived(self, member: Member, meeting: Rendezvous) -> None:
        """A replica has issued a collective."""

    def waits(self, member: Member, meeting: Rendezvous) -> None:
        """A replica awaits it."""

    def resumed(self, member: Member, meeting: Rendezvous) -> None:
        """That await is over."""

    def completed(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """A collective is complete."""

    def judged(self, group: SyncGroup, verdict: CollectiveError) -> None:
        """The replicas did not meet."""

    def ended(self, member: Member, error: BaseException | None) -> None:
        """A replica has ended."""

    def run_ended(self, group: SyncGroup) -> None:
        """A run has ended."""
