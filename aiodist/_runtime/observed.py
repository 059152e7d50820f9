"""Runs that a tool observes: handles that notify it of awaits, and the warning about tasks that race.

The order of a replica's collectives is the order of its calls. If two tasks of a replica both issue collectives of one
group, and nothing determines which comes first, their order may differ from replica to replica. They may happen to
agree, so this is a warning, not an error. It is checked only in observed runs (``aiodist check``, a trace, a test),
because looking up the running task at every collective would cost other runs too much.

A **creation clock** detects races. A task knows the collectives that its creator knew of when it made the task (it
begins with a copy of the creator's context variables) and those that it issues itself. A task races with another if it
issues a collective right after one that it does not know of, issued by a task that is not done. Tasks that order
themselves by an event or a queue are reported, too: the clock cannot see that.
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
    """The last collective of a replica in a group."""

    number: int
    task: Any
    raw: RawPost


class RaceWatch(Observer):
    """Warns of tasks of one replica that race with each other for the next collective of a group."""

    def __init__(self, run: Any) -> None:
        self._run = run  # a `Run` of the scheduler, which is above this module
        self._last: WeakKeyDictionary[Member, _Issued] = WeakKeyDictionary()
        self._warned: set[tuple[Location, Location]] = set()

    def posted(self, member: Member, slot: Slot) -> None:
        """Check whether the task that issues this collective knows of the one before it."""
        number, task = slot.number, current_task()
        if number < 0 or task is None:
            return
        issued = _Issued(number, task, slot.raw_post_of(member.position))
        last = self._last.get(member)
        self._last[member] = issued
        known = _known.get()
        unknown = last is not None and known.get(id(member), -1) < last.number
        if last is not None and unknown and last.task is not task and not _is_done(last.task):
            self._warn(member, last, issued)
        _known.set({**known, id(member): number})

    def _warn(self, member: Member, *pair: _Issued) -> None:
        found = sorted(((post_of(issued.raw), issued.task) for issued in pair), key=lambda each: each[0].location)
        where = found[0][0].location, found[1][0].location
        if where not in self._warned:
            self._warned.add(where)
            # Not in this call: the warning may be turned into an error, and a running task shows no frames.
            self._run.loop.call_soon(_warn, member.replica_id, found)


def _warn(replica_id: int, found: list[tuple[Post, Any]]) -> None:
    calls = [f"{task_text(task)} issued {post.call} at {place(post.location)}" for post, task in found]
    where = found[1][0].location
    warnings.warn_explicit(
        f"tasks of replica {replica_id} race for the next collective: {', '.join(calls)}; the order on other replicas "
        "may differ: await them one after the other, or give each a group",
        RuntimeWarning,
        where.file,
        where.line,
    )


def _is_done(task: Any) -> bool:
    if isinstance(task, asyncio.Future):
        return task.done()
    return task.parent_nursery is None or task not in task.parent_nursery.child_tasks


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
    return type(f"Observed{handle.__name__}", (_Observed, handle), {"__slots__": ()})


def observed(run: Any, observer: Observer) -> tuple[Observer, type[CollectiveHandle[Any]]]:
    """Return an observer that also warns of racing tasks, and handles that notify it, unless it needs only runs."""
    handle = run.loop.handle
    return (observer, handle) if observer.of_runs_alone else (together(RaceWatch(run), observer), _observed(handle))
