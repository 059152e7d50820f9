"""Handles: what a collective call returns, and what a replica awaits.

The await of a handle is the only place where a replica is suspended: on asyncio in a `Seat`, on trio in the task's own
suspension. Both keep the order: waiters are resumed in replica order. The last replica to arrive, whose call completed
the collective, waits, too, so that it takes its own place in that order.
"""

from __future__ import annotations

import sys
import warnings
from asyncio import CancelledError, Future
from collections.abc import Callable, Generator
from contextvars import Context
from typing import Any, Generic, Protocol, TypeVar, cast

from anyio import get_cancelled_exc_class
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiodist._arrays.nests import Structure
from aiodist._core.errors import CollectiveError, ReplicaContextError
from aiodist._core.ledger import Member
from aiodist._runtime.current import current
from aiodist._runtime.rendezvous import Rendezvous

T = TypeVar("T")


class Owner(Protocol):
    """The run that a handle belongs to, as far as the handle needs it."""

    closed: bool
    has_groups: bool
    loop: Any
    threads: Any
    observer: Any

    def blocked(self, member: Member, slot: Rendezvous) -> None:
        """Note that a replica waits in a collective that is not complete."""

    def abandon(self, member: Member, slot: Rendezvous) -> None:
        """Note that a replica was cancelled out of it."""

    def release(self, slot: Rendezvous) -> None:
        """Wake those who wait in a complete collective."""

    def fail_slot(self, slot: Rendezvous, error: BaseException | None = None) -> None:
        """Complete a collective of a run that has failed."""

    def was_told(self, member: Member) -> bool:
        """Return whether the error that ended the run has been raised in a replica; from now on it has."""
        ...


class CollectiveHandle(Generic[T]):
    """A collective that has been issued. Await it for the result.

    A handle may be awaited more than once, and from any task of its replica. One that is dropped without being awaited
    has contributed all the same, and gives a `RuntimeWarning`.

    Raises (when awaited):
        CollectiveError: the replicas disagree, or the collective can never be complete.
        ReplicaContextError: another replica awaits the handle.
        Exception: what a merge function raised, or what went wrong while the result was computed.
    """

    __slots__ = ("__weakref__", "_awaited", "_member", "_run", "_slot", "_structure")

    def __init__(self, run: Owner, slot: Rendezvous, member: Member, structure: Structure | None) -> None:
        self._run = run
        self._slot = slot
        self._member = member
        self._structure = structure  # this replica's own: a dict's keys may be in another order than the others'
        self._awaited = False

    def done(self) -> bool:
        """Return whether the collective is complete, so that awaiting it does not wait for another replica."""
        return self._slot.complete

    @property
    def slot(self) -> Rendezvous:
        """The collective."""
        return self._slot

    @property
    def observer(self) -> Any:
        """The run's observer; None without one."""
        return self._run.observer

    @property
    def member(self) -> Member:
        """The replica that issued it."""
        return self._member

    def detach(self) -> None:
        """Let nobody be warned that it was never awaited: nobody has to."""
        self._awaited = True

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError  # each event loop's handle has its own

    def _check_owner(self) -> None:
        """Check that the replica that awaits the handle issued it; any other would wait for ever.

        Raises:
            ReplicaContextError: another replica awaits it.
        """
        here = current.get()
        if here is None or here.replica is None or here.replica is self._member.replica:
            return
        self._awaited = True
        raise ReplicaContextError(
            f"replica {here.replica_id_in_sync_group} awaits a handle that replica {self._member.replica_id} was given "
            f"by {self._slot.post_of(self._member.position).call}; each replica issues and awaits its own"
        )

    def _outcome(self) -> Any:
        """Return the result for this replica, or raise its error."""
        error = self._slot.error
        if error is None:
            return self._slot.read(self._member.position, self._structure)
        self._run.was_told(self._member)
        if isinstance(error, CollectiveError):
            raise type(error)(error.report) from error.__cause__  # each replica has its own, for its traceback
        raise error.with_traceback(self._slot.traceback)

    def __del__(self) -> None:
        try:
            warns = not (self._awaited or self._run.closed or sys.is_finalizing())
        except AttributeError:  # a Ctrl-C has come before it was whole
            return
        if warns:
            self._warn()

    def _warn(self) -> None:
        if self._run.loop.ending:  # cancelled replicas await nothing more
            return
        post = self._slot.post_of(self._member.position)
        warnings.warn_explicit(
            f"replica {self._member.replica_id} never awaited {post.call}, called at {post.location}; it has "
            "contributed, its result is lost",
            RuntimeWarning,
            post.location.file,
            post.location.line,
            source=self,
        )


