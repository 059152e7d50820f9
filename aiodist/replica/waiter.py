"""One task that is looked at: whose it is, what it is suspended in, and what its frames hold on to."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from aiodist.collective.member import Member
from aiodist.replica.context import ReplicaContext
from aiodist.replica.current import current
from aiodist.replica.stacks import Link, is_plumbing, links
from aiodist.replica.suspension import Suspension, coroutine_of, driven, suspension_of, task_text

_DEEPEST = 2
_LARGEST = 64


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A task that was looked at.

    Attributes:
        task: the task, of asyncio or trio.
        chain: its chain of awaits.
        member: the replica whose function it runs; None for any other task.
        replica_id: the replica that it belongs to, also a child task; None outside of replicas.
        who: what a person calls it.
        suspension: what it is suspended in.
    """

    task: Any
    chain: tuple[Link, ...]
    member: Member | None
    replica_id: int | None
    who: str
    suspension: Suspension


def look_at(task: Any) -> Waiter:
    """Look at a task at this moment."""
    coroutine = coroutine_of(task)
    chain = tuple(links(coroutine))
    member = next((m for m in map(driven, chain) if m is not None), None)
    replica_id = member.replica_id if member is not None else owner_replica(task)
    return Waiter(task, chain, member, replica_id, _name(task, chain, member, replica_id), suspension_of(coroutine))


def owner_replica(task: Any) -> int | None:
    """Return the replica that a task belongs to, by its context variables; None where it belongs to none."""
    context = getattr(task, "context", None) or next((r for r in gc.get_referents(task) if type(r) is Context), None)
    owner = context.get(current) if context is not None else None
    return owner._member.replica_id if isinstance(owner, ReplicaContext) else None


def _name(task: Any, chain: Sequence[Link], member: Member | None, replica_id: int | None) -> str:
    if member is not None:
        return f"replica {member.replica_id}"
    meeting = next((_merging(link.frame) for link in chain if link.frame is not None and _merging(link.frame)), None)
    if meeting is not None:
        return f"the merge function of #{meeting.number}"
    text = task_text(task)
    return text if replica_id is None else f"replica {replica_id}'s {text.removeprefix('the ')}"


def _merging(frame: FrameType) -> Any:
    """Return the meeting whose merge function runs in this frame."""
    ours = frame.f_globals.get("__name__") == "aiodist.replica.merge" and frame.f_code.co_name == "merge"
    return frame.f_locals.get("meeting") if ours else None


def merges(waiter: Waiter, meeting: Any = None) -> bool:
    """Whether a task runs the merge function of that meeting, or of any."""
    found = (_merging(link.frame) for link in waiter.chain if link.frame is not None)
    return any(one is not None and (meeting is None or one is meeting) for one in found)


def is_plumbing_alone(waiter: Waiter) -> bool:
    """Whether a task has nothing to do with the program: an event loop's own, or a timer of aiodist's."""
    if waiter.suspension.stack or waiter.member is not None:
        return False
    frames = [link.frame for link in waiter.chain if link.frame is not None]
    ours = any(frame.f_globals.get("__name__") == "aiodist.replica.engine" for frame in frames)
    return ours or waiter.replica_id is None


def waits_for_a_run(waiter: Waiter) -> bool:
    """Whether a task awaits `strategy.run`."""
    return any(link.frame is not None and link.frame.f_code.co_qualname == "_Run.result" for link in waiter.chain)


def rank(waiter: Waiter) -> tuple[int, bool, str]:
    """Return what waiters are ordered by: replicas by id, each before its child tasks, others last."""
    replica = sys.maxsize if waiter.replica_id is None else waiter.replica_id
    return replica, waiter.member is None, waiter.who


def entered(chain: Sequence[Link]) -> Iterator[Any]:
    """Yield the context managers that a suspended task is inside of: their exits lie on its frames' stacks."""
    for index, link in enumerate(chain):
        entering = _entering(chain[index + 1]) if index + 1 < len(chain) else None
        yield from (manager for manager in _managers(link.awaitable) if manager is not entering)


def _entering(link: Link) -> Any:
    """Return the manager that is still being entered in this frame: its exit lies on the stack already."""
    if link.frame is None or link.frame.f_code.co_name != "__aenter__":
        return None
    return link.frame.f_locals.get("self")


def _managers(awaitable: Any) -> Iterator[Any]:
    referents = gc.get_referents(awaitable) if hasattr(awaitable, "cr_frame") or hasattr(awaitable, "ag_frame") else []
    for index, one in enumerate(referents):
        if getattr(one, "__name__", "") not in {"__aexit__", "__exit__"}:
            continue
        if getattr(one, "__self__", None) is not None:
            yield one.__self__
        elif index + 1 < len(referents):  # since Python 3.14 the function, and behind it the object
            yield referents[index + 1]


def wrapped(manager: Any) -> Iterator[Any]:
    """Yield the locks that one is made of: a condition's own, and on trio what anyio's stands for."""
    for name in ("_lock", f"_{type(manager).__name__}__original"):
        inner = getattr(manager, name, None)
        if inner is not None:
            yield inner


def owner_of(lock: Any) -> Any:
    """Return the task that a lock knows to hold it: those of trio and anyio do, asyncio's do not."""
    if hasattr(lock, "_owner_task"):
        return lock._owner_task
    if type(lock).__module__.startswith("trio") and hasattr(lock, "statistics"):
        return getattr(lock.statistics(), "owner", None)
    return None


def at_hand(waiter: Waiter) -> set[int]:
    """Return the identities of what a task's frames reach: variables, what these contain, and what that is made of."""
    frames = (link.frame for link in waiter.chain if link.frame is not None)
    variables = [variable for frame in frames if not is_plumbing(frame) for variable in _variables(frame)]
    contained = [one for variable in variables for one in _contained(variable, _DEEPEST)]
    return {id(one) for variable in contained for one in (variable, *_attributes(variable))}


def _variables(frame: FrameType) -> Iterator[Any]:
    yield from frame.f_locals.values()
    yield from (frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals)


def _contained(variable: Any, depth: int) -> Iterator[Any]:
    yield variable
    if depth and isinstance(variable, (dict, list, tuple, set)) and len(variable) <= _LARGEST:
        for one in list(variable.values() if isinstance(variable, dict) else variable):
            yield from _contained(one, depth - 1)


def _attributes(variable: Any) -> Iterable[Any]:
    if hasattr(variable, "__dict__") and not isinstance(variable, (type, ModuleType)):
        return list(vars(variable).values())
    return ()


def waits_alike(one: Waiter, other: Waiter) -> bool:
    """Whether two tasks wait for the same thing in the same way, so that neither can end the other's wait."""
    a, b = one.suspension, other.suspension
    return a.kind is b.kind and a.what == b.what and bool(a.things) and a.things[0] is b.things[0]
