"""Inspection: the tasks of an event loop, what each waits for, and who waits for whom.

This is done when something has failed or makes no progress; until then nothing is recorded. An edge goes from a task to
the tasks that could end its wait. It is certain for a collective (the replicas that have not arrived), for a task, and
for a lock or semaphore whose holder is found: a task suspended inside ``async with lock``, whose frames refer to the
lock. Nobody can know what ends a wait for a queue, an event, a condition or a bare future, so there is no edge.
"""

from __future__ import annotations

import asyncio
import gc
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple

from aiodist._core.ledger import Ledger, Member, Replica
from aiodist._core.terms import Location
from aiodist._core.text import capitalised, conjugated, full_place, grouped, ids_briefly, place
from aiodist._core.waitgraph import shortest_cycle, stuck
from aiodist._runtime.current import current
from aiodist._runtime.merge import merge
from aiodist._runtime.stacks import Link, drives_replica, links
from aiodist._runtime.suspension import Awaited, Suspension, coroutine_of, suspension_of, task_text

_MOST_LINES = 16
_MOST_WAYS = 2
_LONGEST_SENTENCE = 4
_MOST_REPLICAS = 128
_HELD = (Awaited.LOCK, Awaited.SEMAPHORE)


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A task of asyncio or trio, as it was when it was inspected."""

    task: Any
    chain: tuple[Link, ...]  # of awaits
    frames: tuple[FrameType, ...]  # of the chain
    member: Member | None  # the replica whose function it runs
    replica: Replica | None  # the replica that it belongs to, perhaps as a child task
    merging: Any  # the slot whose merge function it runs
    suspension: Suspension

    @property
    def name(self) -> str:
        """What reports call it."""
        if self.member is not None:
            return f"replica {self.member.replica_id}"
        if self.merging is not None:
            return f"the merge function of #{self.merging.number}"
        text = task_text(self.task)
        return text if self.replica is None else f"replica {self.replica.id}'s {text.removeprefix('the ')}"

    @property
    def is_plumbing(self) -> bool:
        """Whether it is not the program's, but an event loop's task or a timer of aiodist."""
        if self.suspension.stack or self.member is not None:
            return False
        ours = any(frame.f_globals.get("__name__") == "aiodist._runtime.loop" for frame in self.frames)
        return ours or self.replica is None

    @property
    def waits_for_a_run(self) -> bool:
        """Whether it awaits `strategy.run`."""
        return any(frame.f_code.co_qualname == "_Replicas.results" for frame in self.frames)

    @property
    def where(self) -> str:
        """The place at which it waits, in brackets; empty if it is in no frame of the program."""
        location = self.suspension.location
        return f" ({place(location)})" if location is not None else ""


def _inspect(task: Any) -> Waiter:
    coroutine = coroutine_of(task)
    chain = tuple(links(coroutine))
    frames = tuple(link.frame for link in chain if link.frame is not None)
    member = next(filter(None, map(drives_replica, frames)), None)
    replica = replica_of(task) if member is None else member.replica
    merging = next((frame.f_locals.get("slot") for frame in frames if frame.f_code is merge.__code__), None)
    return Waiter(task, chain, frames, member, replica, merging, suspension_of(coroutine))


def replica_of(task: Any) -> Replica | None:
    """Return the replica that a task belongs to, by its context variables."""
    context = getattr(task, "context", None) or next((r for r in gc.get_referents(task) if type(r) is Context), None)
    return None if context is None else _replica_in(context)


def _replica_in(context: Context) -> Replica | None:
    owner = context.get(current)
    replica: Replica | None = None if owner is None else owner.replica
    return replica


def _entered(chain: Sequence[Link]) -> Iterator[Any]:
    """Yield the context managers that a suspended task is in: its frames' stacks hold their exits."""
    for index, link in enumerate(chain):
        inner = chain[index + 1].frame if index + 1 < len(chain) else None
        entering = inner.f_locals.get("self") if inner is not None and inner.f_code.co_name == "__aenter__" else None
        for manager in _managers(link.awaitable):
            if manager is not entering:
                yield from _with_inner(manager)


