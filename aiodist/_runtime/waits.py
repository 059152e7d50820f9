"""What a task can wait for, and what a look at the tasks of a run has found."""

from __future__ import annotations

import enum
from collections.abc import Mapping
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
