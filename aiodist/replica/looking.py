"""A look at some replicas of a run, in words: what they wait for, in which circle, and which child tasks race."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiodist._core.report import Location
from aiodist._runtime.waits import Awaited, Look
from aiodist.replica.suspension import task_text
from aiodist.replica.wait_words import where
from aiodist.replica.waiter import Waiter, owner_replica
from aiodist.replica.waits import WaitGraph, tasks_here

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup

_MOST_REPLICAS = 128


def look_at_replicas(group: SyncGroup, replicas: Collection[int], calls: Mapping[int, Location]) -> Look:
    """Look at replicas of a run; of many only at the first few.

    Args:
        group: the run's own group.
        replicas: their ids.
        calls: for those of them whose child tasks may have made the call in question, where that was made.
    """
    few = sorted(replicas)[:_MOST_REPLICAS]
    graph = WaitGraph(tasks_here()) if group.size <= _MOST_REPLICAS else WaitGraph(_tasks_of(few))
    own = [w for w in graph.waiters if w.replica_id in few and (w.member is None or w.member.group is group)]
    waits = {
        w.member.replica_id: graph.sentence(w)
        for w in own
        if w.member is not None and w.suspension.kind is not Awaited.COLLECTIVE
    }
    circle = graph.cycle_text()
    if circle:
        certain = all(edge.certain for edge in graph.cycle())
        circle = f"They {'wait' if certain else 'may be waiting'} for each other: {circle}"
    return Look(waits, circle, _races(own, calls))


def _races(waiters: Sequence[Waiter], calls: Mapping[int, Location]) -> tuple[str, ...]:
    """Say in which child tasks replicas are at the calls in question; nothing unless all of them are."""
    callers: dict[int, str] = {}
    for waiter in waiters:
        here, call = waiter.suspension.location, calls.get(-1 if waiter.replica_id is None else waiter.replica_id)
        at_call = here is not None and call is not None and (here.file, here.line) == (call.file, call.line)
        if at_call and waiter.member is None and waiter.replica_id is not None:
            callers.setdefault(waiter.replica_id, f"{task_text(waiter.task)}{where(waiter)}")
    if len(callers) < len(calls):
        return ()
    return tuple(f"Replica {replica_id} calls in {task}." for replica_id, task in sorted(callers.items()))


def _tasks_of(replicas: Collection[int]) -> list[Any]:
    return [task for task in tasks_here() if owner_replica(task) in replicas]
