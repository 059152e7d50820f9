"""merge_call: a function of the program, run once for all replicas, in cross-replica context."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import Any, NamedTuple, TypeAlias

from anyio import get_cancelled_exc_class

from aiodist._arrays.values import regroup_arguments, split
from aiodist._core.errors import ReplicaContextError
from aiodist._core.text import full_place
from aiodist._runtime.arguments import check_awaited
from aiodist._runtime.current import CrossReplica, current
from aiodist._runtime.rendezvous import Rendezvous


class MergeCall(NamedTuple):
    """A replica's contribution to a merge_call."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    context: Context  # a copy of the replica's


Finish: TypeAlias = Callable[[Rendezvous, list[Any] | None, BaseException | None], object]
"""Completes a rendezvous with each replica's result, or an exception."""


async def merge(strategy: Any, finish: Finish, slot: Rendezvous) -> None:
    """Run replica 0's merge function on the regrouped arguments of all replicas, and complete the rendezvous."""
    calls: list[MergeCall] = slot.values
    if not calls:  # the run has failed in the meantime
        return
    group = slot.group
    size = len(group.members)
    token = current.set(CrossReplica(strategy, size, None if group.is_root else group))
    try:
        ids = [member.replica_id for member in group.members]
        regrouped = functools.partial(regroup_arguments, replicas=ids)
        args = tuple(regrouped(column) for column in zip(*(call.args for call in calls), strict=True))
        kwargs = {name: regrouped([call.kwargs[name] for call in calls]) for name in calls[0].kwargs}
        result = calls[0].fn(strategy, *args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        check_awaited(result, "result")
        results = [*split(result, size)]
    except BaseException as error:
        if isinstance(error, ReplicaContextError):
            post = slot.post_of(0)
            error.add_note(f"in the merge function of {post.call} #{slot.number} at {full_place(post.location)}")
        finish(slot, None, error)
        if isinstance(error, get_cancelled_exc_class()):
            raise
    else:
        finish(slot, results, None)
    finally:
        current.reset(token)
