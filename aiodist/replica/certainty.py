"""Certainty that a replica can only wait: that nothing else of it can run, now or later, before what it waits for.

What acts for a replica runs in a copy of its context variables, for that is how its collectives know it: a task, a
callback, a timer, a worker thread, each has a `contextvars.Context` in which the replica is the current one. So all
contexts that exist are looked at. If a replica's are those of tasks that wait in its collectives, and no others, then
nothing else will ever act for it. A context that only tasks hold which are done, or the arguments of a `merge_call`,
counts for nothing.

It takes some milliseconds, for every object that the garbage collector knows is looked at. So it is asked only about
replicas that seem to wait for each other. What `gc.freeze` has taken out of the collector's sight is not found: where
that has been called since the run began, a timer may be among it, and nothing is certain. The run's own group, which is
older than all contexts of its replicas, tells.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any

from aiodist.replica.current import CrossReplica, current
from aiodist.replica.merge import MergeCall

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup


def only_wait(root: SyncGroup, replicas: Collection[int], waiting: Iterable[Context], tasks: Sequence[Any]) -> set[int]:
    """Return those of some replicas of which nothing can run but tasks that wait in collectives.

    Args:
        root: the run's own group.
        replicas: their ids.
        waiting: the context of each task that waits in a collective.
        tasks: the event loop's tasks, of asyncio or trio, that are not done.
    """
    known = {id(context): context for context in waiting}
    waits = Counter(_owner(root, context) for context in known.values())
    owners = Counter(owner for task in tasks for owner in {_owner(root, context) for context in contexts_of(task)})
    certain = {replica_id for replica_id in replicas if waits[replica_id] == owners[replica_id]}
    if not certain:
        return certain
    seen: list[Any] = [thing for thing in gc.get_objects() if type(thing) is Context or thing is root]
    contexts = [thing for thing in seen if thing is not root]
    if len(contexts) == len(seen):
        return set()
    for context in contexts:
        owner = _owner(root, context)
        if owner in certain and id(context) not in known:
            holders = (holder for holder in gc.get_referrers(context) if holder is not contexts and holder is not seen)
            if not all(_is_harmless(holder, tasks) for holder in holders):
                certain.discard(owner)
    return certain


def trio_tasks() -> list[Any]:
    """Return all tasks of the trio loop that runs."""
    from trio import lowlevel

    found: list[Any] = [lowlevel.current_root_task()]
    for task in found:  # which grows meanwhile
        found += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return found


def contexts_of(thing: Any) -> Iterator[Context]:
    """Return the contexts that a task, or a future with its callbacks, has at hand."""
    own = getattr(thing, "context", None)  # trio's tasks
    if isinstance(own, Context):
        yield own
        return
    for referent in gc.get_referents(thing):
        if type(referent) is Context:
            yield referent


def _owner(root: SyncGroup, context: Context) -> int | None:
    """Return the id of the replica, of this run, for which a context acts."""
    here = context.get(current)
    if here is None or isinstance(here, CrossReplica):
        return None
    member = here._member
    return member.replica_id if member.group.root is root else None


def _is_harmless(holder: Any, tasks: Sequence[Any]) -> bool:
    """Whether what holds a context will run nothing in it: a task that is done, or a merge_call's arguments."""
    if isinstance(holder, MergeCall):
        return True
    return type(holder) is type(tasks[0]) and all(holder is not task for task in tasks)
