"""Dumps of PyTorch's flight recorder as files: JSON, or a pickle of plain containers; read and checked without torch.

A dump contains the last collectives that one rank has issued: name, process group, sequence number, sizes and dtypes,
whether each has ended, and in pickles the stack. A broken job has left it, or a stranger has sent it, so everything in
it is checked before it is used. Equal calls are mostly one object for all dumps.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from aiodist._core.call import MESSAGE, Call, Place, Post
from aiodist._torch.report import call_of_tensors

_VERSION = "2"
_MOST_FRAMES = 8
_NAME = re.compile(r".*?(\d{1,9})(?:\.json|\.pickle|\.pkl)?", re.ASCII)
_SEND_OR_RECV = re.compile(r"(?:send (\d{1,9})->(\d{1,9})|recv (\d{1,9})<-(\d{1,9}))", re.ASCII)
_IN_TORCH = re.compile(  # modules that call collectives, directly or through C++
    r"(.*[\\/]torch[\\/])"
    r"(?:distributed[\\/](?:distributed_c10d|c10d_logger|utils)|nn[\\/]parallel[\\/]distributed|autograd[\\/]graph)\.py"
)
BETWEEN = re.compile(
    r"<(?:frozen |eval_with_key).*|(?:.*[\\/])?(?:typing_extensions|(?:_py_)?warnings|contextlib|torchinductor_.*)\.py"
)
"""Frames between torch and the program: of deprecated functions, the coalescing manager, and compiled code."""
_NOWHERE = (Place("", 0, None, ""),)

# Collectives whose sizes must agree between ranks; of the others, only kind and dtypes must.
_BY_INPUT = frozenset([
    "all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "all_gather_single", "gather",
    "all_gather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "allreduce_coalesced", "_broadcast_oop", "_reduce_oop", MESSAGE,
])  # fmt: skip
_BARRIERS = frozenset(["barrier", "all_reduce_barrier"])
_ENDS = frozenset(["coalesced", "ALLGATHER_coalesced", "REDUCE_SCATTER_coalesced"])
"""The end of a list of calls that were issued as one, which alone says whether they have ended."""

_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8",
    "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip


class DumpError(Exception):
    """A file is not a dump that can be read; the text says which and why."""


class Message(NamedTuple):
    """A send or a receive, between two ranks of a process group."""

    source: int
    target: int
    sends: bool


_END_OF_MESSAGES = Message(-1, -1, False)
"""The end of several messages that were issued as one."""


@dataclass(frozen=True, eq=False, slots=True)
class Entry:
    """A call with the places it was made from, and whether it has ended.

    Calls of equal meaning are the same collective: NCCL and gloo count elements, whatever their arrangement.
    """

    group: str
    post: Post
    done: bool
    message: Message | None
    meaning: Hashable


class GroupConfig(NamedTuple):
    """A process group: its author's name for it, and its ranks in the job, if the dump contains them."""

    description: str
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Dump:
    """The calls of one rank, by group and sequence number, and its sends and receives that have not ended."""

    rank: int
    file: Path
    is_json: bool  # which has no frames
    backends: set[str] = field(default_factory=set)
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    calls: dict[str, dict[int, Entry]] = field(default_factory=dict)
    messages: list[tuple[Any, Entry]] = field(default_factory=list)  # with a number, equal for those issued as one
    last: Post | None = None  # its newest call
    dropped: bool = False  # older calls are no longer in it


def read_all(paths: Iterable[Path]) -> list[Dump]:
    """Return the dumps in some files, by rank; a DumpError if one cannot be read, or two are of one rank."""
    found: dict[int, Dump] = {}
    for path in paths:
        dump = _read(path)
        if dump.rank in found:
            raise DumpError(f"{found[dump.rank].file} and {path} are both of rank {dump.rank}")
        found[dump.rank] = dump
    return [found[rank] for rank in sorted(found)]


