"""Observers: what a tool sees of runs while they go on. Tracing and checking stand on it.

A run asks once, as it begins, who listens; with nobody, the way of a collective pays one ``is None`` for it. Listening
goes by context, so a run is observed by the ``observing`` blocks around the task that calls ``strategy.run``, however
many other runs go on beside it in this thread or in others; and by whoever listens to the whole process.

An observer is called in the middle of the scheduler's work, on the event loop's thread: it notes what it needs, and
does not raise, await, call back into the group or keep values. What a meeting tells, call texts and places are made of
``meeting.call_of(replica_id)`` (see `describe.call_text` and `callsite.location`) when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from aiodist._core.errors import CollectiveError
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.member import Member
    from aiodist.collective.rendezvous import Rendezvous


class Observer(Protocol):
    """Who is told what happens in a run. The time of an event is the group's own: ``group.now()``, in nanoseconds."""

    def run_begun(self, group: SyncGroup, fn: Callable[..., Any]) -> None:
        """A run of ``fn`` begins; ``group.members`` are its replicas, none of which has started."""

    def started(self, member: Member) -> None:
        """A replica's function is called now."""

    def arrived(self, member: Member, meeting: Rendezvous) -> None:
        """A replica has issued its collective number ``meeting.number``; the last arrival comes before `completed`."""

    def waits(self, member: Member, meeting: Rendezvous) -> None:
        """A task of a replica awaits a collective, which may be complete already."""

    def resumed(self, member: Member, meeting: Rendezvous) -> None:
        """That await is over: with the result, with ``meeting.error``, or because the task was cancelled."""

    def completed(self, group: SyncGroup, meeting: Rendezvous) -> None:
        """A collective has its result or, in ``meeting.error``, what went wrong."""

    def judged(self, group: SyncGroup, verdict: CollectiveError) -> None:
        """The replicas did not meet, and this is raised in those who wait."""

    def ended(self, member: Member, error: BaseException | None) -> None:
        """A replica's function has ended, in the way that ``member.end`` says; ``error`` is a failure of its own."""

    def run_ended(self, group: SyncGroup) -> None:
        """All replicas of a run have ended."""


class _Several:
    """Several observers as one, each told in the order in which they began to listen."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers

    def run_begun(self, group: SyncGroup, fn: Callable[..., Any]) -> None:
        for observer in self._observers:
            observer.run_begun(group, fn)

    def started(self, member: Member) -> None:
        for observer in self._observers:
            observer.started(member)

    def arrived(self, member: Member, meeting: Rendezvous) -> None:
        for observer in self._observers:
            observer.arrived(member, meeting)

    def waits(self, member: Member, meeting: Rendezvous) -> None:
        for observer in self._observers:
            observer.waits(member, meeting)

    def resumed(self, member: Member, meeting: Rendezvous) -> None:
        for observer in self._observers:
            observer.resumed(member, meeting)

    def completed(self, group: SyncGroup, meeting: Rendezvous) -> None:
        for observer in self._observers:
            observer.completed(group, meeting)

    def judged(self, group: SyncGroup, verdict: CollectiveError) -> None:
        for observer in self._observers:
            observer.judged(group, verdict)

    def ended(self, member: Member, error: BaseException | None) -> None:
        for observer in self._observers:
            observer.ended(member, error)

    def run_ended(self, group: SyncGroup) -> None:
        for observer in self._observers:
            observer.run_ended(group)


_listening: ContextVar[tuple[Observer, ...]] = ContextVar("aiodist_observers", default=())
_process_wide: list[Callable[[], Observer | None]] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer see the runs that begin inside the block, in its task or thread and in tasks made there."""
    _listening.set((*_listening.get(), observer))
    try:
        yield
    finally:  # without a token: a fixture may enter in one context and leave in another
        _listening.set(tuple(other for other in _listening.get() if other is not observer))


def observe_process(find: Callable[[], Observer | None]) -> None:
    """Ask a function, whenever a run begins in this process, who else listens."""
    _process_wide.append(find)


def who_listens() -> Observer | None:
    """Return who is to be told of a run that begins now: None, one observer, or several as one."""
    found = [find() for find in _process_wide]
    observers = (*_listening.get(), *(observer for observer in found if observer is not None))
    if len(observers) > 1:
        return _Several(observers)
    return observers[0] if observers else None
