"""Waits in words: the sentences of a wait-for graph."""

from __future__ import annotations

from collections.abc import Sequence

from aiodist._runtime.waits import Awaited
from aiodist.collective.wording import ids_briefly, place
from aiodist.replica.suspension import Suspension
from aiodist.replica.waiter import Waiter


def verb(suspension: Suspension) -> str:
    """Return what a task does, for one task."""
    if suspension.kind is Awaited.NOTHING:
        return suspension.what.removeprefix("for nothing: it ")
    return f"waits {suspension.what}"


def conjugated(clause: str, number: int) -> str:
    """Return such words for that many tasks."""
    if number == 1:
        return clause
    return clause.replace("waits", "wait", 1) if clause.startswith("waits") else clause.replace("is ", "are ", 1)


def where(waiter: Waiter) -> str:
    """Return the place at which a task waits, in brackets; empty where it is in no frame of the program."""
    location = waiter.suspension.location
    return f" ({place(location)})" if location is not None else ""


def together(waiters: Sequence[Waiter]) -> str:
    """Return those that wait alike: replicas by their ids; any other task is alone."""
    if waiters[0].member is not None:
        return ids_briefly(w.member.replica_id for w in waiters if w.member is not None)
    return waiters[0].who if len(waiters) == 1 else f"{len(waiters)} times {waiters[0].who}"


def all_together(waiters: Sequence[Waiter]) -> str:
    """Return replicas and other tasks in one enumeration."""
    replicas = [w.member.replica_id for w in waiters if w.member is not None]
    parts = ([ids_briefly(replicas)] if replicas else []) + [w.who for w in waiters if w.member is None]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def relation(kind: Awaited, whom: str, *, plural: bool = False) -> str:
    """Return how those who could end a wait stand to what is waited for."""
    if kind in (Awaited.LOCK, Awaited.SEMAPHORE):
        return f", which {whom} hold{'' if plural else 's'}"
    return f" for {whom}"