def _read(path: Path) -> Dump:
    rank = _NAME.fullmatch(path.name)
    if rank is None:
        what = "" if path.is_file() else "this is a folder; " if path.is_dir() else "there is no such file; "
        raise DumpError(f"{path}: {what}the name must end in the rank, as in dump_3 or dump_3.json")
    try:
        raw = path.read_bytes()
        is_json = raw[:64].lstrip()[:1] == b"{"
        if not is_json:
            _check_plain(raw)
        data = json.loads(raw) if is_json else pickle.loads(raw)  # noqa: S301  (nothing in it calls anything)
        return _dump(data, Dump(int(rank[1]), path, is_json))
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # which ones a broken pickle raises is not documented
        raise DumpError(f"{path}: is not a dump, or is truncated: {str(error)[:100]}") from error


_OF_FIXED_SIZE = re.compile(
    rb"(?s)(?:h.|[]}()uetsa\x85-\x89N\x94]|[qK].|M..|J.{4}|[rj]..[\x00-\x0f]\x00|\x8a\x08.{8}|[G\x95].{8})*+"
)
"""Instructions of a pickle that make dicts, lists, tuples and numbers, and a memo of at most a million entries."""
_STRINGS = {ord("X"): 4, 0x8C: 1, 0x8D: 8, 0x8A: 1}
"""Instructions for strings and long numbers, with the number of bytes of their length."""


def _check_plain(raw: bytes) -> None:
    """Check that a pickle only makes plain containers, strings and numbers.

    An unpickler that finds no classes is not enough, because it allocates a memo of any size.
    """
    at = 2 if raw[:1] == b"\x80" else 0
    while raw[at : at + 1] != b".":
        found = _OF_FIXED_SIZE.match(raw, at)
        at = found.end() if found is not None else at
        size = _STRINGS.get(raw[at])
        if size is not None:
            at += 1 + size + int.from_bytes(raw[at + 1 : at + 1 + size], "little")
        elif raw[at] != ord("."):
            raise DumpError(f"has {raw[at : at + 20]!r} at byte {at}: dumps contain only plain containers")


def _dump(data: Any, dump: Dump) -> Dump:
    version = data.get("version") if isinstance(data, dict) else None
    if not str(version).startswith(f"{_VERSION}."):
        raise DumpError(f"expected a flight recorder dump of version {_VERSION}, got version {version!r:.40}")
    where, known = "pg_config", dict[Hashable, Entry]()
    try:
        for name, group in data["pg_config"].items():
            members = _ints(json.loads(group["ranks"]))
            if members and name:  # gloo's has no name
                dump.groups[_text(name)] = GroupConfig(_text(group["desc"]), tuple(sorted(set(members))))
        where = "the list of entries"
        dump.dropped = bool(data["entries"]) and data["entries"][0]["record_id"] != 0
        for index, entry in enumerate(data["entries"]):
            where = f"entry {index}"
            key = (  # most entries are like an earlier one, and a dump has each frame once
                *entry["process_group"], entry["profiling_name"], entry["state"], entry["retired"], entry["is_p2p"],
                tuple(map(tuple, entry["input_sizes"])), tuple(entry["input_dtypes"]),
                tuple(map(tuple, entry["output_sizes"])), tuple(entry["output_dtypes"]),
                tuple(map(id, entry.get("frames", ()))),
            )  # fmt: skip
            found = known.get(key)
            if found is None:
                found = known[key] = _parse(entry, dump)
            _add(found, entry, dump)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DumpError(f"{where} is malformed: {error!r:.200}") from error
    return dump


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"expected a text, got {value!r:.60}")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    if any(type(each) is not int or not 0 <= each < 1 << 62 for each in values):
        raise TypeError(f"expected numbers, got {values!r:.60}")
    return tuple(values)


def _add(found: Entry, entry: Any, dump: Dump) -> None:
    """Add the next call to a dump."""
    dump.last = found.post
    if found.message is None:
        sequence, calls = entry["collective_seq_id"], dump.calls.setdefault(found.group, {})
        if type(sequence) is not int or sequence < 0:
            raise TypeError("collective_seq_id must be a number")
        before = calls.get(sequence)
        calls[sequence] = found if before is None else _coalesced(before, found)
    elif found.message is not _END_OF_MESSAGES and not found.done:
        dump.messages.append((entry["p2p_seq_id"], found))
    elif found.message is _END_OF_MESSAGES and found.done:
        ended = entry["p2p_seq_id"], found.group
        dump.messages = [each for each in dump.messages if (each[0], each[1].group) != ended]