def _with_inner(manager: Any) -> Iterator[Any]:
    """Yield a context manager and, if it is a generator, the context managers that this is in."""
    yield manager
    for inner in _managers(getattr(manager, "gen", None)):
        yield from _with_inner(inner)


def _managers(awaitable: Any) -> Iterator[Any]:
    has_frame = any(hasattr(awaitable, frame) for frame in ("cr_frame", "ag_frame", "gi_frame"))
    referents = gc.get_referents(awaitable) if has_frame else []
    for index, one in enumerate(referents):
        if getattr(one, "__name__", "") not in {"__aexit__", "__exit__"}:
            continue
        manager = getattr(one, "__self__", None)
        if manager is None and index + 1 < len(referents):  # since Python 3.14 the function, followed by the object
            manager = referents[index + 1]
        yield manager


# Who waits for whom.


class WaitGraph:
    """The tasks of an event loop at one moment, and which of them wait for which.

    Attributes:
        waiters: the program's tasks: replicas by id, each before its child tasks, then the others.
        enders: for each, the tasks that could end its wait, if that is certain.
    """

    def __init__(self, tasks: Iterable[Any]) -> None:
        waiters = [_inspect(task) for task in tasks]
        self.waiters = sorted((waiter for waiter in waiters if not waiter.is_plumbing), key=_rank)
        self._by_task: dict[int | None, Waiter] = {id(waiter.task): waiter for waiter in self.waiters}
        self._by_replica = {id(w.member.replica): w for w in self.waiters if w.member is not None}
        self._of_slots: dict[int, tuple[Waiter, ...]] = {}
        self.enders = {waiter: self._find_enders(waiter) for waiter in self.waiters}
        self._names: dict[int, str] = {}  # of enders, because thousands of tasks may wait for the same thousands

    def _find_enders(self, waiter: Waiter) -> tuple[Waiter, ...]:
        kind, things = waiter.suspension.kind, waiter.suspension.things
        if kind is Awaited.COLLECTIVE and things:
            slot = things[0]
            if id(slot) not in self._of_slots:
                self._of_slots[id(slot)] = self._missing(slot)
            return self._of_slots[id(slot)]
        if kind is Awaited.TASK:
            return tuple(self._by_task[id(task)] for task in things if id(task) in self._by_task)
        return self._holders_of(things[0]) if kind in _HELD else ()

    def _missing(self, slot: Any) -> tuple[Waiter, ...]:
        if slot.matched:
            return tuple(waiter for waiter in self.waiters if waiter.merging is slot)
        missing = (member.replica for member in slot.group.members if not member.has_posted(slot))
        return tuple(self._by_replica[id(r)] for r in missing if id(r) in self._by_replica)

    def _holders_of(self, lock: Any) -> tuple[Waiter, ...]:
        if id(lock) in self._holders:
            return tuple(self._holders[id(lock)])
        # Locks of trio and anyio know their owner, those of asyncio do not. anyio describes the task, trio names it.
        owner = getattr(lock.statistics(), "owner", None) if hasattr(lock, "statistics") else None
        found = None if owner is None else self._by_task.get(getattr(owner, "id", id(owner)))
        return () if found is None else (found,)

    @cached_property
    def _holders(self) -> dict[int, list[Waiter]]:
        """The tasks suspended inside ``with`` or ``async with``, by the identity of the context manager."""
        holders: dict[int, list[Waiter]] = {}
        for waiter in self.waiters:
            for manager in _entered(waiter.chain):
                for lock in (manager, getattr(manager, "_lock", None)):  # a condition's own, and an adapter's
                    holders.setdefault(id(lock), []).append(waiter)
        return holders

    @cached_property
    def cycle(self) -> tuple[Waiter, ...]:
        """A shortest cycle in which each waits for the next, from its lowest replica on; empty if there is none.

        Thousands may wait for the same thousands, so tasks that are on no cycle are removed first.
        """
        waits = {waiter: [id(each)] if each else [] for waiter, each in self.enders.items()}
        left = stuck(waits, {id(each): each for each in self.enders.values()})
        return tuple(shortest_cycle(self.enders, [waiter for waiter in self.waiters if waiter in left]))

    # As text.

    def lines(self, *, replicas_alone: bool = False) -> list[str]:
        """Return a line for each kind of wait, with all tasks that wait so, or only replicas and merge functions."""
        alike = grouped(
            (self._clause(waiter), waiter)
            for waiter in self.waiters
            if waiter.replica or waiter.merging or not (replicas_alone or waiter.waits_for_a_run)
        )
        return [f"{_together(waiters)} {conjugated(clause[0], len(waiters))}" for clause, waiters in alike.items()]

    def _clause(self, waiter: Waiter) -> tuple[str, ...]:
        clause = f"{waiter.suspension.text}{waiter.where}{self._whom(waiter)}"
        if waiter.member is not None:
            return (clause,)
        return clause, task_text(waiter.task) if waiter.merging is None else waiter.name

    def _whom(self, waiter: Waiter) -> str:
        enders = self.enders[waiter]
        kind = waiter.suspension.kind
        if kind is Awaited.LOCK and not enders:
            return "; who took it cannot be seen"
        if not enders or kind is Awaited.TASK:
            return ""
        if id(enders) not in self._names:
            self._names[id(enders)] = _all_together(enders)
        whom = self._names[id(enders)]
        return f", which {whom} hold{'s' * (len(enders) == 1)}" if kind in _HELD else f" for {whom}"

    def sentence(self, waiter: Waiter) -> str:
        """Return what a task waits for, without the place; if that is a task, also what that one waits for."""
        sentence = f"{waiter.suspension.text}{self._whom(waiter)}"
        for _ in range(_LONGEST_SENTENCE):
            enders = self.enders[waiter]
            if waiter.suspension.kind is not Awaited.TASK or len(enders) != 1:
                break
            waiter = enders[0]
            sentence = f"{sentence}, which {self._clause(waiter)[0]}"
        return sentence

    def cycle_text(self) -> str:
        """Return the cycle as a sentence; empty if there is none."""
        if not self.cycle:
            return ""
        pairs = zip(self.cycle, (*self.cycle[1:], self.cycle[0]), strict=True)
        clauses = [f"{waiter.suspension.text}{waiter.where}{_on_whom(waiter, next_one)}" for waiter, next_one in pairs]
        sentence = f"{self.cycle[0].name} {', which '.join(clauses)}."
        sentence = sentence if len(sentence) <= 110 else sentence.replace(", which ", ",\n  which ")
        return f"The cycle: {sentence}"

    def report(self, headline: str, *more: str, replicas_alone: bool = False) -> str:
        """Return the text on tasks that cannot continue: who waits where and for what, and the cycle.

        For the first few replicas that wait outside of collectives, it names the awaits that led there.
        """
        waits = self.lines(replicas_alone=replicas_alone)
        beyond = len(waits) - _MOST_LINES
        outside = (w for w in self.waiters if w.member is not None and w.suspension.kind is not Awaited.COLLECTIVE)
        ways = grouped((waiter.suspension.stack[:-1], waiter) for waiter in outside)
        lines = [headline, *(f"  {line}" for line in waits[:_MOST_LINES])]
        if beyond > 0:
            lines.append(f"  … and {beyond} more")
        for way, waiters in [*ways.items()][:_MOST_WAYS]:
            if way:
                lines.append(f"{capitalised(_together(waiters))} got there through {', '.join(map(full_place, way))}.")
        if self.cycle:
            lines.append(self.cycle_text())
        return "\n".join([*lines, *more])


