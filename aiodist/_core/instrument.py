"""Instrumentation: how tools, such as tracing and checking, observe runs in progress.

A run looks for observers once, when it begins; without any, a collective costs one more ``is None``. A run is observed
by the ``observing`` blocks around the task that calls ``strategy.run``, whatever other runs are in progress in this
thread or in others, and by observers of the whole process.

An observer is called in the middle of the scheduler's work, on the event loop's thread. It notes what it needs; it must
not raise, await, call back into the run, or keep values. Calls and their places are in ``slot.post_of(position)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from inspect import isfunction
from typing import Any, Protocol

from aiodist._core.errors import CollectiveError
from aiodist._core.ledger import Ledger, Member, Slot
from aiodist._core.terms import ReplicaState


class ObservedRun(Protocol):
    """What an observer can read from a run."""

    @property
    def ledger(self) -> Ledger:
        """The order check, with the replicas and groups."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """The replicas' devices, in the order of their ids."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """Returns the time on the event loop's clock, in seconds."""
        ...


class Observer:
    """Is notified of the events of a run. The base class ignores them; a tool overrides the methods that it needs.

    Attributes:
        of_runs_alone: whether it needs only the beginning, the end and the report of runs. A run then has plain
            handles, and does not look for racing tasks.
    """

    of_runs_alone = False

    def run_begun(self, run: ObservedRun, name: str) -> None:
        """A run of the function of that name begins; none of its replicas has started."""

    def started(self, member: Member) -> None:
        """A replica's function is about to be called."""

    def posted(self, member: Member, slot: Slot) -> None:
        """A replica has issued a collective; the last post comes before `completed`."""

    def waits(self, member: Member, slot: Slot) -> None:
        """A task of a replica awaits a collective, which may be complete already."""

    def resumed(self, member: Member, slot: Slot) -> None:
        """The await is over: with the result, with ``slot.error``, or because the task was cancelled."""

    def completed(self, slot: Slot) -> None:
        """A collective has its result, or its error in ``slot.error``."""

    def reported(self, run: ObservedRun, error: CollectiveError) -> None:
        """The replicas disagree, and this error is raised in those that wait."""

    def ended(self, member: Member, end: ReplicaState, error: BaseException | None) -> None:
        """A replica's function has ended; ``error`` is a failure of its own."""

    def run_ended(self, run: ObservedRun) -> None:
        """All replicas of a run have ended."""


def together(*observers: Observer) -> Observer:
    """Return several observers as one, each notified in the order given."""
    if len(observers) == 1:
        return observers[0]
    several = Observer()
    several.of_runs_alone = all(observer.of_runs_alone for observer in observers)
    for name, method in vars(Observer).items():
        if isfunction(method):
            setattr(several, name, partial(_call_each, [getattr(observer, name) for observer in observers]))
    return several


def _call_each(methods: list[Callable[..., None]], *args: Any) -> None:
    for method in methods:
        method(*args)


_observing: ContextVar[tuple[Observer, ...]] = ContextVar("aiodist_observers", default=())
_process_wide: list[Callable[[], Observer | None]] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Observe the runs that begin inside the block, in its task or thread and in tasks made there."""
    _observing.set((*_observing.get(), observer))
    try:
        yield
    finally:  # without a token, because a fixture may enter in one context and leave in another
        _observing.set(tuple(other for other in _observing.get() if other is not observer))


def observe_process(find: Callable[[], Observer | None]) -> None:
    """Register a function that is called for a further observer whenever a run begins in this process."""
    _process_wide.append(find)


def current_observer() -> Observer | None:
    """Return the observer of a run that begins now, of several all as one; None if there is none."""
    found = [find() for find in _process_wide]
    observers = (*_observing.get(), *(observer for observer in found if observer is not None))
    return together(*observers) if observers else None
