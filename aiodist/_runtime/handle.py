"""Handles: what a collective call returns, and what a replica awaits.

The await of a handle is the only place where a replica is suspended: on asyncio in a future, on trio in the task's own
suspension. Both keep the order: waiters are resumed in replica order. The last replica to arrive, whose call completed
the collective, also waits, to take its own place in that order.
"""

from __future__ import annotations

import sys
import warnings
from asyncio import CancelledError, Future
from collections.abc import Coroutine, Generator
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar, cast

from anyio import get_cancelled_exc_class
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from aiodist._arrays.nests import Build
from aiodist._core.call import Post
from aiodist._core.errors import CollectiveError, ReplicaContextError
from aiodist._core.ledger import Member, Path, RawPost, post_of
from aiodist._core.text import full_place
from aiodist._runtime.current import get_current
from aiodist._runtime.rendezvous import Extras, Rendezvous
from aiodist._runtime.requests import BARRIER, Request

T = TypeVar("T")


class Awaits:
    """Which of a replica's handles have been awaited, over all its groups: at its end, the others give a warning.

    A destructor of handles could do that, too, but would cost every collective a tenth of its time.
    """

    __slots__ = ("_earlier", "code", "frame", "future", "latest", "request")

    def __init__(self) -> None:
        self.code: CodeType | None = None  # of its last call, known to be the program's and not an event loop's
        self.frame: FrameType | None = None  # of its function, which has no callers; None if unknown
        self.request: Request = BARRIER  # of the last reduction, if any, which mostly tells what the next one is
        self.latest: CollectiveHandle[Any] | None = None  # issued last, until it is awaited
        self.future: Future[None] | None = None  # in which its task waits next on asyncio, see `AsyncioLoop`
        self._earlier: dict[tuple[int, int], RawPost] = {}  # those before the latest, by group and number

    def issued(self, handle: CollectiveHandle[Any]) -> None:
        """Note that a handle has been issued."""
        if self.latest is not None:
            self.keep(self.latest)
        self.latest = handle

    def keep(self, handle: CollectiveHandle[Any]) -> None:
        """Remember a handle that is not awaited before the next collective is issued."""
        slot, member = posted(handle)
        if len(self._earlier) < _MOST_KEPT and slot is not slot.group.joining:
            self._earlier[slot.group.serial, slot.number] = slot.raw_post_of(member.position)

    def note(self, handle: CollectiveHandle[Any]) -> bool:
        """Note that a handle is awaited; return whether this is the first time."""
        if self.latest is handle:
            self.latest = None
            return True
        slot, _ = posted(handle)
        return self._earlier.pop((slot.group.serial, slot.number), None) is not None

    def warn(self, replica_id: int) -> None:
        """Warn of the handles that have never been awaited."""
        if self.latest is not None:
            self.keep(self.latest)
            self.latest = None
        while self._earlier:
            _warn(replica_id, post_of(self._earlier.pop(next(iter(self._earlier)))))


def _warn(replica_id: int, post: Post) -> None:
    warnings.warn_explicit(
        f"replica {replica_id} never awaited {post.call}, called at {full_place(post.location)}; it has contributed, "
        "but its result is lost",
        RuntimeWarning,
        post.location.file,
        post.location.line,
        registry=_shown,
    )


_shown: dict[Any, Any] = {}
"""The warnings that have been shown: like Python's own, one in a loop is shown once."""

_MOST_KEPT = 4096