def _rank(waiter: Waiter) -> tuple[int, bool, str]:
    return sys.maxsize if waiter.replica is None else waiter.replica.id, waiter.member is None, waiter.name


def _together(waiters: Sequence[Waiter]) -> str:
    """Return tasks that wait alike as text: replicas and their child tasks by ids, any other task with a count."""
    if waiters[0].member is not None:
        return ids_briefly(w.member.replica_id for w in waiters if w.member is not None)
    parents = {w.replica.id for w in waiters if w.replica is not None}
    if len(parents) > 1:
        return f"{ids_briefly(parents)}'s {task_text(waiters[0].task).removeprefix('the ').replace('task', 'tasks', 1)}"
    return waiters[0].name if len(waiters) == 1 else f"{waiters[0].name} and {len(waiters) - 1} more like it"


def _all_together(waiters: Sequence[Waiter]) -> str:
    """Return replicas and other tasks as a list in one text."""
    replicas = [w.member.replica_id for w in waiters if w.member is not None]
    parts = ([ids_briefly(replicas)] if replicas else []) + [w.name for w in waiters if w.member is None]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _on_whom(waiter: Waiter, next_one: Waiter) -> str:
    kind = waiter.suspension.kind
    if kind is Awaited.TASK:
        return "" if len(waiter.suspension.things) == 1 else f", one of which is {next_one.name}"
    return f" for {next_one.name}" if kind is Awaited.COLLECTIVE else f" that {next_one.name} holds"


