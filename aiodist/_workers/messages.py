"""What workers and the coordinator tell each other beside the engine: a closed set of messages, as JSON.

Nothing in a message is run, unpickled or looked up by name. A message is checked before it is used; one that is none of
these is an error of the connection that it came over.
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
    """A worker's part of a run that cannot go on. The first one that the coordinator hears makes it ask the others."""

    run: int  # the run's number, or `OUTSIDE`
    snapshot: Snapshot  # the worker's replicas, and what they have called
    group: GroupKey | None = None  # the group that is in trouble, where that is known
    number: int | None = None  # the number of the collective that cannot be complete
    overdue: Overdue | None = None  # the collective whose time is up, where that is the trouble
    failures: tuple[str, ...] = ()  # which replicas raised what
    note: str = ""  # more, for a person: that the event loop is blocked, say


class Waiting(NamedTuple):
    """What a worker's replicas wait in, while nothing is wrong there: ``snapshot.blocked`` do nothing else.

    An answer was queried for; otherwise the worker has seen by itself that some wait, and the others are queried.
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
    """The coordinator asks for a worker's part: let local replicas settle, as that collective cannot be complete."""

    run: int
    group: GroupKey | None = None
    number: int | None = None


class Query(NamedTuple):
    """The coordinator asks for a worker's `Waiting`: another one's replicas wait, perhaps for this one's."""

    run: int


class Report(NamedTuple):
    """What all workers raise; the strategy is of no use after that."""

    report: CollectiveReport
    cause: str = ""  # which replica raised what first, if one did


class Lost(NamedTuple):
    """A worker is gone, or says that it cannot go on: its engine has failed."""

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
    """A worker does not go on, and the others may wait for it: they warn of that, if they do."""

    text: str  # which worker, and what it is at
    file: str = ""  # where, if that is known; else empty
    line: int = 0  # the line in it


ToCoordinator: TypeAlias = Trouble | Waiting | OpenGroup | Lost | Stalled | Farewell
ToWorker: TypeAlias = Ask | Query | Report | GroupTag | Lost | Stalled | Farewell
Message: TypeAlias = ToCoordinator | ToWorker


def encode(message: Message) -> bytes:
    """Return a message as JSON, in which names of files mean the same on every machine."""
    kind = type(message)
    return json.dumps([kind.__name__, pack(kind, message, portable)], separators=(",", ":")).encode()


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Return the message that `encode` gave, with the files of this machine."""
    try:
        name, fields = json.loads(bytes(data))
        message: Message = unpack(_KINDS[name], fields, resolved)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"expected a message, got something else: {error!r}") from error
    return message


_KINDS: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}
