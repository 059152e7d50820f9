"""Values as JSON and back, by their types: messages between workers, and reports.

A record (a named tuple or a dataclass) is a list of its fields, without trailing fields that have their defaults. An
object that occurs again (a record or a tuple of records) is replaced by its number among those of its type. Ids are
runs of consecutive numbers. The data name no types, and nothing in them is executed: the expected type decides how each
part is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache, lru_cache
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

File: TypeAlias = Annotated[str, "file"]
"""The name of a file, which may differ between processes."""


@lru_cache(maxsize=16)  # the records of thousands of processes share it
def everyone(total: int) -> tuple[int, ...]:
    """Return the ids of all replicas of a run."""
    return tuple(range(total))


def runs(ids: Sequence[int]) -> list[list[int]]:
    """Return ids as runs of consecutive numbers, each with its first and its length, in the same order."""
    if len(ids) > 1 and (ids is everyone(len(ids)) or tuple(ids) == tuple(range(ids[0], ids[0] + len(ids)))):
        return [[ids[0], len(ids)]]  # the usual case, also of thousands
    found: list[list[int]] = []
    for each in ids:
        if found and each == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([each, 1])
    return found


DAMAGE: Final = LookupError, TypeError, AttributeError, RecursionError, OverflowError
"""The errors that reading damaged data raises, besides ValueError."""

_MOST_IDS = 2**20  # in one tuple: a longer run is damaged data, and would fill the memory


class _Document:
    """By type, the numbers of the objects that have been written, by identity, or the objects that have been read."""

    def __init__(self, rename: Callable[[str], str]) -> None:
        self.rename = rename
        self.known: defaultdict[Any, dict[int, Any]] = defaultdict(dict)


class _Codec(NamedTuple):
    write: Callable[[Any, _Document], Any]
    read: Callable[[Any, _Document], Any]


def pack(kind: Any, value: Any, rename: Callable[[str], str] = str) -> Any:
    """Return a value of a type as JSON data, with its files renamed."""
    return _codec(kind).write(value, _Document(rename))


def unpack(kind: Any, data: Any, rename: Callable[[str], str] = str) -> Any:
    """Return the value of a type from the data that `pack` returned, or a record from a dict of its fields.

    Raises:
        ValueError: the data do not describe a value of that type.
    """
    try:
        return _codec(kind).read(data, _Document(rename))
    except DAMAGE as error:
        what = getattr(kind, "__name__", kind)
        raise ValueError(f"expected a {what}, got something else: {error!r}") from error


def named(value: Any) -> Any:
    """Return a value as JSON data for people: records as dicts of all their fields, tuples as lists."""
    if is_dataclass(value):
        return {each.name: named(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        as_dict = getattr(value, "_asdict", None)
        return {name: named(each) for name, each in as_dict().items()} if as_dict else list(map(named, value))
    return str(value) if isinstance(value, StrEnum) else value


@cache
def _codec(kind: Any) -> _Codec:  # noqa: PLR0911  (one return a kind of type)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType and len(parts) == 2 and NoneType in parts:
        write, read = _codec(next(part for part in parts if part is not NoneType))
        return _Codec(
            lambda value, doc: None if value is None else write(value, doc),
            lambda data, doc: None if data is None else read(data, doc),
        )
    if kind == tuple[int, ...]:
        return _Codec(lambda ids, _: runs(ids), lambda data, _: _from_runs(data))
    if origin is tuple:
        return _tuple(parts)
    if kind == File:
        return _Codec(lambda value, doc: doc.rename(value), lambda data, doc: doc.rename(_checked(data, str)))
    if kind is Any:
        return _Codec(_as_it_is, lambda data, _: _frozen(data))
    if kind is float:
        return _Codec(_as_it_is, lambda data, _: float(_checked(data, int, float)))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _Codec(lambda value, _: str(value), lambda data, _: kind(data))
    if _is_record(kind):
        return _once(kind, _record(kind))
    return _Codec(_as_it_is, lambda data, _: _checked(data, *(parts or (kind,))))


def _as_it_is(value: Any, _: _Document) -> Any:
    return value


def _tuple(parts: Sequence[Any]) -> _Codec:
    own = [_codec(part) for part in parts if part is not Ellipsis]
    if len(own) == len(parts):
        return _Codec(
            lambda value, doc: [part.write(each, doc) for part, each in zip(own, value, strict=True)],
            lambda data, doc: tuple(part.read(each, doc) for part, each in zip(own, _checked(data, list), strict=True)),
        )
    write, read = own[0]
    several = _Codec(
        lambda value, doc: [write(each, doc) for each in value],
        lambda data, doc: tuple([read(each, doc) for each in _checked(data, list)]),
    )
    return _once(parts, several) if _is_record(parts[0]) else several


def _record(kind: Any) -> _Codec:
    own = {name: _codec(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    names, parts = list(own), list(own.values())
    is_tuple = hasattr(kind, "_field_defaults")
    defaults = kind._field_defaults if is_tuple else {each.name: each.default for each in fields(kind)}

    def write(value: Any, doc: _Document) -> Any:
        row = [getattr(value, name) for name in names]
        while row and row[-1] == defaults.get(names[len(row) - 1], MISSING):
            row.pop()
        return [part.write(each, doc) for part, each in zip(parts, row, strict=False)]

    def read(data: Any, doc: _Document) -> Any:
        if isinstance(data, dict):
            return kind(**{name: own[name].read(each, doc) for name, each in data.items()})
        if len(_checked(data, list)) > len(own):
            raise ValueError(f"expected a {kind.__name__}, got {len(data)} fields")
        return kind(*(part.read(each, doc) for part, each in zip(parts, data, strict=False)))

    return _Codec(write, read)


def _once(kind: Any, codec: _Codec) -> _Codec:
    """Return a codec that writes each object only once."""

    def write(value: Any, doc: _Document) -> Any:
        known = doc.known[kind]
        if id(value) in known:
            return known[id(value)]
        row = codec.write(value, doc)
        known[id(value)] = len(known)
        return row

    def read(data: Any, doc: _Document) -> Any:
        known = doc.known[kind]
        if type(data) is int:
            return known[data]
        value = codec.read(data, doc)
        known[len(known)] = value
        return value

    return _Codec(write, read)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, tuple)) and get_origin(kind) is None


def _checked(data: Any, *kinds: type) -> Any:
    if type(data) not in kinds:
        raise ValueError(f"expected {kinds[0].__name__}, got {type(data).__name__}")
    return data


def _frozen(data: Any) -> Any:
    return tuple(map(_frozen, data)) if isinstance(data, list) else data


def _from_runs(data: Any) -> tuple[int, ...]:
    pairs = [[each, 1] if type(each) is int else each for each in _checked(data, list)]
    for first, length in pairs:
        if type(first) is not int or type(length) is not int or not 0 < length <= _MOST_IDS:
            raise ValueError(f"expected the first of some ids and their number, got {[first, length]!r}")
    if sum(length for _, length in pairs) > _MOST_IDS:
        raise ValueError(f"expected at most {_MOST_IDS} ids")
    if len(pairs) == 1 and pairs[0][0] == 0:
        return everyone(pairs[0][1])
    return tuple(chain.from_iterable(range(first, first + length) for first, length in pairs))
