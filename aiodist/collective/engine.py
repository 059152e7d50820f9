"""What a sync group needs of the event loop that its replicas run on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aiodist._arrays.nests import Structure
from aiodist._collectives.work import Work
from aiodist._core.report import Location
from aiodist.collective.rendezvous import Rendezvous

if TYPE_CHECKING:
    from aiodist._runtime.waits import Look
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.member import Member


class Engine(Protocol):
    """What a sync group needs of the event loop that its replicas run on."""

    @property
    def handle(self) -> Callable[[Rendezvous, Member, Structure | None], Any]:
        """Makes what a collective call returns."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """Tells the time, in seconds."""
        ...

    @property
    def wakes_at_once(self) -> int:
        """How many `wake` may resume; more are for `wake_in_turns`."""
        ...

    def call_soon(self, fn: Callable[[], object], /) -> object:
        """Call ``fn`` in the loop, after what is ready now."""

    def call_plainly(self, fn: Callable[..., object], /, *args: Any) -> object:
        """Call ``fn`` in the loop, after what is ready now, with no replica's context variables."""

    def watched(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes the same handles, of which each await of an open collective stirs the run's watch."""
        ...

    def only_wait(self, root: SyncGroup, replicas: Collection[int], waiters: Sequence[Any], /) -> set[int]:
        """Return those replicas of a run of which it is certain that they do nothing but wait in collectives.

        Args:
            root: the run's own group.
            replicas: the ids of the replicas in question.
            waiters: all who wait in the collectives that these wait in.
        """
        ...

    def wake(self, waiters: Sequence[Any]) -> None:
        """Resume these, in this order, each after the one before it has run; None stands for nobody."""

    def wake_in_turns(self, waiters: list[Any]) -> None:
        """Resume these as `wake` does, of very many only some in each turn of the loop; the list loses them."""

    def wake_failed(self, waiters: Sequence[Any]) -> None:
        """Resume these with the error of their meeting, before they can be cancelled; None stands for nobody."""

    def alarm(self, at: float) -> None:
        """Call `ring` of the run's own group at that time of ``clock``."""

    def start_merge(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """Run the merge function of a meeting and hand the outcome to the group's `finish_merge`."""

    def carry_out(self, work: Work, done: Callable[[Any, BaseException | None], object]) -> None:
        """Let worker threads make a result; then call ``done``, in the loop, with it or with what went wrong."""

    def look(self, replicas: Collection[int], calls: Mapping[int, Location]) -> Look:
        """Look at the tasks of these replicas of the run: what they wait for, as far as it can be seen.

        Args:
            replicas: their ids.
            calls: for those of them whose child tasks may have made the call in question, where that was made.
        """
        ...

    def cancel(self) -> None:
        """Cancel every replica."""