def inspect_loop(loop: asyncio.AbstractEventLoop | None = None) -> WaitGraph:
    """Return who waits for whom at this moment, in an asyncio loop or in the loop that runs here."""
    return WaitGraph(asyncio.all_tasks(loop) if loop is not None else _tasks_here())


def _tasks_here() -> Iterable[Any]:
    """Return the tasks of the loop of asyncio or trio that runs here."""
    trio = sys.modules.get("trio")
    if trio is not None:
        with suppress(RuntimeError):  # trio does not run here
            tasks = [trio.lowlevel.current_root_task()]
            for task in tasks:  # which grows
                tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
            return tasks
    return asyncio.all_tasks()


# A run.


class Inspection(NamedTuple):
    """What an inspection of a run's tasks has found, as texts by replica id."""

    waits: Mapping[int, str] = {}  # what replicas wait for that are not in a collective
    cycle_text: str = ""  # of waits
    calls: Mapping[int, tuple[tuple[Location, str], ...]] = {}  # where child tasks are suspended


def inspect_run(ledger: Ledger) -> Inspection:
    """Inspect a run's tasks; with many replicas, only those of the first few that do not wait in a collective."""
    if ledger.root.size <= _MOST_REPLICAS:
        tasks = _tasks_here()
    else:
        waiting = {member.replica for slot in ledger.open_slots() for member in slot.waiting()}
        others = [replica for replica in ledger.replicas if replica not in waiting and replica.end is None]
        few = set(map(id, others[:_MOST_REPLICAS]))
        # All tasks are not even listed for nothing: thousands of simulated workers inspect their runs in one loop.
        tasks = [task for task in _tasks_here() if id(replica_of(task)) in few] if few else []
    graph = WaitGraph(tasks)
    of_run = set(map(id, ledger.replicas))
    waits: dict[int, str] = {}
    calls: dict[int, list[tuple[Location, str]]] = {}
    for waiter in graph.waiters:
        replica = waiter.replica
        if replica is None or id(replica) not in of_run:
            continue
        here = waiter.suspension.location
        if waiter.member is None and here is not None:
            calls.setdefault(replica.id, []).append((here, f"{task_text(waiter.task)}{waiter.where}"))
        elif waiter.member is not None and waiter.suspension.kind is not Awaited.COLLECTIVE:
            waits[replica.id] = graph.sentence(waiter)
    return Inspection(waits, graph.cycle_text(), {replica_id: tuple(found) for replica_id, found in calls.items()})


_ELSEWHERE = "elsewhere"
"""Stands for a group's members that other processes run."""


