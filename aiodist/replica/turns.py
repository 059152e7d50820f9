"""Turns: callers of one lane use it one after the other, in the order in which they have called; some come late."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio import get_cancelled_exc_class

from aiodist.vocabulary.errors import CollectiveError
from aiodist.vocabulary.reports import Location


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
