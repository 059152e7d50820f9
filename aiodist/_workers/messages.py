"""What workers and the coordinator tell each other beside the engine: a closed set of messages, as JSON.

Nothing in a message is run, unpickled or looked up by name. A message is checked before it is used; one that is none of
these is an error of the connection that it came over.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, get_args, get_type_hints

from aiodist._core import snapshot as snapshots
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupKey, Overdue, Snapshot, everyone

OUTSIDE: Final = -1
"""The number of what is called outside of replicas, beside those of runs, which count from 0."""


class Failure(NamedTuple):
    """What a replica raised on its own.

    Attributes:
        replica_id: the replica.
        type: the exception's type.
        text: its message, the first line.
        plain: its arguments, where it is one of Python's own and they are numbers and strings; else None.
    """

    replica_id: int
    type: str
    text: str
    plain: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, replica_id: int, error: BaseException) -> Failure:
        """Return what to report of an exception."""
        plain = type(error) is _BUILT_IN.get(type(error).__name__) and all(type(a) in _SCALARS for a in error.args)
        return cls(replica_id, type(error).__name__, str(error).partition("\n")[0], error.args if plain else None)

    def __str__(self) -> str:
        return f"Replica {self.replica_id} raised {self.type}: {self.text}"

    def error(self) -> Exception | None:
        """Return an exception like it; None where it is not one of Python's own."""
        kind = _BUILT_IN.get(self.type)
        return None if kind is None or self.plain is None else kind(*self.plain)


_SCALARS: Final = (str, int, float, bool, type(None))
_BUILT_IN: Final[Mapping[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (UnicodeError, ExceptionGroup))
}


class Trouble(NamedTuple):
    """A worker's part of a run that cannot go on. The first one that the coordinator hears makes it ask the others.

    Attributes:
        run: the run's number, or `OUTSIDE`.
        snapshot: the worker's replicas, and what they have called.
        group: the group that is in trouble, where that is known.
        number: the number of the collective that cannot be complete.
        overdue: the collective whose time is up, where that is the trouble.
        failures: what replicas raised.
        note: more, for a person: that the event loop is blocked, say.
    """

    run: int
    snapshot: Snapshot
    group: GroupKey | None = None
    number: int | None = None
    overdue: Overdue | None = None
    failures: tuple[Failure, ...] = ()
    note: str = ""


class Waiting(NamedTuple):
    """What a worker's replicas wait in, while nothing is wrong there: ``snapshot.blocked`` do nothing else.

    An answer was queried for; otherwise the worker has seen by itself that some wait, and the others are queried.
    """

    run: int
    snapshot: Snapshot
    is_answer: bool = False


class GaveUp(NamedTuple):
    """The worker cannot go on: its engine has failed."""

    why: str


class OpenGroup(NamedTuple):
    """All local members of a group have made its first collective: its workers need a communicator for it."""

    run: int
    group: GroupKey
    workers: tuple[int, ...]


class ReleaseGroup(NamedTuple):
    """A worker needs the communicator with that tag no more."""

    tag: int


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

    run: int
    report: CollectiveReport
    failures: tuple[Failure, ...] = ()


class Lost(NamedTuple):
    """A worker is gone."""

    rank: int
    why: str


class GroupTag(NamedTuple):
    """All workers of a group need its communicator: they make it with that tag, or use one again that they have."""

    run: int
    group: GroupKey
    tag: int
    is_new: bool


class Beat(NamedTuple):
    """The process lives."""


class Farewell(NamedTuple):
    """The worker leaves the others, and why."""

    why: str


class Stalled(NamedTuple):
    """A worker does not go on, and the others may wait for it: they warn of that, if they do.

    Attributes:
        text: which worker, and what it is at.
        file: where, if that is known; else empty.
        line: the line in it.
    """

    text: str
    file: str = ""
    line: int = 0


Message: TypeAlias = (
    Trouble | Waiting | GaveUp | OpenGroup | ReleaseGroup | Ask | Query | Report | Lost | GroupTag | Beat | Farewell
    | Stalled
)  # fmt: skip


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    name = type(message).__name__
    fields = {field: write(getattr(message, field)) for field, (write, _) in _KINDS[name][1].items()}
    return json.dumps([name, fields], separators=(",", ":")).encode()


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Return the message that `encode` gave.

    Raises:
        ValueError: it is none.
    """
    try:
        name, fields = json.loads(bytes(data))
        kind, codecs = _KINDS[name]
        if fields.keys() != codecs.keys():
            raise ValueError(f"the fields of a {name} are {sorted(codecs)}, got {sorted(fields)}")
        return kind(**{field: read(fields[field]) for field, (_, read) in codecs.items()})
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected a message, got something else: {error!r}") from error


# How fields are written and read, by type.

_Codec: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def _key_to_json(key: GroupKey) -> list[Any]:
    ids, name, ordinal = key
    return [list(ids) if ordinal >= 0 else len(ids), name, ordinal]  # a run's own group has all replicas


def _key_from_json(value: Any) -> GroupKey:
    ids, name, ordinal = value
    if not (name is None or isinstance(name, str)) or not isinstance(ordinal, int):
        raise ValueError("expected a group's key")
    return everyone(ids) if isinstance(ids, int) else _ints(ids), name, ordinal


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("expected a list of ints")
    return tuple(value)


def _overdue_to_json(overdue: Overdue) -> list[Any]:
    return [_key_to_json(overdue.group), overdue.number, overdue.seconds]


def _overdue_from_json(value: Any) -> Overdue:
    key, number, seconds = value
    return Overdue(_key_from_json(key), None if number is None else int(number), float(seconds))


def _failure_from_json(value: Any) -> Failure:
    replica_id, type_, text, plain = value
    if plain is not None and not all(type(each) in _SCALARS for each in plain):
        raise ValueError("expected numbers and strings")
    return Failure(int(replica_id), str(type_), str(text), None if plain is None else tuple(plain))


_CODECS: Final[Mapping[Any, _Codec]] = {
    Snapshot: (snapshots.to_json, snapshots.from_json),
    CollectiveReport: (CollectiveReport.to_dict, CollectiveReport.from_dict),
    GroupKey: (_key_to_json, _key_from_json),
    Overdue: (_overdue_to_json, _overdue_from_json),
    tuple[int, ...]: (list, _ints),
    tuple[Failure, ...]: (list, lambda rows: tuple(map(_failure_from_json, rows))),
}


def _codec_of(hint: Any) -> _Codec:
    inner = [each for each in get_args(hint) if each is not type(None)]
    if hint not in _CODECS and len(inner) == 1:  # or None
        write, read = _codec_of(inner[0])
        return (
            lambda value: None if value is None else write(value),
            lambda value: None if value is None else read(value),
        )
    return _CODECS.get(hint) or (lambda value: value, lambda value: _checked(hint, value))


def _checked(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")  # noqa: TRY004
    return value


_KINDS: Final[Mapping[str, tuple[Callable[..., Message], Mapping[str, _Codec]]]] = {
    kind.__name__: (kind, {name: _codec_of(hint) for name, hint in get_type_hints(kind).items()})
    for kind in get_args(Message)
}
