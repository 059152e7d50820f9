"""Messages between workers and the coordinator, apart from the engine: a closed set, as JSON.

Nothing in a message is executed, unpickled or looked up by name. A message is checked before it is used; an unknown
message is an error of its connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias, get_args

from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupKey, Overdue, Snapshot
from aiodist._core.wire import pack, unpack
from aiodist._workers.record import portable, resolved

OUTSIDE: Final = -1
"""The number of what is called outside of replicas, beside those of runs, which count from 0."""


class Trouble(NamedTuple):
    """A worker's part of a run that cannot continue. On the first one, the coordinator asks the others."""

    run: int  # the run's number, or `OUTSIDE`
    snapshot: Snapshot  # the worker's replicas, and what they have called
    group: GroupKey | None = None  # the group that is in trouble, where that is known
    number: int | None = None  # the number of the collective that cannot be complete
    overdue: Overdue | None = None  # the collective whose time is up, where that is the trouble
    failures: tuple[str, ...] = ()  # which replicas raised what
    note: str = ""  # more, for a person: that the event loop is blocked, say


class Waiting(NamedTuple):
    """What a worker's replicas wait in while nothing is wrong there; those in ``snapshot.blocked`` only wait.

    It answers a query, or else the worker has noticed waiting replicas by itself, and the others are queried.
    """

    run: int
    snapshot: Snapshot
    is_answer: bool = False


class OpenGroup(NamedTuple):
    """All local members of a group have made its first collective: its workers need a communicator for it."""

    run: int
    group: GroupKey
    workers: tuple[int, ...]


class Ask(NamedTuple):
    """The coordinator asks for a worker's part: its replicas settle first, since that collective cannot complete."""

    run: int
    group: GroupKey | None = None
    number: int | None = None


class Query(NamedTuple):
    """The coordinator asks for a worker's `Waiting`, because another's replicas may wait for this one's."""

    run: int


class Report(NamedTuple):
    """The error that all workers raise; it ends the strategy."""

    report: CollectiveReport
    cause: str = ""  # which replica raised what first, if one did


class Lost(NamedTuple):
    """A worker is gone, or says that it cannot continue because its engine has failed."""

    rank: int
    why: str


class GroupTag(NamedTuple):
    """All workers of a group need its communicator: they make it with that tag, unless they have one for it."""

    run: int
    group: GroupKey
    tag: int


class Farewell(NamedTuple):
    """The worker leaves the others, and why."""

    why: str


class Stalled(NamedTuple):
    """A worker makes no progress; the others warn about that if they wait for it."""

    text: str  # which worker, and what it is at
    file: str = ""  # where, if that is known; else empty
    line: int = 0  # the line in it


ToCoordinator: TypeAlias = Trouble | Waiting | OpenGroup | Lost | Stalled | Farewell
ToWorker: TypeAlias = Ask | Query | Report | GroupTag | Lost | Stalled | Farewell
Message: TypeAlias = ToCoordinator | ToWorker


def encode(message: Message) -> bytes:
    """Return a message as JSON, with file names that mean the same on every machine."""
    kind = type(message)
    return json.dumps([kind.__name__, pack(kind, message, portable)], separators=(",", ":")).encode()


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Return the message from what `encode` gave, with this machine's file names."""
    try:
        name, fields = json.loads(bytes(data))
        message: Message = unpack(_KINDS[name], fields, resolved)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"expected a message, got something else: {error!r}") from error
    return message


_KINDS: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}
