"""Participants: a replica in one of its groups, as the runtime sees it.

Users see a `ReplicaContext`, which is a separate class so that it has only their names.
"""

from __future__ import annotations

import threading
from threading import get_ident
from types import FrameType
from typing import Any, Final
from weakref import WeakSet, ref

from aiodist._arrays.nests import Build
from aiodist._arrays.options import CommunicationOptions
from aiodist._core.errors import ReplicaContextError
from aiodist._core.ledger import Member, Replica
from aiodist._runtime.current import CrossReplica, get_current
from aiodist._runtime.handle import Awaits, CollectiveHandle, post
from aiodist._runtime.rendezvous import Extras, OutBuffers
from aiodist._runtime.requests import Request
from aiodist._runtime.stacks import program_frame

_RETIRED: Final = -1
ANY_THREAD: Final = 0
NO_RUN: Final = -2


class Participant:
    """A replica in one of its groups."""

    __slots__ = ("__weakref__", "awaits", "branches", "context", "member", "of_run", "replica", "run", "thread")

    def __init__(self, run: Any, member: Member, of_run: Participant | None = None) -> None:
        self.run: Any = run  # a `Run` of the scheduler, which is above this module
        self.member: Member = member
        self.of_run: Participant | None = of_run  # the same replica in the run's own group; None if this is it
        self.thread: int = run.thread  # in which it issues collectives
        self.replica: Replica = member.replica
        self.awaits: Awaits = Awaits() if of_run is None else of_run.awaits
        self.branches: WeakSet[Participant] | None = None  # the same replica in the groups that it has made
        self.context: ref[Any] | None = None  # its `ReplicaContext`, as long as somebody holds that

    @property
    def strategy(self) -> Any:
        """The strategy that the replica belongs to."""
        return self.run.strategy

    def branch(self, member: Member) -> Participant:
        """Return the same replica in a group that it has made."""
        of_run = self.of_run or self
        made = Participant(self.run, member, of_run)
        of_run.branches = of_run.branches if of_run.branches is not None else WeakSet()
        of_run.branches.add(made)
        return made

    def retire(self) -> None:
        """Make every later collective raise, because the replica's function has ended."""
        self.thread = _RETIRED
        self.awaits.frame = None
        for branch in self.branches or ():
            branch.thread = _RETIRED

    def issue(
        self,
        frame: FrameType,
        request: Request,
        leaves: Any,
        build: Build | None = None,
        *,
        options: CommunicationOptions | None = None,
        out: OutBuffers | None = None,
    ) -> CollectiveHandle[Any]:
        """Issue a collective for a call in a frame."""
        frame, run = self.caller(frame, request.call.name), self.run
        path, extras = run.callers(frame), Extras(options, out)
        return post(run.handle(), self, request, frame.f_code, frame.f_lasti, path, leaves, build, extras)

    def contribute(self, frame: FrameType, request: Request, value: Any) -> None:
        """Issue a collective that need not be awaited."""
        self.awaits.note(self.issue(frame, request, value))

    def caller(self, frame: FrameType, name: str | None) -> FrameType:
        """Return the program's frame that a call comes from, perhaps through functions of an event loop."""
        found = program_frame(frame) or self.run.called_from  # as in `strategy.run(variable.assign, ...)`
        if found is None:
            if name is None:
                raise ValueError(
                    "an event loop itself has called this collective, so there is no line of the program to compare it "
                    "by; call it in a coroutine, or give it a name: ctx.barrier(name='...')"
                )
            return frame
        if found is frame:
            self.awaits.code = frame.f_code
        return found

    def check(self, what: str) -> None:
        """Check that the replica may issue collectives in this group, here and now."""
        thread, here = self.thread, get_current()
        through = f"{what} was called through the context of {self.label()}"
        if thread == _RETIRED:
            raise ReplicaContextError(
                f"{through}, whose function has ended; a replica's collectives are issued, and its child tasks end, "
                "before its function returns"
            )
        if thread == NO_RUN:
            raise ReplicaContextError(
                f"{what} was called through a context of {self.label()} that was made by hand; the other replicas are "
                "not running: use `await strategy.run(fn)` and, in fn, `get_replica_context()`"
            )
        if thread != ANY_THREAD and thread != get_ident():
            raise ReplicaContextError(
                f"{what} of {self.label()} was called in the thread {threading.current_thread().name!r}; "
                "collectives are issued in the event loop's thread: return the value from run_sync and pass it there"
            )
        if here is self or (here is None and thread == ANY_THREAD):
            return
        if isinstance(here, CrossReplica):
            raise ReplicaContextError(
                f"{what} of {self.label()} was called in cross-replica context (under strategy.scope() or in a merge "
                "function); there, combine per-replica values with `await strategy.reduce(op, value, axis)` or gather"
            )
        if here is None:
            raise ReplicaContextError(
                f"{through} outside that replica; collectives are issued inside the function that strategy.run runs"
            )
        if here.replica is not self.replica:  # otherwise it is the same replica in another group
            raise ReplicaContextError(
                f"{through} inside {here.label()}; each replica uses its own: ctx = aiodist.get_replica_context()"
            )

    def label(self) -> str:
        """Return the replica as errors name it, e.g. ``replica 0 of 2``."""
        return f"replica {self.member.replica_id} of {self.member.group.ledger.root.size}"
