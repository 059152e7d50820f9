"""The lane book: which group of replicas has which lane, kept by the coordinator.

A group across workers needs a lane over those workers alone. Each of them asks when all its own members have made the
group, and goes on without waiting. When all have asked, the book grants a lane: one that is free over the same
workers, or a new one, whose communicator they then make together (`Communicator.isplit`): each of them knows that the
others do, and all hear of grants in one order. So nobody ever waits inside an engine for a member that does not come.

The first that a worker asks for by one key is the same group as the first that the others ask for, and so on. A key is
the group that it is made in, its members' places there, and its name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple, TypeAlias

Run: TypeAlias = tuple[int, int]
GroupKey: TypeAlias = tuple[int, tuple[int, ...], str | None]
"""The serial number of the group that it is made in (0 is the run's own), places of the members there, and name."""


class Ask(NamedTuple):
    """A worker's members of a group have made it."""

    run: Run
    group: GroupKey
    workers: tuple[int, ...]


class Free(NamedTuple):
    """A worker uses a lane no longer."""

    number: int


class Finishing(NamedTuple):
    """A worker's replicas have ended: it asks for nothing more in a run."""

    run: Run


class Grant(NamedTuple):
    """A group has a lane.

    Attributes:
        run: in which run.
        group: the key that it was asked for by.
        workers: who has asked.
        number: the lane's, from 1; a new one means that its communicator is to be made.
        serial: a number that no other group has.
    """

    run: Run
    group: GroupKey
    workers: tuple[int, ...]
    number: int
    serial: int


class Unmade(NamedTuple):
    """All workers are finishing, and some have not made groups that this one has."""

    run: Run
    groups: tuple[GroupKey, ...]


Request: TypeAlias = Ask | Free | Finishing
Reply: TypeAlias = Grant | Unmade
Replies: TypeAlias = Iterator[tuple[int, Reply]]


class LaneBook:
    """The book.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._asked: defaultdict[Run, dict[tuple[GroupKey, tuple[int, ...]], Counter[int]]] = defaultdict(dict)
        self._finishing: defaultdict[Run, set[int]] = defaultdict(set)
        self._lanes: dict[int, tuple[int, ...]] = {}
        self._left_by: defaultdict[int, set[int]] = defaultdict(set)
        self._free: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._serials = count(1)

    def take(self, rank: int, request: Request) -> Replies:
        """Take what a worker asks or tells; yield replies, and whom they are for."""
        if isinstance(request, Ask):
            yield from self._ask(rank, request)
        elif isinstance(request, Finishing):
            yield from self._finish(rank, request.run)
        else:
            self._left_by[request.number].add(rank)
            workers = self._lanes[request.number]
            if len(self._left_by[request.number]) == len(workers):
                del self._left_by[request.number]
                self._free[workers].append(request.number)

    def forget(self, run: Run) -> None:
        """Grant nothing more in a run, which is over."""
        self._asked.pop(run, None)
        self._finishing.pop(run, None)

    def _ask(self, rank: int, ask: Ask) -> Replies:
        run, key, workers = ask
        asked = self._asked[run].setdefault((key, workers), Counter())
        asked[rank] += 1
        if len(asked) < len(workers):
            return
        asked -= Counter(workers)
        if not asked:
            del self._asked[run][key, workers]
            if not self._asked[run]:
                del self._asked[run]
        free = self._free[workers]
        number = free.pop() if free else len(self._lanes) + 1
        self._lanes[number] = workers
        grant = Grant(run, key, workers, number, next(self._serials))
        for worker in workers:
            yield worker, grant

    def _finish(self, rank: int, run: Run) -> Replies:
        self._finishing[run].add(rank)
        if len(self._finishing[run]) < self._workers:
            return
        asked = self._asked.get(run, {})
        self.forget(run)
        for worker in range(self._workers):
            yield worker, Unmade(run, tuple(key for (key, _), by in asked.items() if worker in by))
