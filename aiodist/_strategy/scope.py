"""Scopes: blocks in cross-replica context of a strategy, and the checks of what belongs there."""

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
    """A with-block in cross-replica context of a strategy; it gives the strategy. It may be entered again."""

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
    """Return how many components per-replica values of a strategy have here: fewer in the merge function of a group."""
    here = current.get()
    if isinstance(here, CrossReplica) and here.strategy is strategy:
        return here.size
    return strategy.num_local_replicas


def replicas_here(strategy: Replicas) -> Sequence[int]:
    """Return the ids of the replicas, over all workers, that these components are of."""
    here = current.get()
    if isinstance(here, CrossReplica) and here.strategy is strategy and here.group is not None:
        return [member.replica_id for member in here.group.members]
    return strategy.share.mine


def require_cross_replica(strategy: object, what: str) -> None:
    """Check that this is not inside a replica, nor under another strategy.

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
            "a mirrored variable belongs to all replicas, and this is the merge function of a group, which only some "
            "workers run: change it outside of groups"
        )
