"""Refusals: a collective asked for in the wrong place, and what to say of it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from aiodist._core.errors import ReplicaContextError
from aiodist.replica.current import CrossReplica, current

if TYPE_CHECKING:
    from aiodist.replica.context import ReplicaContext

RETIRED: Final = -1
ANY_THREAD: Final = 0
NO_RUN: Final = -2


def check_current(context: ReplicaContext, what: str) -> None:
    """Check that a replica may issue collectives through this context, here and now.

    Raises:
        ReplicaContextError: it may not.
    """
    thread = context._thread
    if thread == RETIRED:
        raise ReplicaContextError(
            f"{what} was called through the context of {_name(context)}, whose function has ended; "
            "a replica's collectives are issued, and its child tasks end, before its function returns"
        )
    if thread == NO_RUN:
        raise ReplicaContextError(
            f"{what} was called through a context of {_name(context)} that was made by hand; the other replicas are "
            "not running: use `await strategy.run(fn)` and, in fn, `get_replica_context()`"
        )
    if thread != ANY_THREAD and thread != threading.get_ident():
        raise ReplicaContextError(
            f"{what} of {_name(context)} was called in the thread {threading.current_thread().name!r}; "
            "collectives are issued in the event loop's thread: return the value from run_sync and pass it there"
        )
    _check_place(context, current.get(), what)


def _check_place(context: ReplicaContext, here: Any, what: str) -> None:
    if here is context or (here is None and context._thread == ANY_THREAD):
        return
    if here is not None and not isinstance(here, CrossReplica) and here._of_run is context._of_run:
        return  # one is that of a group
    if isinstance(here, CrossReplica):
        raise ReplicaContextError(
            f"{what} of {_name(context)} was called in cross-replica context (under strategy.scope() or in a merge "
            "function); there, combine per-replica values with `await strategy.reduce(op, value, axis)` or gather"
        )
    if here is None:
        raise ReplicaContextError(
            f"{what} was called through the context of {_name(context)} outside that replica; "
            "collectives are issued inside the function that strategy.run runs"
        )
    raise ReplicaContextError(
        f"{what} was called through the context of {_name(context)} inside {_name(here)}; "
        "each replica uses its own: ctx = aiodist.get_replica_context()"
    )


def group_here() -> Any:
    """Return the group whose merge function this is, where `new_group` made it; else None."""
    here = current.get()
    return here.group if isinstance(here, CrossReplica) else None


def check_all_workers_are_here() -> None:
    """Check that this is no merge function of a group, which only the workers with members of it run.

    Raises:
        ReplicaContextError: it is.
    """
    group = group_here()
    if group is not None:
        raise ReplicaContextError(
            f"what all workers do together was asked for in the merge function of {group.label}, which only the "
            "workers with members of it run; combine values in the group first, e.g.  await group.all_reduce(op, value)"
        )


def _name(context: ReplicaContext) -> str:
    member = context._member
    return f"replica {member.replica_id} of {member.group.root.size}"
