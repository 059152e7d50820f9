"""Making a group of some of the replicas: its arguments checked, and the context that a replica has in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import finalize

from aiodist.collective import subgroup
from aiodist.replica import arguments

if TYPE_CHECKING:
    from aiodist.collective.member import Member
    from aiodist.replica.context import ReplicaContext


def member_of_new_group(context: ReplicaContext, replica_ids: Any, name: str | None, frame: FrameType) -> Member:
    """Return what a replica is in the group that it makes by a call from ``frame``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: no replicas, unknown ones, one that is given twice; the caller is not among them.
    """
    name = arguments.checked_name(name)
    ids = _ids(replica_ids, context.num_replicas_in_sync)
    me = context.replica_id_in_sync_group
    if me not in ids:
        raise ValueError(
            f"new_group makes a group of replicas {list(ids)}, and replica {me}, which called it, is not among them; "
            f"let only members make it:  if ctx.replica_id_in_sync_group in {list(ids)}: ..."
        )
    return subgroup.join(context._member, ids, name, context._path(frame, name), frame.f_code, frame.f_lasti)


def _ids(replica_ids: Any, size: int) -> tuple[int, ...]:
    if not isinstance(replica_ids, Iterable) or isinstance(replica_ids, (str, bytes)):
        raise TypeError(f"replica_ids must be a sequence of replica ids, e.g. [0, 1], got {replica_ids!r}")
    ids = tuple(arguments.replica_id(value, "each of replica_ids") for value in replica_ids)
    if not ids:
        raise ValueError("replica_ids must name at least one replica, got none")
    unknown = [value for value in ids if not 0 <= value < size]
    if unknown:
        raise ValueError(f"replica_ids must be from 0 to {size - 1}, got {unknown[0]} in {list(ids)}")
    if len(set(ids)) < len(ids):
        twice = next(value for index, value in enumerate(ids) if value in ids[:index])
        raise ValueError(f"replica_ids must name each replica once, got {twice} twice in {list(ids)}")
    return ids


def tell_when_gone(context: ReplicaContext) -> None:
    """Tell a group that has members on other workers when a replica has let go of its context."""
    group = context._member.group
    if group.bridge is not None:
        call, let_go = group.engine.call_soon_threadsafe, group.bridge.let_go
        finalize(context, _call, call, let_go).atexit = False


def _call(call_soon_threadsafe: Callable[..., object], fn: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and so is the group
        call_soon_threadsafe(fn)
