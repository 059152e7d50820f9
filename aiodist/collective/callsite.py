"""Call sites: where a collective was called, kept as cheaply as it is written down, resolved when a report is written.

A call keeps its caller's code object and instruction offset (0.1 µs). Two of them mean the same place when file, line
and column are the same: one line of a ``finally`` block stands at several offsets, and a module that was loaded twice
has two code objects for it.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import NamedTuple, TypeAlias

from aiodist._core.report import Location

Path: TypeAlias = tuple[tuple[CodeType, int, str], ...]
"""A chain of calls, innermost first: code, offset, and the file, for code objects of two files can be equal."""


class Place(NamedTuple):
    """File, line and column of an instruction; what call sites are compared by."""

    file: str
    line: int
    column: int | None


_places: dict[tuple[str, CodeType, int], Place] = {}


def place(code: CodeType, offset: int) -> Place:
    """Return the place of the instruction at ``offset`` (bytes, as in ``frame.f_lasti``)."""
    key = (code.co_filename, code, offset)  # code objects of two files can be equal
    found = _places.get(key)
    if found is None:
        found = _places[key] = _find_place(code, offset)
    return found


def _find_place(code: CodeType, offset: int) -> Place:
    for index, (line, _, column, _) in enumerate(code.co_positions()):
        if index == offset // 2:
            return Place(code.co_filename, line or code.co_firstlineno, column)
    return Place(code.co_filename, code.co_firstlineno, None)


def same_place(code: CodeType, offset: int, other_code: CodeType, other_offset: int) -> bool:
    """Whether two instructions stand at the same place of the same file."""
    if code is other_code and offset == other_offset:
        return True
    return place(code, offset) == place(other_code, other_offset)


def same_path(path: Path, other: Path) -> bool:
    """Whether two chains of callers stand at the same places."""
    return len(path) == len(other) and all(
        same_place(*site[:2], *other_site[:2]) for site, other_site in zip(path, other, strict=True)
    )


def location(code: CodeType, offset: int) -> Location:
    """Return where an instruction stands, for a report."""
    return Location(code.co_filename, place(code, offset).line, code.co_qualname.rpartition(".<locals>.")[2])


def call_path(frame: FrameType) -> Path:
    """Return the chain of calls from ``frame`` outward, up to the replica's function.

    In a child task the chain ends where the task begins. Frames of event loops' own helpers are left out.
    """
    path: list[tuple[CodeType, int, str]] = []
    caller: FrameType | None = frame
    while caller is not None:
        module = caller.f_globals.get("__name__", "")
        if module in _ENDS:
            break
        if module.partition(".")[0] not in _PLUMBING:
            path.append((caller.f_code, caller.f_lasti, caller.f_code.co_filename))
        caller = caller.f_back
    return tuple(path)


_ENDS = frozenset(
    {
        "aiodist.replica.scheduler",
        "asyncio.events",
        "asyncio.base_events",
        "asyncio.runners",
        "trio._core._run",
        "uvloop.loop",
    }
)
_PLUMBING = frozenset({"asyncio", "trio", "anyio", "uvloop"})
