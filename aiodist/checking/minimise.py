"""Minimising: the fewest changes of a failing schedule that still fail, by delta debugging (Zeller's ddmin)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def minimise(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a part of items that fails, and of which no single item can be left out.

    Args:
        items: they fail together, and not without any of them.
        fails: whether a part fails. One that raises `StopIteration` ends the search; what is found until then counts.
    """
    found, parts = list(items), 2
    try:
        while len(found) > 1:
            smaller = _smaller(found, parts, fails)
            if smaller is not None:
                found, parts = smaller, max(2, parts - 1 if len(smaller) > len(found) // parts else 2)
            elif parts >= len(found):
                break
            else:
                parts = min(len(found), parts * 2)
    except StopIteration:
        return found
    return found


def _smaller(items: Sequence[T], parts: int, fails: Callable[[Sequence[T]], bool]) -> list[T] | None:
    """Return a part that fails, or what is left without one that does; None when neither does."""
    bounds = [len(items) * i // parts for i in range(parts + 1)]
    ranges = list(pairwise(bounds))
    for begin, end in ranges:
        if fails(part := list(items[begin:end])):
            return part
    for begin, end in ranges if parts > 2 else ():
        if fails(rest := [*items[:begin], *items[end:]]):
            return rest
    return None
