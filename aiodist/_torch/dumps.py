"""Dumps of PyTorch's flight recorder as files: JSON, or a pickle of plain containers; read and checked without torch.

A dump says, for one rank, which collectives it has issued last: name, process group, sequence number, sizes and dtypes,
how far each has come, and in pickles from where. It is what a broken job left, or what somebody sends, so nothing of it
is believed before it is checked: a pickle whose instructions make more than plain containers is not loaded, and every
field that is used must be what it should be. Equal calls are mostly one object for all dumps.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import pickletools
import re
import stat
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from aiodist._core.call import MESSAGE, Call, Place, Post
from aiodist._torch.report import call_of_tensors

KNOWN_VERSION: Final = 2
"""The format's major version."""

_MOST_DIMENSIONS = 64
_MOST_FRAMES = 8
_LOOKED_AT = 256
_LARGEST_SOURCE = 1 << 24
_RANKS = re.compile(r"\[\s*(?:\d{1,9}(?:\s*,\s*\d{1,9})*)?\s*\]")
_SEND_OR_RECV = re.compile(r"(?:send (\d{1,9})->(\d{1,9})|recv (\d{1,9})<-(\d{1,9}))")
_IN_TORCH = re.compile(r"(.*[\\/]torch[\\/])distributed[\\/](?:distributed_c10d|c10d_logger)\.py")
_NOT_PYTHON = (".cpp", ".cc", ".h", ".hpp", ".so")

# What must agree between ranks; of the others only kind and dtypes.
_BY_INPUT = frozenset([
    "all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "all_gather_single", "gather",
    "all_gather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "allreduce_coalesced", "_broadcast_oop", "_reduce_oop", MESSAGE,
])  # fmt: skip
_BY_OUTPUT = frozenset(["scatter"])
_BARRIERS = frozenset(["barrier", "all_reduce_barrier"])
_ENDS = frozenset(["coalesced", "ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced"])
"""What ends a list of calls that were issued as one, without tensors of its own."""

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8",
    "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


class DumpError(Exception):
    """A file is no dump that can be read; the text says which and why."""


class State(IntEnum):
    """How far a call has come."""

    SCHEDULED = 0
    STARTED = 1
    DONE = 2


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """A call with the places it was made from, and how far it has come.

    Its meaning is equal where calls are the same collective: NCCL and gloo count elements, whatever their arrangement.
    """

    post: Post
    meaning: Hashable
    state: State


class Message(NamedTuple):
    """A send or a receive that has not ended; the ranks are counted in its process group."""

    group: str
    source: int
    target: int
    sends: bool
    post: Post


class GroupConfig(NamedTuple):
    """A process group: what its author calls it, and its ranks in the job; None where the dump does not say."""

    description: str
    ranks: tuple[int, ...] | None


@dataclass(slots=True)
class Dump:
    """What one rank has issued: calls by group and sequence number, and sends and receives that have not ended."""

    rank: int
    file: Path
    is_json: bool  # which has no frames
    backends: set[str] = field(default_factory=set)
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    calls: dict[str, dict[int, Entry]] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    last: tuple[str, Entry] | None = None  # its newest call, and the group of that
    dropped: bool = False  # older calls are no longer in it
    newest: int = 0  # when its newest call was made, in nanoseconds since 1970


_Sizes: TypeAlias = tuple[tuple[int, ...], ...]
_Recorded: TypeAlias = tuple[str, _Sizes, tuple[str, ...], _Sizes, tuple[str, ...]]
"""A call as dumps have it: its kind, and the sizes and dtypes of its inputs and outputs."""


@lru_cache(maxsize=1 << 16)
def _entries_of(call: Call, path: tuple[Place, ...]) -> tuple[Entry, ...]:
    """Return a call from some places, the innermost first: an entry for each state."""
    meaning = call.kind, call.dtypes, tuple(map(_elements, call.shapes or ()))
    return tuple(Entry(Post(call, path), meaning, state) for state in State)


@lru_cache(maxsize=1 << 16)
def _join(first: Entry, second: Entry) -> Entry:
    """Return calls that were issued as one collective: they have one sequence number."""
    call = _as_one(first.post.call, second.post.call)
    return _entries_of(call, first.post.path)[min(first.state, second.state)]