class Seat(Future[None]):
    """Where a task waits on asyncio, kept for its next await: making a future for each costs as much as the wait.

    A task that awaits a future leaves its wake-up there as a callback, which the future hands to the event loop when it
    is done. This one keeps it, and the loop's `wake` calls those of all replicas in one callback of the event loop. It
    has to be a future, for anyio cancels a task at once whose future is not done, and waits with one whose future is.

    Attributes:
        slot: the `Rendezvous` that the task waits in; None while nobody sits here.
        wake: the task's wake-up, which takes a future that is done.
        context: the task's context variables.
    """

    __slots__ = ("_wakes", "context", "slot", "wake")

    slot: Any
    wake: Callable[[Future[None]], object]
    context: Context

    def __init__(self, loop: Any) -> None:
        super().__init__(loop=loop.loop)
        self._wakes: Callable[[Rendezvous], object] = loop.wake
        self.slot = None

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Context | None = None) -> None:
        """Keep the wake-up of the task that waits here."""
        assert context is not None
        self.wake, self.context = fn, context

    def done(self) -> bool:
        """Return whether the task is about to be woken."""
        slot = self.slot
        return slot is None or slot is _CANCELLED or slot.complete

    def cancel(self, msg: Any | None = None) -> bool:
        """Wake the task by a cancellation, unless it is about to be woken: then the task sees to it by itself."""
        slot = self.slot
        if slot is None or slot is _CANCELLED:
            return False
        if slot.complete:
            self._wakes(slot)  # again: a Ctrl-C may have met the first call
            return False
        self.slot = _CANCELLED
        outcome: Future[None] = Future(loop=self.get_loop())
        outcome.cancel(msg)
        self.get_loop().call_soon(self.wake, outcome, context=self.context)
        return True


_CANCELLED = object()
"""The slot of a seat from the cancellation of its task to where the task leaves it."""


class AsyncioHandle(CollectiveHandle[T]):
    """A handle for replicas that run on asyncio or uvloop."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T]:  # noqa: C901, PLR0912  (the way of every collective, in one frame)
        here = current.get()
        slot, member = self._slot, self._member
        if here is not None and here.replica is not member.replica:
            self._check_owner()
        self._awaited = True
        if slot.released:
            if slot.error is not None and self._run.was_told(member):
                yield  # one who has been told of the error must be cancellable
        else:
            run = self._run
            if run.closed and not (slot.complete or slot.under_way):
                yield  # nobody will come; but the cancellation may be on its way
                if not slot.complete:
                    run.fail_slot(slot)
            seat = None if here is None else here.seat
            if seat is None or seat.slot is not None:
                seat = Seat(run.loop)
                if here is not None and here.replica is not None and here.seat is None:
                    here.seat = seat
            try:
                seat.slot = slot
                if slot.waiters[member.position] is None:
                    slot.waiters[member.position] = seat
                else:
                    slot.waiters.append(seat)
                if run.has_groups or member.group.doomed is not None:
                    run.blocked(member, slot)
                if not slot.released:  # the group may just have ended by that
                    seat._asyncio_future_blocking = True  # noqa: SLF001  (what a future's own iterator does)
                    yield seat
            except CancelledError:
                if slot.under_way:
                    yield from run.threads.settle().__await__()
                slot.remove_waiter(member.position, seat)
                run.abandon(member, slot)
                raise
            finally:
                seat.slot = None
        if slot.plain:
            result: T = slot.result
            return result
        return cast("T", self._outcome())


class TrioHandle(CollectiveHandle[T]):
    """A handle for replicas that run on trio."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T]:
        self._check_owner()
        awaited, self._awaited = self._awaited, True
        return self._wait(awaited).__await__()

    async def _wait(self, awaited: bool) -> T:
        slot, run = self._slot, self._run
        chain = run.loop.chain
        if run.closed and not slot.released and not slot.under_way:
            await checkpoint()
            if not slot.complete:
                run.fail_slot(slot)
        if not slot.released:
            parked = chain.new_parked()
            slot.add_waiter(self._member.position, parked)
            if slot.last == self._member.position:
                run.release(slot)
            if run.has_groups or self._member.group.doomed is not None:
                run.blocked(self._member, slot)
            try:
                await chain.park(parked)
            except get_cancelled_exc_class():
                if slot.under_way:
                    await run.threads.settle()
                slot.remove_waiter(self._member.position, parked)
                run.abandon(self._member, slot)
                raise
        elif self._gives_way(awaited):
            parked = chain.new_parked()
            chain.extend([parked])
            await chain.park(parked)
        elif slot.error is None:
            await checkpoint_if_cancelled()
        return cast("T", self._outcome())

    def _gives_way(self, awaited: bool) -> bool:
        """Return whether to yield once although there is nothing to wait for.

        The last replica to arrive yields at its first await, to take its place in the order. A replica that has been
        given the run's error and awaits again yields, too, so that it can be cancelled.

        Args:
            awaited: whether the handle was awaited before.
        """
        if self._slot.error is not None:
            return self._run.was_told(self._member)
        return not awaited and self._slot.last == self._member.position


class SoloHandle(CollectiveHandle[T]):
    """A handle outside any run: there is nobody else to wait for."""

    __slots__ = ()

    def _warn(self) -> None:
        self._member.group.open.pop(self._slot.number, None)  # a merge_call, whose function only the await runs
        super()._warn()

    def __await__(self) -> Generator[Any, Any, T]:
        self._awaited = True
        return self._wait().__await__()

    async def _wait(self) -> T:
        if self._slot.complete:
            await checkpoint()
        else:
            await self._run.loop.merge(self._slot)
        return cast("T", self._outcome())
