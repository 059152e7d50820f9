"""What workers and the coordinator tell each other beside the engine: a closed set of messages, as JSON.

Nothing in a message is run, unpickled or looked up by name. A message is checked before it is used; one that is none of
these is an error of the connection that it came over.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from aiodist._core import snapshot as snapshots
from aiodist._core.report import CollectiveReport
from aiodist._core.snapshot import GroupKey, Overdue, Snapshot

OUTSIDE: Final = -1
"""The number of what is called outside of replicas, beside those of runs, which count from 0."""


@dataclass(frozen=True, slots=True)
class Failure:
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
        """Return what there is to tell of an exception."""
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


@dataclass(frozen=True, slots=True)
class Trouble:
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


@dataclass(frozen=True, slots=True)
class Beat:
    """The process lives."""


@dataclass(frozen=True, slots=True)
class Farewell:
    """The worker leaves the others, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a worker's replicas wait in, while nothing is wrong there: ``snapshot.blocked`` do nothing else.

    Attributes:
        run: the run's number.
        snapshot: where they are.
        is_answer: it was queried for; otherwise the worker has seen by itself that some wait, and the others are
            queried.
    """

    run: int
    snapshot: Snapshot
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """The coordinator asks for a worker's part: let local replicas settle, as that collective cannot be complete."""

    run: int
    group: GroupKey | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """The coordinator asks for a worker's `Waiting`: another one's replicas wait, perhaps for this one's."""

    run: int


@dataclass(frozen=True, slots=True)
class Report:
    """What all workers raise; the strategy is of no use after that."""

    run: int
    report: CollectiveReport
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """A worker does not go on, and the others may wait for it: they warn of that, if they do.

    Attributes:
        text: which worker, and what it is at.
        file: where, if that is known; else empty.
        line: the line in it.
    """

    text: str
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The worker cannot go on: its engine has failed."""

    why: str


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """All local members of a group have made its first collective: the worker needs a communicator for it.

    Attributes:
        run: the run's number.
        group: the group.
        workers: those that have members, ascending.
    """

    run: int
    group: GroupKey
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupTag:
    """All workers of a group need its communicator: they make it with that tag, or use one again that they have."""

    run: int
    group: GroupKey
    tag: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class ReleaseGroup:
    """A worker needs the communicator with that tag no more."""

    tag: int


Message: TypeAlias = (
    Beat
    | Farewell
    | Trouble
    | Waiting
    | Ask
    | Query
    | Report
    | Lost
    | Stalled
    | GaveUp
    | OpenGroup
    | GroupTag
    | ReleaseGroup
)


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    fields = {name: getattr(message, name) for name in message.__dataclass_fields__}
    for name, (write, _) in _FIELDS.items():
        if fields.get(name) is not None:
            fields[name] = write(fields[name])
    return json.dumps([type(message).__name__, fields], separators=(",", ":")).encode()


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Return the message that `encode` gave.

    Raises:
        ValueError: it is none.
    """
    try:
        name, fields = json.loads(bytes(data))
        kind, types = _KINDS[name]
        if fields.keys() != types.keys():
            raise ValueError(f"the fields of a {name} are {sorted(types)}, got {sorted(fields)}")
        for field, value in fields.items():
            if field in _FIELDS and value is not None:
                fields[field] = _FIELDS[field][1](value)
            elif not isinstance(value, types[field]):
                raise ValueError(f"{name}.{field} is a {type(value).__name__}")
        return kind(**fields)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"expected a message, got something else: {error!r}") from error


def _key_from_json(value: Any) -> GroupKey:
    ids, name, ordinal = value
    if not (name is None or isinstance(name, str)) or not isinstance(ordinal, int):
        raise ValueError("expected a group's key")
    return _ints(ids), name, ordinal


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("expected a list of ints")
    return tuple(value)


def _overdue_from_json(value: Any) -> Overdue:
    key, number, seconds = value
    return Overdue(_key_from_json(key), None if number is None else int(number), float(seconds))


def _failure_from_json(value: Any) -> Failure:
    replica_id, type_, text, plain = value
    if plain is not None and not all(type(each) in _SCALARS for each in plain):
        raise ValueError("expected numbers and strings")
    return Failure(int(replica_id), str(type_), str(text), None if plain is None else tuple(plain))


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]] = {
    "snapshot": (snapshots.to_json, snapshots.from_json),
    "report": (CollectiveReport.to_dict, CollectiveReport.from_dict),
    "group": (list, _key_from_json),
    "overdue": (list, _overdue_from_json),
    "workers": (list, _ints),
    "failures": (
        lambda failures: [[each.replica_id, each.type, each.text, each.plain] for each in failures],
        lambda rows: tuple(_failure_from_json(row) for row in rows),
    ),
}
_NONE: Final = type(None)
_KINDS: Final[Mapping[str, tuple[Callable[..., Message], Mapping[str, Any]]]] = {
    "Trouble": (
        Trouble,
        {"run": int, "snapshot": dict, "group": _NONE, "number": (int, _NONE), "overdue": _NONE, "failures": list,
         "note": str},
    ),
    "Beat": (Beat, {}),
    "Farewell": (Farewell, {"why": str}),
    "Waiting": (Waiting, {"run": int, "snapshot": dict, "is_answer": bool}),
    "Ask": (Ask, {"run": int, "group": _NONE, "number": (int, _NONE)}),
    "Query": (Query, {"run": int}),
    "Stalled": (Stalled, {"text": str, "file": str, "line": int}),
    "GaveUp": (GaveUp, {"why": str}),
    "Report": (Report, {"run": int, "report": dict, "failures": list}),
    "Lost": (Lost, {"rank": int, "why": str}),
    "OpenGroup": (OpenGroup, {"run": int, "group": list, "workers": list}),
    "GroupTag": (GroupTag, {"run": int, "group": list, "tag": int, "is_new": bool}),
    "ReleaseGroup": (ReleaseGroup, {"tag": int}),
}  # fmt: skip