def _elements(shape: Sequence[int | None]) -> int | None:
    known = [size for size in shape if size is not None]
    return prod(known) if len(known) == len(shape) else None


@lru_cache(maxsize=1 << 16)
def _call(recorded: _Recorded) -> Call:
    kind, inputs, input_dtypes, outputs, output_dtypes = recorded
    if kind in _BARRIERS:
        return Call("barrier")
    by_output = kind in _BY_OUTPUT or not inputs
    shapes: tuple[tuple[int | None, ...], ...] = outputs if by_output else inputs
    dtypes = output_dtypes if by_output else input_dtypes
    if not shapes or kind in _ENDS:
        return Call(kind)
    if len(dtypes) != len(shapes):
        raise ValueError("sizes and dtypes differ in number")
    if kind not in _BY_INPUT and kind not in _BY_OUTPUT:
        shapes = tuple((None,) * len(shape) for shape in shapes)
    return call_of_tensors(kind.removeprefix("_"), shapes, tuple(_DTYPES.get(dtype, dtype.lower()) for dtype in dtypes))


def _as_one(a: Call, b: Call) -> Call:
    if b.kind in _ENDS or b.shapes is None:
        return a
    if a.kind in _ENDS or a.shapes is None:
        return b
    kind = a.kind if b.kind in a.kind.split(" + ") else f"{a.kind} + {b.kind}"
    return call_of_tensors(kind, a.shapes + b.shapes, a.dtypes + b.dtypes)


# Files.


def read_all(paths: Iterable[Path]) -> list[Dump]:
    """Return the dumps in some files, by rank.

    Raises:
        DumpError: a file is no dump that can be read, or two are of one rank.
    """
    found: dict[int, Dump] = {}
    collects = gc.isenabled()
    gc.disable()  # millions of containers are made, and none is a part of a circle
    try:
        for path in _files(paths):
            dump = read(path)
            other = found.setdefault(dump.rank, dump)
            if other is not dump:
                raise DumpError(f"{other.file} and {path} are both of rank {dump.rank}: give one dump a rank")
    finally:
        if collects:
            gc.enable()
    return [found[rank] for rank in sorted(found)]


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        there = sorted(each for each in path.iterdir() if each.is_file() and _rank(each) is not None)
        if not there:
            raise DumpError(f"{path} has no file whose name ends in a rank")
        yield from there


def _rank(path: Path) -> int | None:
    """Return the rank that a file's name ends in: ``nccl_trace_rank_3``, ``3.json``."""
    name = path.name
    for ending in (".json", ".pickle", ".pkl"):
        name = name.removesuffix(ending)
    digits = re.search(r"\d{1,9}$", name, re.ASCII)
    return int(digits[0]) if digits is not None else None


def read(path: Path) -> Dump:
    """Return the dump in a file.

    Raises:
        DumpError: it is none that can be read.
    """
    rank = _rank(path)
    if rank is None:
        raise DumpError(f"{path}: the name must end in the rank, as in dump_3 or dump_3.json")
    if path.exists() and not path.is_file():  # a pipe would never end
        raise DumpError(f"{path} is not a file")
    try:
        raw = path.read_bytes()
        is_json = raw[:64].lstrip()[:1] == b"{"
        return _dump(_plain(raw, is_json=is_json), len(raw), Dump(rank, path, is_json))
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise DumpError(f"{path} asks for more memory than there is") from error


def _plain(raw: bytes, *, is_json: bool) -> Any:
    if not raw.strip():
        raise DumpError("is empty")
    if is_json:
        try:
            return json.loads(raw)
        except RecursionError as error:
            raise DumpError("is nested too deeply for a dump") from error
        except ValueError as error:
            raise DumpError(f"is not JSON, or is truncated: {error}") from error
    if raw[0] != 0x80:  # the first byte of a pickle
        raise DumpError("is neither JSON nor a pickle")
    _check_plain(raw)
    try:
        return pickle.loads(raw)  # noqa: S301  (nothing in it calls anything)
    except Exception as error:  # what a broken pickle raises is not said anywhere
        raise DumpError(f"is a broken or truncated pickle: {str(error)[:100]}") from error


