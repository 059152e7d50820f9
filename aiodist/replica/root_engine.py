"""The engine of lane 0: what a sync group asks of an event loop, where no replica runs and a caller's task drives."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from aiodist._collectives.work import Work
from aiodist._core.report import Location
from aiodist._runtime.waits import Look
from aiodist.collective.group import SyncGroup
from aiodist.collective.member import Member
from aiodist.collective.rendezvous import Rendezvous


class RootEngine:
    """The engine of the group of lane 0, whose meetings are driven by the task that asks for them."""

    wakes_at_once = 1
    clock = fine_clock = staticmethod(time.monotonic)

    def handle(self, meeting: Rendezvous, member: Member, structure: Any) -> Rendezvous:  # noqa: ARG002
        """Return the meeting itself."""
        return meeting

    def call_soon(self, fn: Callable[[], object], /) -> None:
        """Call it now."""
        fn()

    def wake(self, waiters: Sequence[Any]) -> None:
        """Nobody waits but the task that drives."""

    wake_in_turns = wake_failed = wake

    def alarm(self, at: float) -> None:
        """The task that drives has a clock of its own."""

    def carry_out(self, work: Work, done: Callable[[Any, BaseException | None], object]) -> None:
        """Never called: results are made of what all workers bring."""

    def call_plainly(self, fn: Callable[..., object], /, *args: Any) -> None:
        """Call it now."""
        fn(*args)

    def watched(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same: there are no groups of some replicas here."""
        return handle

    def only_wait(self, root: SyncGroup, replicas: Collection[int], waiters: Sequence[Any]) -> set[int]:  # noqa: ARG002
        """Return none, as of none it is known."""
        return set()

    def look(self, replicas: Collection[int], calls: Mapping[int, Location]) -> Look:  # noqa: ARG002
        """Return nothing: replicas do not run here."""
        return Look()

    def start_merge(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """Never called: there are no merge functions here."""

    def cancel(self) -> None:
        """There is nobody to cancel."""
