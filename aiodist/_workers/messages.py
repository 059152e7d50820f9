"""Messages between workers and the coordinator, independent of the engine: a closed set, sent as JSON.

Nothing in a message is executed, unpickled or looked up by name. A message is checked before it is used; an unknown
one is an error of its connection.
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
"""The number of the calls outside of replicas, beside those of runs, which count from 0."""


class Trouble(NamedTuple):
    """A worker's part of a run that cannot continue. After the first one the coordinator asks the other workers."""

    run: int  # the run's number, or `OUTSIDE`
    snapshot: Snapshot  # of the worker's replicas
    group: GroupKey | None = None  # the doomed group, if known
    number: int | None = None  # of the collective that cannot complete
    overdue: Overdue | None = None  # the collective that has timed out, if that is the trouble
    failures: tuple[str, ...] = ()  # which replicas raised what
    note: str = ""  # more for the report, e.g. that the event loop is blocked


class Waiting(NamedTuple):
    """What a worker's replicas wait for while nothing is wrong there; those in ``snapshot.blocked`` only wait.

    It answers a `Query`. A worker also sends it by itself when its replicas wait; then the others are queried.
    """

    run: int
    snapshot: Snapshot
    is_answer: bool = False


class OpenGroup(NamedTuple):
    """All local members of a group have posted its first collective: its workers need a communicator for it."""

    run: int
    group: GroupKey
    workers: tuple[int, ...]


class Ask(NamedTuple):
    """The coordinator asks for a worker's `Trouble` once its replicas have settled: that collective cannot complete."""

    run: int
    group: GroupKey | None = None
    number: int | None = None


class Query(NamedTuple):
    """The coordinator asks for a worker's `Waiting`, because another's replicas may wait for this one's."""

    run: int


class Report(NamedTuple):
    """The error that all workers raise; it ends the strategy."""

    report: CollectiveReport
    cause: str = ""  # which replica raised what first, if any did


class Lost(NamedTuple):
    """A worker is gone, or cannot continue because its engine has failed."""

    rank: int
    why: str


class GroupTag(NamedTuple):
    """All workers of a group need its communicator: they make it with this tag, or use one that they have."""

    run: int
    group: GroupKey
    tag: int


class Farewell(NamedTuple):
    """The worker leaves."""

    why: str


class Stalled(NamedTuple):
    """A worker makes no progress; others that wait for it warn."""

    text: str  # which worker, and what it does
    file: str = ""  # where, if known
    line: int = 0


ToCoordinator: TypeAlias = Trouble | Waiting | OpenGroup | Lost | Stalled | Farewell
ToWorker: TypeAlias = Ask | Query | Report | GroupTag | Lost | Stalled | Farewell
Message: TypeAlias = ToCoordinator | ToWorker

_KINDS: Final[Mapping[str, type]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as JSON, with file names that mean the same on every machine."""
    kind = type(message)
    return json.dumps([kind.__name__, pack(kind, message, portable)], separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """Return the message that `encode` has encoded, with this machine's file names; else raise a ValueError."""
    try:
        name, fields = json.loads(data)
        message: Message = unpack(_KINDS[name], fields, resolved)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"expected a message, got something else: {error!r}") from error
    return message