_OF_FIXED_SIZE = re.compile(
    rb"(?s)(?:h.|[]}()uetsa\x85-\x89N\x94]|[qK].|M..|J.{4}|[rj]..[\x00-\x0f]\x00|\x8a\x08.{8}|[G\x95].{8})*+"
)
"""Instructions of a pickle that make dicts, lists, tuples and numbers, and of a memo of at most a million entries."""

_STRINGS = {ord("X"): 4, 0x8C: 1, 0x8D: 8, 0x8A: 1}
"""Instructions with a length, for strings and long numbers, and how many bytes it has."""


def _check_plain(raw: bytes) -> None:
    """Check that a pickle does nothing but make plain containers, strings and numbers.

    An unpickler that finds no classes is not enough: one that reads a memo with a thousand million entries makes
    room for them.

    Raises:
        DumpError: it does something else, or does not end where the file does.
    """
    at, end = 2, len(raw)
    while at < end:
        found = _OF_FIXED_SIZE.match(raw, at)
        at = found.end() if found is not None else at
        size = _STRINGS.get(raw[at]) if at < end else None
        if size is not None:
            at += 1 + size + int.from_bytes(raw[at + 1 : at + 1 + size], "little")
        elif raw[at : at + 1] == b".":
            if at + 1 < end:
                raise DumpError("has data after its end")
            return
        elif at < end:
            what = next((op.name for op in pickletools.opcodes if op.code == chr(raw[at])), f"{raw[at]:#x}")
            raise DumpError(f"has {what} at byte {at}: dumps contain only plain containers, so it is not loaded")
    raise DumpError("is a broken or truncated pickle")


# One dump.


def _dump(data: Any, size: int, dump: Dump) -> Dump:
    entries = _the(data, dict, "a dump").get("entries")
    version = data.get("version")
    if not isinstance(version, str) or version.partition(".")[0] != str(KNOWN_VERSION):
        raise DumpError(f"expected a flight recorder dump of version {KNOWN_VERSION}, got version {version!r:.40}")
    if entries is None:
        raise DumpError("has no entries: it was made without collectives")
    dump.groups = dict(_groups(_the(data.get("pg_config", {}), dict, "pg_config")))
    take = _Entries(dump, size).take
    for index, entry in enumerate(_the(entries, list, "entries")):
        try:
            take(entry)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DumpError(f"entry {index} is malformed: {error!r:.200}") from error
    if entries:
        dump.dropped = entries[0].get("record_id", 0) != 0
        newest = entries[-1].get("time_created_ns")
        dump.newest = newest if isinstance(newest, int) else 0
    return dump