class CollectiveHandle(Coroutine[Any, Any, T]):
    """A collective that has been issued. Await it for the result.

    A handle may be awaited more than once, and from any task of its replica. One that is never awaited still
    contributes; a `RuntimeWarning` reports it when the replica ends. A handle can be passed to any function that runs
    or awaits a coroutine, such as `asyncio.create_task`.

    Raises (when awaited):
        CollectiveError: the replicas disagree, or the collective can never be complete.
        ReplicaContextError: another replica awaits the handle.
        Exception: what a merge function raised, or what went wrong while the result was computed.
    """

    # One is made for every call, so it has no constructor: `post` fills it in.
    __slots__ = ("__weakref__", "_build", "_me", "_slot", "_steps")

    _slot: Rendezvous
    _me: Any  # the `Participant` that issued it
    _build: Build | None  # puts the leaves of the result into containers like the value's; None for a single leaf
    _steps: Any  # the await, if a task was given the handle itself

    def done(self) -> bool:
        """Return whether the collective is complete, so that awaiting it does not wait for another replica."""
        return self._slot.complete

    def __repr__(self) -> str:
        state = "not complete" if not self._slot.complete else "complete" if self._slot.error is None else "failed"
        return f"<CollectiveHandle: {self._text()}, {state}>"

    def _text(self) -> str:
        slot, member = self._slot, self._me.member
        post = slot.post_of(member.position)
        number = "" if slot is slot.group.joining else f" #{slot.number}"
        return f"{post.call}{number} of replica {member.replica_id} at {full_place(post.location)}"

    def __await__(self) -> Generator[Any, Any, T]:
        raise NotImplementedError  # each event loop's handle has its own

    # As a coroutine, for a task that was given the handle itself.

    def _generator(self) -> Any:
        steps: Any = getattr(self, "_steps", None)
        if steps is None:
            steps = self._steps = self.__await__()
        return steps

    def send(self, value: Any, /) -> Any:
        """Continue the await; see `Generator.send`."""
        return self._step("send", value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the await; see `Generator.throw`."""
        return self._step("throw", *error)

    def _step(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._generator(), method)(*args)
        except BaseException:
            self._steps = None  # it may be awaited again
            raise

    def close(self) -> None:
        """End the await; see `Generator.close`."""
        self._generator().close()
        self._steps = None

    def _check_owner(self, here: Any) -> None:
        """Check that the replica that awaits the handle has issued it; any other would wait forever."""
        me = self._me
        if here is None or here.replica is None or here.replica is me.replica:
            return
        me.awaits.note(self)
        raise ReplicaContextError(
            f"replica {here.member.rank} awaits a handle that replica {me.member.replica_id} was given "
            f"by {self._slot.post_of(me.member.position).call}; each replica issues and awaits its own"
        )

    def _outcome(self) -> Any:
        """Return the result for this replica, or raise its error."""
        slot, me = self._slot, self._me
        if slot.error is None:
            return slot.read(me.member.position, self._build)
        me.run.raised_before(me.member)
        if isinstance(slot.error, CollectiveError):  # each replica raises a copy, which has its own traceback
            raise type(slot.error)(slot.error.report) from slot.error.__cause__
        raise slot.error.with_traceback(slot.traceback)


def _refuse(handle: CollectiveHandle[Any], *_: object, **__: object) -> NoReturn:
    raise TypeError(f"this is the handle of a collective, not its result; is `await` missing? {handle._text()}")  # noqa: SLF001


def posted(handle: CollectiveHandle[Any]) -> tuple[Rendezvous, Member]:
    """Return a handle's collective, and the replica that issued it."""
    return handle._slot, handle._me.member  # noqa: SLF001  (of this module's own class)


def post(
    self: CollectiveHandle[Any],
    me: Any,
    request: Request,
    code: Any,
    offset: int,
    path: Path,
    value: Any,
    build: Build | None,
    extras: Extras | None,
) -> CollectiveHandle[Any]:
    """Issue a replica's next collective through a new handle, and return the handle. Invalid arguments change nothing.

    ``code`` and ``offset`` are the call site, ``path`` its callers as far as they are compared. ``value`` is a leaf, or
    for a nest the list of its leaves, and ``build`` then builds such nests. Few calls have ``extras``.
    """
    run = me.run
    member = me.member
    group = member.group
    if request.checked_for != group.size:
        request.check(group.size)
    slot: Any = group.post(member, request.call, code, offset, path)
    position = member.position
    if slot.request is None:
        slot.request = request
        slot.started = run.clock()
        if run.has_options:
            run.begin(slot)
    if extras is not None:
        run.add(slot, position, extras)
    slot.values[position] = value
    self._slot = slot
    self._me = me
    self._build = build
    if run.thread:  # `Awaits.issued`, inlined; outside any run its record would never be reported
        awaits = me.awaits
        if awaits.latest is not None:
            awaits.keep(awaits.latest)
        awaits.latest = self
    if run.observer is not None:
        run.observer.posted(member, slot)
    if slot.matched and not run.closed:
        run.carry_out(slot, position)
    elif group.doomed is not None:
        run.reconsider(group, member)
    return self


def fill_in(self: CollectiveHandle[Any], me: Any, slot: Rendezvous) -> CollectiveHandle[Any]:
    """Fill in and return a new handle for a collective that a replica has posted."""
    self._slot, self._me, self._build = slot, me, None
    if me.run.thread:
        me.awaits.issued(self)
    return self


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
_OTHERS = "lt le gt ge neg pos abs invert bool int float complex index round len iter contains getitem setitem array"
for _name in (*_BINARY.split(), *(f"r{name}" for name in _BINARY.split()), *_OTHERS.split()):
    setattr(CollectiveHandle, f"__{_name}__", _refuse)


class AsyncioHandle(CollectiveHandle[T]):
    """A handle for replicas that run on asyncio or uvloop."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T]:  # noqa: C901, PLR0912, PLR0915  (every collective takes this path: one frame)
        slot = self._slot
        me = self._me
        here = get_current()
        if here is not me:
            self._check_owner(here)
        awaits = me.awaits
        if awaits.latest is self:
            awaits.latest = None
        else:
            awaits.note(self)
        if slot.released:
            if slot.error is not None and me.run.raised_before(me.member):
                yield  # a replica that has raised the error must be cancellable when it awaits again
        else:
            run = me.run
            member = me.member
            if run.closed and not (slot.complete or slot.under_way):
                yield  # it will never be complete, but a cancellation may be on its way
                if not slot.complete:
                    run.fail_slot(slot)
            future = awaits.future
            if future is None:  # the first await, or another task of the replica waits in it
                future = Future(loop=run.loop.loop)
            else:
                awaits.future = None
            waiters, position = slot.waiters, member.position
            try:
                if waiters[position] is None:
                    waiters[position] = future
                else:
                    waiters.append(future)
                if run.has_groups or member.group.doomed is not None:
                    run.blocked(member)
                if not slot.released:  # `blocked` may have ended the run
                    future._asyncio_future_blocking = True  # noqa: SLF001  (what a future's own iterator does)
                    yield future
            except CancelledError:
                if slot.under_way:
                    yield from run.threads.settle().__await__()
                slot.remove_waiter(position, future)
                run.abandon(member, slot)
                raise
            finally:
                if waiters[position] is future:
                    waiters[position] = None
                else:
                    slot.remove_waiter(position, future)
            if slot.error is None and run.loop.run_next is None:
                awaits.future = future
        if slot.plain:
            build = self._build
            result: T = slot.result if build is None else build(slot.result)
            return result
        return cast("T", self._outcome())

    def send(self, value: Any, /) -> Any:
        """Continue the await."""
        if self.cr_suspended and self.cr_await is None and not (self._slot.released or self._me.run.closed):
            raise RuntimeError(f"two tasks were given the same handle; let each of them await it: {self._text()}")
        return super().send(value)

    # anyio, for one, reads these before it cancels a task.

    cr_frame = property(lambda self: self._generator().gi_frame)
    cr_code = property(lambda self: self._generator().gi_code)
    cr_running = property(lambda self: self._generator().gi_running)
    cr_suspended = property(lambda self: self._generator().gi_suspended)
    cr_await = property(lambda self: self._generator().gi_yieldfrom)


class TrioHandle(CollectiveHandle[T]):
    """A handle for replicas that run on trio."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, T]:
        self._check_owner(get_current())
        return self._wait(self._me.awaits.note(self)).__await__()

    async def _wait(self, first: bool) -> T:
        slot, run, member = self._slot, self._me.run, self._me.member
        chain = run.loop.chain
        if run.closed and not slot.released and not slot.under_way:
            await checkpoint()
            if not slot.complete:
                run.fail_slot(slot)
        if not slot.released:
            parked = chain.new_parked()
            slot.add_waiter(member.position, parked)
            if slot.last == member.position:
                run.release(slot)
            if run.has_groups or member.group.doomed is not None:
                run.blocked(member)
            try:
                await chain.park(parked)
            except get_cancelled_exc_class():
                if slot.under_way:
                    await run.threads.settle()
                slot.remove_waiter(member.position, parked)
                run.abandon(member, slot)
                raise
        elif self._gives_way(first):
            parked = chain.new_parked()
            chain.extend([parked])
            await chain.park(parked)
        elif slot.error is None:
            await checkpoint_if_cancelled()
        return cast("T", self._outcome())

    def _gives_way(self, first: bool) -> bool:
        """Return whether to yield once although the collective is complete.

        The last replica to arrive yields at its first await, to take its place in the order. A replica that has raised
        the run's error and awaits again yields, too, so that it can be cancelled.
        """
        if self._slot.error is not None:
            return bool(self._me.run.raised_before(self._me.member))
        return first and self._slot.last == self._me.member.position


class SoloHandle(CollectiveHandle[T]):
    """A handle outside any run: it never waits, and reports by itself that it was not awaited."""

    __slots__ = ("_awaited",)

    def __del__(self) -> None:
        if hasattr(self, "_slot") and not (hasattr(self, "_awaited") or sys.is_finalizing()):
            self._slot.group.open.pop(self._slot.number, None)  # a merge_call, whose function only the await runs
            _warn(self._me.member.replica_id, self._slot.post_of(self._me.member.position))

    def __await__(self) -> Generator[Any, Any, T]:
        self._awaited = True
        return self._wait().__await__()

    async def _wait(self) -> T:
        if self._slot.complete:
            await checkpoint()
        else:
            await self._me.run.loop.merge(self._slot)
        return cast("T", self._outcome())
