"""Scopes: a strategy's cross-replica context, and the check that a call is made in it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiodist._core.errors import ReplicaContextError
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import CrossReplica, current

if TYPE_CHECKING:
    from aiodist._strategy.base import Strategy


class Scope:
    """A context manager that enters a strategy's cross-replica context, and gives the strategy; reusable."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._before: list[Any] = []

    def __enter__(self) -> Strategy:
        self._before.append(current.get())
        if not self._strategy._is_default:
            require_cross_replica(self._strategy, "strategy.scope()")
            current.set(CrossReplica(self._strategy, self._strategy._num_local_replicas))
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        current.set(self._before.pop())


def components_here(strategy: Strategy) -> int:
    """Return how many components per-replica values have here: in a group's merge function, one for each member."""
    here = current.get()
    if isinstance(here, CrossReplica) and here.strategy is strategy:
        return here.size
    return strategy._num_local_replicas


def replicas_here(strategy: Strategy) -> Sequence[int]:
    """Return the ids, over all workers, of the replicas that have the components here."""
    here = current.get()
    if isinstance(here, CrossReplica) and here.strategy is strategy and here.group is not None:
        return [member.replica_id for member in here.group.members]
    first = strategy._span[0]
    return range(first, first + strategy._num_local_replicas)


def require_cross_replica(strategy: object, what: str) -> None:
    """Check that a call is made outside of replicas and of other strategies' scopes.

    Raises:
        ReplicaContextError: it is not.
    """
    here = current.get()
    if here is None or here.strategy._is_default:
        return
    if here.strategy is not strategy:
        raise ReplicaContextError(
            f"{what} was called under another strategy, {here.strategy!r}; strategies do not nest: "
            "leave the other one's scope, or its replica function, first"
        )
    if isinstance(here, ReplicaContext):
        raise ReplicaContextError(
            f"{what} was called inside replica {here.replica.id}; it belongs outside, or in a function "
            "passed to `await ctx.merge_call(fn)`"
        )