def _the(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise DumpError(f"expected {what} as a {kind.__name__}, got a {type(value).__name__}")
    return value


def _groups(config: Mapping[Any, Any]) -> Iterator[tuple[str, GroupConfig]]:
    """Yield the process groups of a dump; gloo does not tell them."""
    for name, group in config.items():
        told = _the(group, dict, "a process group")
        description, ranks = _the(told.get("desc", ""), str, "a description"), str(told.get("ranks", "[]"))
        if not _RANKS.fullmatch(ranks):
            raise DumpError(f"expected ranks such as '[0, 1]', got {ranks!r:.60}")
        members = tuple(sorted(set(map(int, re.findall(r"\d+", ranks)))))
        if members:
            yield _the(name, str, "a name"), GroupConfig(description, members)


_NOWHERE = (Place("", 0, None, ""),)
_STATES = {"scheduled": State.SCHEDULED, "started": State.STARTED, "completed": State.DONE}


class _Entries:
    """Takes the entries of one dump, in the order in which they were recorded."""

    def __init__(self, dump: Dump, size: int) -> None:
        self._dump = dump
        self._left = size
        self._known: dict[Hashable, tuple[tuple[Entry, ...], dict[int, Entry] | None, Message | None]] = {}

    def take(self, entry: Any) -> None:
        """Take one entry."""
        name, description = entry["process_group"]
        inputs, outputs, frames = entry["input_sizes"], entry["output_sizes"], entry.get("frames", ())
        self._check_size(inputs, outputs, frames)
        sizes, output_sizes = tuple(map(tuple, inputs)), tuple(map(tuple, outputs))
        dtypes, output_dtypes = entry["input_dtypes"][: len(sizes)], entry["output_dtypes"][: len(output_sizes)]
        call = entry["profiling_name"], sizes, tuple(dtypes), output_sizes, tuple(output_dtypes)
        key = call, name, description, entry.get("is_p2p"), tuple(map(id, frames))  # a dump has each frame once
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._learn(call, name, description, frames, is_p2p=entry.get("is_p2p") is True)
        by_state, collectives, message = known
        state = _STATES[entry["state"]]
        if entry.get("retired") is True and call[0].startswith("gloo:"):  # all that gloo says
            state = State.DONE
        found = by_state[state]
        self._dump.last = name, found
        if collectives is not None:
            sequence = entry["collective_seq_id"]
            if type(sequence) is not int or sequence < 0:
                raise TypeError("collective_seq_id must be a number")
            before = collectives.get(sequence)
            collectives[sequence] = found if before is None else _join(before, found)
        elif message is not None and state is not State.DONE:
            self._dump.messages.append(message)

    def _check_size(self, inputs: Sequence[Any], outputs: Sequence[Any], frames: Sequence[Any]) -> None:
        """Check that tensors and frames are not more than the file has bytes, as with lists that are shared by many."""
        self._left -= len(inputs) + len(outputs) + len(frames)
        if self._left < 0:
            raise ValueError("more tensors and frames than the file has bytes")
        for dimensions in (*inputs, *outputs):
            if len(dimensions) > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has more than {_MOST_DIMENSIONS} dimensions")

    def _learn(
        self, recorded: _Recorded, name: Any, description: Any, frames: Sequence[Any], *, is_p2p: bool
    ) -> tuple[tuple[Entry, ...], dict[int, Entry] | None, Message | None]:
        """Return a call by its states, and the collectives of its group, or the message that it is.

        The end of several messages that were issued as one is neither.
        """
        if type(name) is not str or type(description) is not str:
            raise TypeError("a process group has a name and a description")
        backend, _, kind = recorded[0].rpartition(":")
        message = _SEND_OR_RECV.fullmatch(kind)
        path = tuple(_own_frames(frames)) or _NOWHERE
        by_state = _entries_of(_call((kind if message is None else MESSAGE, *recorded[1:])), path)
        self._dump.backends.add(backend)
        self._dump.groups.setdefault(name, GroupConfig(description, None))
        if message is None:
            ends_messages = kind in _ENDS and is_p2p
            return by_state, None if ends_messages else self._dump.calls.setdefault(name, {}), None
        sends = message[1] is not None
        source, target = (message[1], message[2]) if sends else (message[4], message[3])
        return by_state, None, Message(name, int(source), int(target), sends, by_state[0].post)


def _own_frames(frames: Sequence[Mapping[str, Any]]) -> list[Place]:
    """Return where the program is, the innermost first."""
    told = [Place(each["filename"], each["line"], None, each["name"]) for each in frames[:_LOOKED_AT]]
    if any(type(at.file) is not str or type(at.line) is not int or type(at.function) is not str for at in told):
        raise TypeError("a frame is a file, a line and a name")
    root = next((found[1] for found in (_IN_TORCH.fullmatch(at.file) for at in told) if found is not None), None)
    return [at for at in told if at.line > 0 and not _is_foreign(at.file, root)][:_MOST_FRAMES]


def _is_foreign(file: str, root: str | None) -> bool:
    """Whether a file is no part of the program, but of torch, whose folder the frames mostly tell.

    Reports show source lines, so what is there under that name but is no ordinary file is left out, too.
    """
    of_torch = file.startswith(root) if root is not None else "-packages/torch/" in file.replace("\\", "/")
    return of_torch or file.startswith("<frozen ") or file.endswith(_NOT_PYTHON) or not _may_be_source(file)


@lru_cache(maxsize=4096)
def _may_be_source(file: str) -> bool:
    try:
        found = os.stat(file)  # noqa: PTH116  (a name that a dump tells, not a path of ours)
    except (OSError, ValueError):
        return "\0" not in file
    return stat.S_ISREG(found.st_mode) and found.st_size < _LARGEST_SOURCE
