"""Where a script makes its calls, and equal calls that its ranks have made in different orders.

Different places are no mistake: rank 0 may broadcast at one line what the others receive at another. But if ranks make
equal calls at the same places in different orders, they combine values of different calls, which torch does not notice.
So where places differ, and a few calls later all ranks have made the same calls at the same places, calls have been
swapped. Two places are the same by their line or, since ranks may be in different branches, by the text of the call in
one function; callers count, too.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

from aiodist._core.call import MESSAGE, OrderCheck, Place, Post, place
from aiodist._core.callers import CallerOrder, mixed_hash
from aiodist._core.ledger import Group, Slot
from aiodist._core.snapshot import Snapshot
from aiodist._torch.dumps import BETWEEN
from aiodist._torch.private import torch

_PLUMBING = tuple(
    f"{Path(module.__file__ or '').resolve().parent}{os.sep}" for module in (torch, sys.modules["aiodist"], os)
)
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"
_MOST_CALLERS = 8
_MOST_LINES = 10  # of a call
_MOST_CALLS = 8  # of a group, over which their order is compared

Sites: TypeAlias = tuple[Place, tuple[Any, ...]]
"""A call's place, and those of its callers, each followed by an offset of 0, as the ledger keeps them."""


@cache
def is_plumbing(file: str) -> bool:
    """Return whether a file belongs to torch, the standard library or aiodist, not to the program."""
    own = file.startswith(_PLUMBING) and not (_SITE_PACKAGES in file and not file.startswith(_PLUMBING[:2]))
    return own or BETWEEN.fullmatch(file) is not None


def places_of(frame: Any) -> Iterator[Place]:
    """Yield the places of the program's own frames, from the innermost outward."""
    while frame is not None:
        if not is_plumbing(frame.f_code.co_filename):
            yield place(frame.f_code, frame.f_lasti)
        frame = frame.f_back


def call_sites() -> Sites:
    """Return where the program makes the current call."""
    places = list(islice(places_of(sys._getframe(1)), _MOST_CALLERS))  # noqa: SLF001  (documented)
    first, *callers = places or [Place("<unknown>", 1, None, "?")]
    return first, tuple(part for caller in callers for part in (caller, 0))


def _text(at: Place) -> tuple[str, str, str] | Place:
    """Return the text of a call up to where its parentheses end, with its file and function; else its place."""
    text, depth, column = "", 0, at.column or 0
    for line in linecache.getlines(at.file)[at.line - 1 : at.line + _MOST_LINES]:
        for char in line[column:].strip():
            if text.endswith(")") and not depth and char not in ".([":
                return at.file, at.function, text
            text += char
            depth += (char == "(") - (char == ")")
        if depth <= 0:
            return at.file, at.function, text
        column = 0
    return at


_LIKENESSES: Final = tuple((look, depth) for look in (lambda at: at, _text) for depth in (1, 2, 3, 1 + _MOST_CALLERS))
"""In what two posts may be alike: their places or texts, with those of so many callers."""


@lru_cache(maxsize=4096)
def _likenesses(post: Post) -> tuple[int, ...]:
    """Return a hash for each likeness; equal ones mean that posts are alike in it."""
    return tuple(mixed_hash((post.call, *map(look, post.path[:depth]))) for look, depth in _LIKENESSES)


class SwappedCalls:
    """Looks for swapped calls among the last ones of each group since a barrier."""

    def __init__(self) -> None:
        self._orders: dict[Group, CallerOrder] = {}

    def first(self, slot: Slot) -> int | None:
        """Note a matched call; return the first of the calls that, up to it, ranks have made in different orders."""
        if slot.call.shapes is None or slot.call.kind == MESSAGE:
            self._orders.pop(slot.group, None)  # a barrier: what came before is over
        elif slot.others is not None:
            posts = (slot.post_of(each.position) for each in slot.group.members)
            order = self._orders.setdefault(slot.group, CallerOrder(_MOST_CALLS))
            return order.note(slot.number, map(_likenesses, posts))
        return None


def only_swapped(snapshot: Snapshot, slot: Slot, first: int) -> Snapshot:
    """Return the part of a snapshot that shows the swapped calls of a group, from a number on up to ``slot``."""
    root = snapshot.groups[0]
    group = next(each for each in snapshot.groups if each.key == slot.group.key)
    slots = sorted((*group.history, *group.open), key=lambda each: each.number)
    shown = replace(
        group,
        history=tuple(each for each in slots if each.number < first and len(each.posts) == 1),
        open=tuple(each._replace(waiting=()) for each in slots if first <= each.number <= slot.number),
    )
    groups = (shown,) if group is root else (replace(root, history=(), open=()), shown)
    facts = tuple(replace(each, stack=()) for each in snapshot.replicas)  # they are at the last call, not the first
    return replace(snapshot, order_check=OrderCheck.CALL_PATH, replicas=facts, groups=groups, blocked=(), deadlocked=())
