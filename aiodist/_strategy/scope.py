"""Scopes: a strategy's cross-replica context, and the checks that a call is made in it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from aiodist._core.errors import ReplicaContextError
from aiodist._data.distributed import Share
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import CrossReplica, current


class Replicas(Protocol):
    """A strategy, as far as scopes need it."""

    @property
    def is_default(self) -> bool:
        """Whether it is in force where no other is."""
        ...

    @property
    def num_local_replicas(self) -> int:
        """How many replicas run in this process."""
        ...

    @property
    def share(self) -> Share:
        """Which replicas run in this process."""
        ...


S = TypeVar("S", bound=Replicas)


class Scope(Generic[S]):
    """A context manager that enters a strategy's cross-replica context, and gives the strategy; reusable."""

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._before: list[Any] = []

    def __enter__(self) -> S:
        self._before.append(current.get())
        if not self._strategy.is_default:
            require_cross_replica(self._strategy, "strategy.scope()")
            current.set(CrossReplica(self._strategy, self._strategy.num_local_replicas))
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        current.set(self._before.pop())


def components_here(strategy: Replicas) -> int:
    """Return how many components per-replica values have here: in a group's merge function, one for each member."""
    here = current.get()
    if isinstance(here, CrossReplica) and here.strategy is strategy:
        return here.size
    return strategy.num_local_replicas


def replicas_here(strategy: Replicas) -> Sequence[int]:
    """Return the ids, over all workers, of the replicas that have the components here."""
    here = current.get()
    if isinstance(here, CrossReplica) and here.strategy is strategy and here.group is not None:
        return [member.replica_id for member in here.group.members]
    return strategy.share.mine


def require_cross_replica(strategy: object, what: str) -> None:
    """Check that a call is made outside of replicas and of other strategies' scopes.

    Raises:
        ReplicaContextError: it is.
    """
    here = current.get()
    if here is None or here.strategy.is_default:
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


def require_all_workers() -> None:
    """Check that this is not the merge function of a group, which only some workers run.

    Raises:
        ReplicaContextError: it is.
    """
    here = current.get()
    if isinstance(here, CrossReplica) and here.group is not None:
        raise ReplicaContextError(
            "what all workers do together was asked for in the merge function of "
            f"{here.group.record().label()}, which only the workers with members of it run; combine values in the "
            "group first, e.g.  await group.all_reduce(op, value)"
        )
