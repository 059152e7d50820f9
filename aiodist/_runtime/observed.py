"""Races between tasks of one replica: nothing determines which of them issues first, so it may differ by replica.

The order of a replica's collectives is the order of its calls. Two tasks that both issue collectives of one group, with
nothing that makes one come first, may do so in another order on another replica. They may happen to agree, so this is a
warning, not an error. It is checked only in runs that a tool observes (``aiodist check``, a trace, a test), because
finding out at every collective which task runs would cost other runs too much.

A **creation clock** detects them. A task knows the collectives that its creator knew of when it made the task (it
begins with a copy of the creator's context variables) and those that it issues itself. A task that is done passes its
number on. A task races with another if it issues a collective right after one that it does not know of, issued by a
task that is not done. Tasks that order themselves by an event or a queue are reported, too: the clock cannot see that.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from aiodist._core.call import Post
from aiodist._core.instrument import Observer, together
from aiodist._core.ledger import Member, RawPost, Slot, post_of
from aiodist._core.terms import Location
from aiodist._core.text import place
from aiodist._runtime.handle import CollectiveHandle
from aiodist._runtime.suspension import current_task, task_text

_known: ContextVar[Mapping[int, int]] = ContextVar("aiodist_known_collectives", default=MappingProxyType({}))


class _Issued(NamedTuple):
    """The last collective of a replica: its number, the task that issued it, the request, and its call site."""

    number: int
    task: Any
    raw: RawPost

    @property
    def post(self) -> Post:
        """The post, with places."""
        return post_of(self.raw)

    @property
    def where(self) -> Location:
        """The place of the call."""
        return self.post.location


class RaceWatch(Observer):
    """Warns of tasks of one replica that race with each other for the next collective of a group."""

    def __init__(self, run: Any) -> None:
        self._run = run  # the scheduler's, which stands above this module
        self._last: WeakKeyDictionary[Member, _Issued] = WeakKeyDictionary()
        self._warned: set[tuple[Location, Location]] = set()

    def posted(self, member: Member, slot: Slot) -> None:
        """Check whether the task that issues this knows of the collective before it."""
        number, task = slot.number, current_task()
        if number < 0 or task is None:
            return
        issued = _Issued(number, task, slot.raw_post_of(member.position))
        last = self._last.get(member)
        self._last[member] = issued
        known = _known.get()
        other = last if last is not None and last.task is not task and not _is_done(last.task) else None
        if other is not None and known.get(id(member), -1) < other.number:
            self._tell(member, other, issued)
        _known.set({**known, id(member): number})

    def _tell(self, member: Member, one: _Issued, other: _Issued) -> None:
        first, second = sorted((one, other), key=lambda issued: issued.where)
        if (first.where, second.where) not in self._warned:
            self._warned.add((first.where, second.where))
            # Not here, in the midst of an arrival: a warning may be an error, and a task that runs shows no frames.
            self._run.loop.call_without_context(_warn, member.replica_id, first, second)


def _warn(replica_id: int, first: _Issued, second: _Issued) -> None:
    warnings.warn_explicit(
        f"tasks of replica {replica_id} race for the next collective: {_text(first)}, {_text(second)}; the order on "
        "other replicas may differ: await them one after the other, or give each a group",
        RuntimeWarning,
        second.where.file,
        second.where.line,
    )


def _text(issued: _Issued) -> str:
    return f"{task_text(issued.task)} issued {issued.post.call} at {place(issued.where)}"


def _is_done(task: Any) -> bool:
    if isinstance(task, asyncio.Future):
        return task.done()
    return task.parent_nursery is None or task not in task.parent_nursery.child_tasks


# Handles that notify an observer of their awaits.


class _Observed(CollectiveHandle[Any]):
    """A handle that notifies an observer of its awaits."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, Any]:
        observer, member, slot = self._me.run.observer, self._me.member, self._slot
        observer.waits(member, slot)
        try:
            return (yield from super().__await__())
        finally:
            observer.resumed(member, slot)


@cache
def _observed(handle: type[CollectiveHandle[Any]]) -> type[CollectiveHandle[Any]]:
    """Return handles like these that notify an observer of their awaits."""
    return type(f"Observed{handle.__name__}", (_Observed, handle), {"__slots__": ()})


def observe(run: Any, observer: Observer) -> None:
    """Let an observer see a run, and warn of racing tasks in it, unless the observer needs only runs."""
    if observer.of_runs_alone:
        run.observe(observer, run.loop.handle)
        return
    run.observe(together(RaceWatch(run), observer), _observed(run.loop.handle))
