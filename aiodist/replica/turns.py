"""Turns: callers of one lane use it one after the other, in the order in which they have called; some come late."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from types import CodeType
from typing import Final, TypeAlias

import anyio
from anyio import get_cancelled_exc_class

from aiodist.collective.signature import Signature
from aiodist.vocabulary.errors import CollectiveError
from aiodist.vocabulary.reports import Location

_MOST_CHARACTERS: Final = 300


Call: TypeAlias = tuple[Signature, CodeType, int]


class Left:
    """Calls that this worker has left, for which others wait all the same, in their order."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Call, str]] = deque()

    def add(self, call: Call, refusal: str = "") -> None:
        """Note a call: it was cancelled before its turn, or refused for its arguments, in any thread."""
        self._calls.append((call, refusal))

    def taken(self) -> Iterator[tuple[Call, str]]:
        """Yield them, and forget them."""
        while self._calls:
            yield self._calls.popleft()


def refusal_text(error: Exception) -> str:
    """Return what other workers read of an error in the arguments of a call."""
    told = f"{type(error).__name__}: {error}".partition("\n")[0]
    return told if len(told) <= _MOST_CHARACTERS else f"{told[: _MOST_CHARACTERS - 2]} …"


@asynccontextmanager
async def turn(
    lock: anyio.Lock, prepare: Callable[[], Awaitable[None]], left: Callable[[], object]
) -> AsyncIterator[None]:
    """Have a lane for oneself.

    Args:
        lock: of the lane.
        prepare: makes the lane ready.
        left: is called when the caller is cancelled before its turn. Other workers wait for its call all the same.
    """
    try:
        await lock.acquire()
        try:
            await prepare()
        except BaseException:
            lock.release()
            raise
    except get_cancelled_exc_class():
        left()
        raise
    try:
        yield
    finally:
        lock.release()


def is_late_for(error: CollectiveError, place: Location) -> bool:
    """Return whether a call from a place is the one that has failed on other workers; else this one leaves that out."""
    places = {replica.location for replica in error.report.replicas if replica.location is not None}
    return not places or place in places
