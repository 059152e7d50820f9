"""Waits: what a task of a replica was waiting for when it was looked at, as a value.

A wait holds texts and places only, never the task or the lock itself, so it can be pickled, compared and kept.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from aiodist._core.report import Location


class Awaited(enum.StrEnum):
    """What kind of thing a task waits for. Members compare equal to their lower-case names."""

    COLLECTIVE = "collective"
    LOCK = "lock"
    CONDITION = "condition"
    SEMAPHORE = "semaphore"
    EVENT = "event"
    QUEUE = "queue"
    TASK = "task"
    FUTURE = "future"
    SLEEP = "sleep"
    THREAD = "thread"
    IO = "io"
    UNKNOWN = "unknown"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Wait:
    """One task that waits: who, for what, where, and who could end it.

    Attributes:
        who: the task as a person calls it, e.g. ``replica 1`` or ``replica 1's task 'loader'``.
        replica_id: the replica that it belongs to; None for a task outside of replicas.
        kind: what kind of thing it waits for; `Awaited.NOTHING` when it can run.
        what: the words after ``who``, e.g. ``waits for an asyncio.Lock``.
        location: the innermost place of the program in its chain of awaits; None when that has no frame of it.
        stack: the program's places in that chain, innermost last.
        on: who could end the wait, as far as that can be seen, in the words of ``who``.
    """

    who: str
    replica_id: int | None
    kind: Awaited
    what: str
    location: Location | None
    stack: tuple[Location, ...]
    on: tuple[str, ...] = ()


class Look(NamedTuple):
    """What a look at the tasks of a run has found, in words.

    Attributes:
        waits: by replica id, what those wait for that are not in a collective.
        circle: the circle of waits; empty where there is none.
        calls: by replica id, where its child tasks are suspended, each with a sentence that says so.
    """

    waits: Mapping[int, str]
    circle: str
    calls: Mapping[int, tuple[tuple[Location, str], ...]]
