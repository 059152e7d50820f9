"""What strategies have of their engine: communicators, and how these are given back.

All workers of a communicator must give it back, and nothing may be in the air there when they do: its number is used
again, and what nobody has received would be taken for a part of something else. So they do it where they come together
anyway, in the first meeting of a further strategy. Each tells there which communicators it has put away: their strategy
is closed, or was collected; nothing can be begun there any more, and all that was begun is complete. Those that all of
their workers name, with the same operations, are given back by all of them, in one order. The others wait for another
such meeting. Where a worker is lost, or has begun what others have not, they wait until the process ends.

A communicator is known by a number that the first worker of its strategy has drawn, and by its name in that strategy.
So it does not matter which workers meet, as long as all of its own do, nor in what order strategies were made.

What was rejected: to give back in `close`, which would wait for workers that do not come; or in a finalizer, which runs
in the midst of anything. To use communicators again for further strategies: one must be had before it is known which,
and all that is saved is the time to make one, a quarter of a millisecond with MPI.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

if TYPE_CHECKING:
    from aiodist.workers.communicator import Request
    from aiodist.workers.separate import SeparateProcess

_NUMBER_BYTES: Final = 8
_MANY: Final = 64
_lock: Final = threading.Lock()

in_the_air: Final[deque[Request]] = deque()
"""Requests that nobody waits for any more; they keep the buffers that the engine may still read and write."""


class Holdings:
    """The communicators of one strategy.

    Attributes:
        number: that of the strategy, the same on all its workers; empty before they have met.
        made: by name, those that are not given back.
        left: the strategy is of no use any more.
    """

    def __init__(self) -> None:
        self.number = b""
        self.made: dict[str, SeparateProcess] = {}
        self.left = False

    def add(self, one: SeparateProcess) -> None:
        """Take a communicator, which has a name that no other of the strategy has."""
        self.made[one.name] = one
        if self not in known:
            known.append(self)


known: Final[list[Holdings]] = []
"""Those of this process that have any."""


class Key(NamedTuple):
    """What a communicator is known by, and what all of its workers must say alike to give it back.

    Attributes:
        strategy: the number of the strategy.
        name: its own.
        size: how many workers it has.
        begun: how many operations have been begun.
        moved: which those are.
    """

    strategy: bytes
    name: str
    size: int
    begun: int
    moved: int


class Told(NamedTuple):
    """What a worker tells in a first meeting.

    Attributes:
        number: for the strategy that is made; the first worker's counts.
        put_away: the communicators that it can give back.
    """

    number: bytes
    put_away: frozenset[Key]


def tell(workers: int) -> Told:
    """Return what this worker tells so many, itself among them, and put away what it can."""
    if workers == 1:  # it may be what a worker has forked, which must not call the engine
        return Told(b"", frozenset())
    _collect()
    with _lock:
        _land()
        mine = [holdings for holdings in list(known) if holdings.left and holdings.number]
        return Told(os.urandom(_NUMBER_BYTES), frozenset(key for holdings in mine for key in _put_away(holdings)))


def _collect() -> None:
    """Find strategies that nobody has closed, and nobody has any more: the collector may let hundreds of them lie."""
    if len(known) >= _many[0]:
        gc.collect()
        _many[0] = max(_MANY, 2 * sum(not holdings.left for holdings in list(known)))


_many: Final = [_MANY]  # from how many strategies on it is worth looking


def _put_away(holdings: Holdings) -> Iterable[Key]:
    for name, one in list(holdings.made.items()):
        if one.put_away():
            yield Key(holdings.number, name, one.size, one.begun, one.moved)


def _land() -> None:
    """Ask for what nobody waits for, so that what is complete counts as that."""
    for _ in range(len(in_the_air)):
        request = in_the_air.popleft()
        try:
            over = request.test()
        except Exception:  # noqa: BLE001  (of the engine: then it never ends)
            over = False
        if not over:
            in_the_air.append(request)


def give_back(told: Iterable[Told]) -> None:
    """Give back what all workers of it, which are all in this meeting, have put away."""
    workers = Counter(key for one in told for key in one.put_away)
    with _lock:
        mine: Mapping[bytes, Holdings] = {holdings.number: holdings for holdings in list(known)}
        for key in sorted(key for key, count in workers.items() if count == key.size):
            one = mine[key.strategy].made.pop(key.name, None) if key.strategy in mine else None
            if one is not None:  # else a meeting in another thread has seen to it
                with suppress(Exception):  # of the engine: the next strategy is not to fail for it
                    one.give_back()
        for holdings in mine.values():
            if not holdings.made:
                known.remove(holdings)


class PutAway:
    """Stands where the engine's communicator was."""

    def __getattr__(self, name: str) -> NoReturn:
        """Let nothing be begun.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("the strategy is closed")
