"""merge_call: one function of the user's, run once for all replicas, in cross-replica context."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anyio import get_cancelled_exc_class

from aiodist._arrays.values import regroup, select_replica
from aiodist._core.errors import ReplicaContextError
from aiodist.collective.callsite import location
from aiodist.collective.describe import FunctionKey, call_text
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.wording import shown
from aiodist.replica.current import CrossReplica, current

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup


@dataclass(frozen=True, slots=True)
class MergeCall:
    """What a replica brings to a merge_call."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    context: Context = field(default_factory=copy_context)


def function_key(fn: Callable[..., Any]) -> FunctionKey:
    """Return what makes two merge functions the same: their code; for callable objects their type."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif inspect.ismethod(fn):
            fn = fn.__func__
        else:
            break
    name = getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
    code = getattr(fn, "__code__", None)
    if code is not None:
        return FunctionKey(code.co_filename, code, name)
    if inspect.isbuiltin(fn) or isinstance(fn, type):
        return FunctionKey("", fn, name)
    return FunctionKey("", type(fn), type(fn).__qualname__)


async def merge(strategy: Any, group: SyncGroup, meeting: Rendezvous) -> None:
    """Run replica 0's merge function on everyone's regrouped arguments and complete the meeting with its outcome."""
    calls: list[MergeCall] = meeting.values
    token = current.set(CrossReplica(strategy, group.size, None if group.root is group else group))
    try:
        ids = [member.replica_id for member in group.members]
        regrouped = functools.partial(regroup, what="merge_call arguments", replicas=ids)
        args = tuple(regrouped(column) for column in zip(*(c.args for c in calls), strict=True))
        kwargs = {name: regrouped([c.kwargs[name] for c in calls]) for name in calls[0].kwargs}
        result = calls[0].fn(strategy, *args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        results = [select_replica(i, result, group.size) for i in range(group.size)]
    except BaseException as error:
        if isinstance(error, ReplicaContextError):
            error.add_note(_where_called(meeting))
        group.finish_merge(meeting, None, error)
        if isinstance(error, get_cancelled_exc_class()):
            raise
    else:
        group.finish_merge(meeting, results, None)
    finally:
        current.reset(token)


def _where_called(meeting: Rendezvous) -> str:
    signature, code, offset = meeting.call
    return f"in the merge function of {call_text(signature)} #{meeting.number} at {shown(location(code, offset))}"