def _parse(entry: Any, dump: Dump) -> Entry:
    name, description = map(_text, entry["process_group"])
    backend, _, kind = entry["profiling_name"].rpartition(":")
    dump.backends.add(backend)
    dump.groups.setdefault(name, GroupConfig(description, ()))
    done = entry["retired"] is True if backend == "gloo" else entry["state"] == "completed"
    path = tuple(_own_frames(entry.get("frames", ()))) or _NOWHERE
    message = _END_OF_MESSAGES if kind in _ENDS and entry["is_p2p"] else None
    found = _SEND_OR_RECV.fullmatch(kind)
    if found is not None:
        sends = found[1] is not None
        source, target = (found[1], found[2]) if sends else (found[4], found[3])
        kind, message = MESSAGE, Message(int(source), int(target), sends)
    return _entry(name, Post(_call(kind, entry), path), done, message)


def _call(kind: str, entry: Mapping[str, Any]) -> Call:
    if kind in _BARRIERS:
        return Call("barrier")
    side = "output" if kind == "scatter" or not entry["input_sizes"] else "input"
    shapes: tuple[tuple[int | None, ...], ...] = tuple(map(_ints, entry[f"{side}_sizes"]))
    dtypes = tuple(map(_text, entry[f"{side}_dtypes"][: len(shapes)]))
    if not shapes or kind in _ENDS:
        return Call(kind)
    if len(dtypes) != len(shapes):
        raise ValueError("sizes and dtypes differ in number")
    if kind not in _BY_INPUT and kind != "scatter":
        shapes = tuple((None,) * len(shape) for shape in shapes)
    return call_of_tensors(kind.removeprefix("_"), shapes, tuple(_DTYPES.get(each, each.lower()) for each in dtypes))


@lru_cache(maxsize=1 << 16)
def _entry(group: str, post: Post, done: bool, message: Message | None = None) -> Entry:
    """Return a call; equal ones are one object."""
    call = post.call
    return Entry(group, post, done, message, (call.kind, call.dtypes, tuple(map(_elements, call.shapes or ()))))


def _elements(shape: Sequence[int | None]) -> int | None:
    return None if None in shape else prod(size or 0 for size in shape)


@lru_cache(maxsize=1 << 16)
def _coalesced(first: Entry, second: Entry) -> Entry:
    """Return two calls that were issued as one collective, with one sequence number."""
    a, b = first.post.call, second.post.call
    if b.shapes is not None and a.shapes is not None:
        kind = a.kind if b.kind in a.kind.split(" + ") else f"{a.kind} + {b.kind}"
        a = call_of_tensors(kind, a.shapes + b.shapes, a.dtypes + b.dtypes)
    return _entry(first.group, Post(a if a.shapes is not None else b, first.post.path), second.done)


def _own_frames(frames: Sequence[Mapping[str, Any]]) -> list[Place]:
    """Return the places outside of torch, whose folder is found in the frames, the innermost first."""
    places = [Place(_text(each["filename"]), _ints([each["line"]])[0], None, _text(each["name"])) for each in frames]
    inside = next((found[1] for found in (_IN_TORCH.fullmatch(at.file) for at in places) if found is not None), "\0")
    others = [at for at in places if not (at.file.startswith(inside) or BETWEEN.fullmatch(at.file))]
    return [at for at in others if at.line and _may_be_shown(at.file)][:_MOST_FRAMES]


@lru_cache(maxsize=4096)
def _may_be_shown(file: str) -> bool:
    """Return whether a file is a regular one or absent: reports show source lines, and ``/dev/zero`` has no end."""
    return "\0" not in file and (os.path.isfile(file) or not os.path.exists(file))  # noqa: PTH110, PTH113  (names)