def waits_for_others(awaitable: Any, replicas: int) -> bool:
    """Return whether a replica waits for a lock or, if there are few replicas, for tasks."""
    kind = suspension_of(awaitable).kind
    return kind in _HELD or (kind is Awaited.TASK and replicas <= _MOST_REPLICAS)


def deadlocked(ledger: Ledger, pending: Iterable[Context]) -> set[int]:
    """Return the ids of a run's replicas that will certainly never continue.

    All tasks of such a replica wait: in a collective that lacks a replica that will never continue, for a lock held by
    a task that will never continue, or for such a task. A replica may continue if one of its tasks waits for an event,
    a queue, a sleep, a thread or I/O, or has a time limit around its wait, or if the replica has a timer. Replicas of
    other processes are unknown here, and assumed never to continue. ``pending`` has the contexts of the event loop's
    scheduled callbacks and timers.
    """
    graph = inspect_loop()
    of_run = set(map(id, ledger.replicas))
    limited = {id(waiter.replica or waiter.task) for waiter in graph.waiters if _has_time_limit(waiter)}
    ways: dict[Any, Sequence[Sequence[Any]]] = {}  # by task or replica, the ways to continue: those who must all act
    own: dict[int, list[int]] = {}
    for waiter in graph.waiters:
        replica = waiter.replica
        elsewhere = replica is not None and id(replica) not in of_run  # no proof is attempted over several runs
        may_act = elsewhere or id(replica or waiter.task) in limited
        ways[id(waiter.task)] = () if may_act else _ways_out(graph, waiter)
        own.setdefault(id(replica), []).append(id(waiter.task))
    for context in pending:
        own.setdefault(id(_replica_in(context)), []).append(id(context))
        ways[id(context)] = ()
    for replica_node in of_run & own.keys():  # a replica continues when any of its tasks does
        ways["replica", replica_node] = [[task] for task in own[replica_node]]
    waits = {node: [(node, index) for index in range(len(found))] for node, found in ways.items()}
    blockers = {(node, index): all_of_them for node, found in ways.items() for index, all_of_them in enumerate(found)}
    gone = {("replica", id(replica)) for replica in ledger.replicas if replica.end is not None}
    left = stuck(waits, blockers, {*gone, _ELSEWHERE})
    return {replica.id for replica in ledger.replicas if ("replica", id(replica)) in left}


def _ways_out(graph: WaitGraph, waiter: Waiter) -> Sequence[Sequence[Any]]:
    """Return the ways in which a wait can end, each as the tasks that must all act; empty if that is not certain."""
    kind, things = waiter.suspension.kind, waiter.suspension.things
    enders = [id(each.task) for each in graph.enders[waiter]]
    if kind is Awaited.COLLECTIVE and things:
        slot = things[0]
        elsewhere = [_ELSEWHERE] if slot.group.spans else []
        if slot.complete or (slot.matched and not enders and not elsewhere):
            return ()
        missing = [("replica", id(m.replica)) for m in slot.group.members if not m.has_posted(slot)]
        return [enders if slot.matched and enders else [*missing, *elsewhere]]
    if kind is Awaited.TASK:
        return [enders] if enders and len(enders) == len(things) else ()
    return [[each] for each in enders]


def _has_time_limit(waiter: Waiter) -> bool:
    """Return whether a timeout, or the deadline of a cancel scope, can still end a task's wait.

    A shield stops the deadlines of scopes around it, but not asyncio's own timeouts, which pass once each.
    """
    if any(frame.f_code.co_name == "wait_for" and frame.f_locals.get("timeout") is not None for frame in waiter.frames):
        return True
    shielded = False
    for manager in reversed([*_entered(waiter.chain)]):
        if isinstance(manager, asyncio.Timeout):
            if manager.when() is not None and not manager.expired():
                return True
            continue
        scope = getattr(manager, "cancel_scope", manager)  # that of a task group, or itself
        deadline = getattr(scope, "deadline", None)
        if not shielded and isinstance(deadline, (int, float)) and deadline != math.inf:
            return True
        shielded = shielded or getattr(scope, "shield", None) is True
    return False
