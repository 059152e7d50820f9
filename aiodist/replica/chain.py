"""The chain: how tasks on trio are resumed in an order.

trio runs the tasks of a batch in an order that it draws by chance, so tasks that must follow each other must not be in
one batch. Here only the first is rescheduled; each, when it runs, reschedules the next before it goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio


class Parked:
    """A task that waits for its turn.

    Attributes:
        task: the task.
        gone: it was cancelled, and waits no more.
        linked: its turn has come, so it must wake the next.
        suspended: it waits; until then, it cannot be rescheduled.
        woken: it was to be resumed at once, before it waited.
    """

    __slots__ = ("gone", "linked", "suspended", "task", "woken")

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task = task
        self.gone = False
        self.linked = False
        self.suspended = False
        self.woken = False


class Chain:
    """Tasks to be resumed one after the other."""

    def __init__(self) -> None:
        from trio import lowlevel

        self._lowlevel = lowlevel
        self._parked: deque[Parked] = deque()
        self._linked = False

    def new_parked(self) -> Parked:
        """Return the current task's place, which it takes by `park`."""
        return Parked(self._lowlevel.current_task())

    def extend(self, parked: Iterable[Parked]) -> None:
        """Resume these, in this order, after those that were to be resumed before."""
        self._parked.extend(parked)
        if not self._linked:
            self._wake_next()

    def wake_now(self, parked: Iterable[Parked]) -> None:
        """Resume these at once, in any order."""
        for one in parked:
            if not one.suspended:
                one.woken = True
            elif not one.gone:
                self._lowlevel.reschedule(one.task)

    async def park(self, parked: Parked) -> None:
        """Suspend the current task until its turn comes. Where that has come already, it only gives way."""
        if parked.woken:
            return
        if parked.linked:
            try:
                await self._lowlevel.checkpoint()
            finally:
                self._wake_next()
            return
        succeeded: trio.lowlevel.Abort = self._lowlevel.Abort.SUCCEEDED

        def abort(_: object) -> trio.lowlevel.Abort:
            parked.gone = True
            return succeeded

        parked.suspended = True
        await self._lowlevel.wait_task_rescheduled(abort)
        linked: bool = parked.linked  # which the chain may have changed meanwhile
        if linked:
            self._wake_next()

    def _wake_next(self) -> None:
        self._linked = False
        while self._parked:
            one = self._parked.popleft()
            if not one.gone:
                self._linked = one.linked = True
                if one.suspended:
                    self._lowlevel.reschedule(one.task)
                return
