"""Who waits for whom: the tasks of an event loop, what each waits for, who could end that, and the cycles in it.

Looked up when something has failed or stands still; nothing is kept while all goes well. An edge goes from a task to
whoever could end its wait. It is certain for a collective (the replicas that have not arrived), for a task, and for a
lock or semaphore whose holder is seen: suspended inside ``async with lock``, which shows in what its frames hold on to.
For a queue, an event, a condition or a bare future nobody can know; there, an edge goes to the tasks that have the
same object at hand, and it serves only where no cycle of certain edges exists.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aiodist._runtime.waits import Awaited, Wait
from aiodist.replica.wait_words import all_together, conjugated, relation, together, verb, where
from aiodist.replica.waiter import (
    Waiter,
    at_hand,
    entered,
    is_plumbing_alone,
    look_at,
    merges,
    owner_of,
    rank,
    waits_alike,
    waits_for_a_run,
    wrapped,
)

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """One waiter, and one that could end its wait; ``certain`` unless that one only has the same object at hand."""

    waiter: Waiter
    on: Waiter
    certain: bool


_LONGEST_SENTENCE = 4
_SHARED = (
    Awaited.QUEUE,
    Awaited.EVENT,
    Awaited.CONDITION,
    Awaited.FUTURE,
    Awaited.LOCK,
    Awaited.SEMAPHORE,
)


class WaitGraph:
    """The tasks of an event loop at one moment, and who of them waits for whom.

    Args:
        tasks: tasks of asyncio, or of trio.
    """

    def __init__(self, tasks: Iterable[Any]) -> None:
        waiters = [look_at(task) for task in tasks]
        self.waiters = sorted((w for w in waiters if not is_plumbing_alone(w)), key=rank)
        self._by_task = {id(waiter.task): waiter for waiter in self.waiters}
        self._by_member = {id(waiter.member): waiter for waiter in self.waiters if waiter.member is not None}
        self._known: dict[object, tuple[Waiter, ...]] = {}
        self._names: dict[int, str] = {}  # of those who could end a wait, for thousands wait for the same thousands

    # Who could end a wait.

    def enders(self, waiter: Waiter) -> tuple[Waiter, ...]:
        """Return those who could end a wait, where that is certain."""
        kind, things = waiter.suspension.kind, waiter.suspension.things
        if not things:
            return ()
        if kind is Awaited.COLLECTIVE:
            return self._once(id(things[0]._meeting), lambda: self._missing(things[0]))
        if kind is Awaited.TASK:
            return self._once(id(waiter), lambda: tuple(filter(None, (self._by_task.get(id(t)) for t in things))))
        if kind in (Awaited.LOCK, Awaited.SEMAPHORE):
            return self._once(id(things[0]), lambda: self._holders_of(things[0]))
        return ()

    def users(self, waiter: Waiter) -> tuple[Waiter, ...]:
        """Return others that have what a task waits for at hand, where nobody is certain to end the wait."""
        if waiter.suspension.kind not in _SHARED or self.enders(waiter):
            return ()
        return self._once(("users", id(waiter)), lambda: self._users_for(waiter))

    def _users_for(self, waiter: Waiter) -> tuple[Waiter, ...]:
        users = self._users.get(id(waiter.suspension.things[0]), ())
        return tuple(user for user in users if user is not waiter and not waits_alike(user, waiter))

    def _once(self, key: object, find: Callable[[], tuple[Waiter, ...]]) -> tuple[Waiter, ...]:
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]

    def _missing(self, handle: Any) -> tuple[Waiter, ...]:
        meeting, group = handle._meeting, handle._member.group
        if meeting.agreed:
            return tuple(w for w in self.waiters if merges(w, meeting))
        replicas, first = group.root.members, group.root.offset  # the members of another group are parts of these
        missing = (replicas[m.replica_id - first] for m in group.members if not m.arrived_at(meeting.number))
        return tuple(self._by_member[id(m)] for m in missing if id(m) in self._by_member)

    def _holders_of(self, lock: Any) -> tuple[Waiter, ...]:
        found = self._holders.get(id(lock), ())
        owner = owner_of(lock)
        if not found and id(owner) in self._by_task:
            return (self._by_task[id(owner)],)
        return tuple(found)

    @cached_property
    def _users(self) -> dict[int, list[Waiter]]:
        """Who has what at hand, of all that somebody waits for, by the identity of that."""
        awaited = {id(thing) for waiter in self.waiters for thing in waiter.suspension.things}
        users: dict[int, list[Waiter]] = {}
        for waiter in self.waiters:
            for thing in awaited & at_hand(waiter):
                users.setdefault(thing, []).append(waiter)
        return users

    @cached_property
    def _holders(self) -> dict[int, list[Waiter]]:
        """Who is suspended inside ``with`` or ``async with`` of what, by the identity of that."""
        holders: dict[int, list[Waiter]] = {}
        for waiter in self.waiters:
            for manager in entered(waiter.chain):
                for lock in (manager, *wrapped(manager)):
                    holders.setdefault(id(lock), []).append(waiter)
        return holders

    # Cycles.

    def cycle(self) -> tuple[Edge, ...]:
        """Return a shortest cycle of waits, from its lowest replica on; empty when there is none.

        One in which every edge is certain goes first; failing that, one with edges by objects at hand.
        """
        return self._cycle(certain=True) or self._cycle(certain=False)

    def _cycle(self, *, certain: bool) -> tuple[Edge, ...]:
        found = self._any_cycle(certain=certain)
        shortest = min((self._shortest(waiter, certain=certain) for waiter in found), key=len, default=())
        if not shortest:
            return ()
        first = min(range(len(shortest)), key=lambda index: rank(shortest[index].waiter))
        return shortest[first:] + shortest[:first]

    def _others(self, waiter: Waiter, *, certain: bool) -> tuple[Waiter, ...]:
        return self.enders(waiter) or (() if certain else self.users(waiter))

    def _any_cycle(self, *, certain: bool) -> list[Waiter]:
        """Return the waiters on some cycle, found depth first.

        Thousands wait for the same thousands, so all those who wait for one thing share one iterator: what it has
        passed leads to no cycle.
        """
        left: set[int] = set()
        ways: dict[int, Iterator[Waiter]] = {}
        for start in self.waiters:
            path = [start] if id(start) not in left else []
            while path:
                others = self._others(path[-1], certain=certain)
                way = ways.setdefault(id(others), iter(others))
                step = next((other for other in way if id(other) not in left), None)
                if step is not None and step in path:
                    return path[path.index(step) :]
                if step is not None:
                    path.append(step)
                else:
                    left.add(id(path.pop()))
        return []

    def _shortest(self, start: Waiter, *, certain: bool) -> tuple[Edge, ...]:
        """Return the shortest way from a waiter on a cycle back to itself."""
        came: dict[int, Edge] = {}
        queue, seen = deque([start]), set()
        while queue:
            waiter = queue.popleft()
            others = self._others(waiter, certain=certain)
            if id(others) in seen:
                continue
            seen.add(id(others))
            for other in others:
                edge = Edge(waiter, other, certain=bool(self.enders(waiter)))
                if other is start:
                    return _way_back(edge, start, came)
                if id(other) not in came:
                    came[id(other)] = edge
                    queue.append(other)
        return ()

    # As values, and in words.

    def waits(self) -> tuple[Wait, ...]:
        """Return what each task waits for, as values: replicas first, by id."""
        return tuple(self.wait_of(waiter) for waiter in self.waiters)

    def wait_of(self, waiter: Waiter) -> Wait:
        """Return what one task waits for, as a value."""
        suspension = waiter.suspension
        on = tuple(other.who for other in self.enders(waiter))
        what = verb(suspension)
        return Wait(waiter.who, waiter.replica_id, suspension.kind, what, suspension.location, suspension.stack, on)

    def lines(self, *, replicas_alone: bool = False) -> list[str]:
        """Return a line for each way to wait, replicas that wait alike in one.

        Args:
            replicas_alone: leave out tasks that belong to no replica and run no merge function.
        """
        alike: dict[tuple[str, ...], list[Waiter]] = {}
        for waiter in self.waiters:
            if waiter.replica_id is not None or not (replicas_alone or waits_for_a_run(waiter)) or merges(waiter):
                alike.setdefault(self._clause(waiter), []).append(waiter)
        return [f"{together(waiters)} {conjugated(clause[0], len(waiters))}" for clause, waiters in alike.items()]

    def _clause(self, waiter: Waiter) -> tuple[str, ...]:
        clause = f"{verb(waiter.suspension)}{where(waiter)}{self._whom(waiter)}"
        return (clause,) if waiter.member is not None else (clause, waiter.who)

    def _whom(self, waiter: Waiter) -> str:
        enders = self.enders(waiter)
        kind = waiter.suspension.kind
        if kind is Awaited.LOCK and not enders:
            return "; who took it cannot be seen"
        if not enders or kind is Awaited.TASK:
            return ""
        if id(enders) not in self._names:
            self._names[id(enders)] = all_together(enders)
        return relation(kind, self._names[id(enders)], plural=len(enders) > 1)

    def sentence(self, waiter: Waiter) -> str:
        """Return what a task waits for, without its place, and where that is a task what that one waits for, too."""
        sentence = f"{verb(waiter.suspension)}{self._whom(waiter)}"
        for _ in range(_LONGEST_SENTENCE):
            enders = self.enders(waiter)
            if waiter.suspension.kind is not Awaited.TASK or len(enders) != 1:
                break
            waiter = enders[0]
            sentence = f"{sentence}, which {self._clause(waiter)[0]}"
        return sentence

    def cycle_text(self) -> str:
        """Return the cycle as a sentence; empty when there is none."""
        clauses = [f"{verb(edge.waiter.suspension)}{where(edge.waiter)}{_whom_of(edge)}" for edge in self.cycle()]
        if not clauses:
            return ""
        sentence = f"{self.cycle()[0].waiter.who} {', which '.join(clauses)}"
        return sentence if len(sentence) <= 110 else sentence.replace(", which ", ",\n  which ")


def _way_back(last: Edge, start: Waiter, came: dict[int, Edge]) -> tuple[Edge, ...]:
    way = [last]
    while way[0].waiter is not start:
        way.insert(0, came[id(way[0].waiter)])
    return tuple(way)


def look_at_loop(loop: asyncio.AbstractEventLoop | None = None) -> WaitGraph:
    """Return who waits for whom at this moment.

    Args:
        loop: an asyncio loop, running or not; None for the loop of asyncio or trio that runs here.
    """
    return WaitGraph(asyncio.all_tasks(loop) if loop is not None else tasks_here())


def tasks_here() -> Iterable[Any]:
    """Return the tasks of the loop of asyncio or trio that runs here."""
    trio = sys.modules.get("trio")
    root = None
    if trio is not None:
        try:
            root = trio.lowlevel.current_root_task()
        except RuntimeError:  # no trio runs here
            root = None
    return asyncio.all_tasks() if root is None else _trio_tasks(root)


def _trio_tasks(root: Any) -> Iterator[Any]:
    tasks = [root]
    while tasks:
        task = tasks.pop()
        yield task
        tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]


def _whom_of(edge: Edge) -> str:
    kind = edge.waiter.suspension.kind
    if not edge.certain:
        return f" that {edge.on.who} uses, too"
    if kind is Awaited.TASK:
        return "" if len(edge.waiter.suspension.things) == 1 else f", one of which is {edge.on.who}"
    if kind is Awaited.COLLECTIVE:
        return f" for {edge.on.who}"
    return f" that {edge.on.who} holds"
