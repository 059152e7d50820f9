"""Handles: what a collective call returns, and where a replica really waits.

A replica is suspended in one place only, the await of a handle. On asyncio that is a future; on trio it is the task's
own suspension. Both keep the order: those who wait are resumed in replica order, and the last arrival, whose call
completed the meeting, gives way once so that it takes its own place in that order.
"""

from __future__ import annotations

import sys
import warnings
from asyncio import CancelledError, Future
from collections.abc import Generator
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from anyio import get_cancelled_exc_class
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiodist._arrays.nests import Structure
from aiodist._core.errors import CollectiveError
from aiodist.collective.callsite import location
from aiodist.collective.describe import call_text
from aiodist.replica.chain import Chain

if TYPE_CHECKING:
    from aiodist.collective.member import Member
    from aiodist.collective.rendezvous import Rendezvous

T = TypeVar("T")


class CollectiveHandle(Generic[T]):
    """A collective that has been issued. Await it for the result.

    It may be awaited more than once, and from any task of its replica. One that is dropped without being awaited has
    contributed all the same, and gives a `RuntimeWarning`.

    Raises (when awaited):
        CollectiveError: the replicas did not meet in it.
    """

    __slots__ = ("__weakref__", "_awaited", "_meeting", "_member", "_structure")

    def __init__(self, meeting: Rendezvous, member: Member, structure: Structure | None) -> None:
        self._meeting = meeting
        self._member = member
        self._structure = structure  # this replica's own: a dict's keys may be in another order than the others'
        self._awaited = False

    def done(self) -> bool:
        """Return whether the collective is complete, so that an await would not wait for another replica."""
        return self._meeting.complete

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError  # each event loop's handle has its own

    def _outcome(self) -> Any:
        """Return the result for this replica, or raise what went wrong."""
        error = self._meeting.error
        if error is None:
            return self._meeting.read(self._member.position, self._structure)
        self._member.told = True
        if isinstance(error, CollectiveError):
            raise type(error)(error.report)  # one of its own for each replica, which gets its own traceback
        raise error.with_traceback(self._meeting.traceback)

    def _gives_way(self, awaited: bool) -> bool:
        """Whether to give way once although there is nothing to wait for.

        The last arrival does, at its first await, to take its place in the order. So does a replica that has been told
        of the error that ended the group, and asks again: it must be possible to cancel it.

        Args:
            awaited: this is not the handle's first await.
        """
        if self._meeting.error is not None:
            return self._member.told
        return not awaited and self._meeting.last == self._member.position

    def __del__(self) -> None:
        if not (self._awaited or self._member.group.closed or sys.is_finalizing()):
            self._warn()

    def _warn(self) -> None:
        if not self._meeting.complete:
            self._member.group.keep()
        if self._member.group.engine.ending:  # who is cancelled awaits no more
            return
        signature, code, offset = self._meeting.call_of(self._member.replica_id)
        warnings.warn_explicit(
            f"replica {self._member.replica_id} never awaited {call_text(signature)}, called at "
            f"{location(code, offset)}; it has contributed, its result is lost",
            RuntimeWarning,
            code.co_filename,
            location(code, offset).line,
            source=self,
        )


class AsyncioHandle(CollectiveHandle[T]):
    """A handle for replicas that run on asyncio or uvloop."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T]:
        awaited, self._awaited = self._awaited, True
        meeting, member = self._meeting, self._member
        if meeting.released:
            # `_gives_way`, written out: this is the last arrival's path in every meeting
            if member.told if meeting.error is not None else meeting.last == member.position and not awaited:
                yield
        else:
            future: Future[None] = Future(loop=member.group.engine.loop)
            if meeting.waiters[member.position] is None:
                meeting.waiters[member.position] = future
            else:
                meeting.waiters.append(future)
            if member.group.trouble is not None:
                member.group.consider(member)
            try:
                yield from future
            except CancelledError:
                if meeting.under_way:
                    yield from member.group.engine.reducers.settle().__await__()
                member.group.abandon(member, meeting)
                raise
        if meeting.plain:
            result: T = meeting.result
            return result
        if meeting.shared_nest:
            result = self._structure.unflatten(meeting.result)  # type: ignore[union-attr,assignment]
            return result
        return cast("T", self._outcome())


class TrioHandle(CollectiveHandle[T]):
    """A handle for replicas that run on trio."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T]:
        awaited, self._awaited = self._awaited, True
        return self._wait(awaited).__await__()

    async def _wait(self, awaited: bool) -> T:
        meeting, group = self._meeting, self._member.group
        chain: Chain = group.engine.chain
        if not meeting.released:
            parked = chain.new_parked()
            meeting.add_waiter(self._member.position, parked)
            if meeting.last == self._member.position:
                group.release(meeting)
            if group.trouble is not None:
                group.consider(self._member)
            try:
                await chain.park(parked)
            except get_cancelled_exc_class():
                if meeting.under_way:
                    await group.engine.reducers.settle()
                group.abandon(self._member, meeting)
                raise
        elif self._gives_way(awaited):
            parked = chain.new_parked()
            chain.extend([parked])
            await chain.park(parked)
        elif meeting.error is None:
            await checkpoint_if_cancelled()
        return cast("T", self._outcome())


class _Observed(CollectiveHandle[T]):
    """A handle whose awaits an observer is told of. The task that makes it issues the collective."""

    __slots__ = ()

    def __init__(self, meeting: Rendezvous, member: Member, structure: Structure | None) -> None:
        super().__init__(meeting, member, structure)
        member.group.engine.races.issued(member, meeting)

    def __await__(self) -> Generator[Any, Any, T]:
        observer = self._member.group.observer
        assert observer is not None
        observer.waits(self._member, self._meeting)
        try:
            return (yield from super().__await__())
        finally:
            observer.resumed(self._member, self._meeting)


class ObservedAsyncioHandle(_Observed[T], AsyncioHandle[T]):
    """A handle on asyncio or uvloop, in a run that is observed."""

    __slots__ = ()


class ObservedTrioHandle(_Observed[T], TrioHandle[T]):
    """A handle on trio, in a run that is observed."""

    __slots__ = ()


class _Watched(CollectiveHandle[T]):
    """A handle in a run with groups, which looks for replicas that wait for each other."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T]:
        branches = self._member.group.root.branches
        if branches is not None and not self._meeting.complete:
            branches.watch.stir(self._meeting)
        return super().__await__()


@cache
def watched(handle: type[CollectiveHandle[Any]]) -> type[CollectiveHandle[Any]]:
    """Return handles like these, of which each await stirs the run's watch."""
    return type(f"Watched{handle.__name__}", (_Watched, handle), {"__slots__": ()})


class SoloHandle(CollectiveHandle[T]):
    """A handle outside any run: there is nobody else to wait for."""

    __slots__ = ()

    def _warn(self) -> None:
        self._member.group.open.pop(self._meeting.number, None)  # a merge_call, whose function only the await runs
        super()._warn()

    def __await__(self) -> Generator[Any, Any, T]:
        self._awaited = True
        return self._wait().__await__()

    async def _wait(self) -> T:
        if self._meeting.complete:
            await checkpoint()
        else:
            await self._member.group.engine.merge(self._member.group, self._meeting)
        return cast("T", self._outcome())
