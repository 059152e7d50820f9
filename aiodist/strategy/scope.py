"""Which strategy is in force: scopes, and the functions that ask."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from aiodist.replica.context import ReplicaContext
from aiodist.replica.current import CrossReplica, current
from aiodist.vocabulary.errors import ReplicaContextError

if TYPE_CHECKING:
    from aiodist.strategy.base import Strategy


class Scope:
    """A with-block in cross-replica context of a strategy; it gives the strategy. It may be entered again."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._before: list[Any] = []

    def __enter__(self) -> Strategy:
        self._before.append(current.get())
        if not self._strategy._is_default:
            require_cross_replica(self._strategy, "strategy.scope()")
            current.set(CrossReplica(self._strategy))
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        current.set(self._before.pop())


def require_cross_replica(strategy: Strategy, what: str) -> None:
    """Check that this is not inside a replica, nor under another strategy.

    Raises:
        ReplicaContextError: it is.
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
            f"{what} was called inside replica {here.replica_id_in_sync_group}; it belongs outside, or in a function "
            "passed to `await ctx.merge_call(fn)`"
        )


def get_strategy() -> Strategy:
    """Return the strategy in force: the replica's, the scope's, or the default strategy."""
    from aiodist.strategy.base import default_strategy

    here = current.get()
    strategy: Strategy = default_strategy() if here is None else here.strategy
    return strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is in force."""
    return not get_strategy()._is_default


def in_cross_replica_context() -> bool:
    """Return whether this is under a strategy's scope, or in a merge function, and not inside a replica."""
    return isinstance(current.get(), CrossReplica)


def get_replica_context() -> ReplicaContext | Any:  # in a replica function nobody should have to rule out None
    """Return this replica's context; None in cross-replica context; outside any strategy, the default replica's."""
    from aiodist.strategy.base import default_strategy

    here = current.get()
    if isinstance(here, CrossReplica):
        return None
    return default_strategy()._replica_context if here is None else here


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Put a strategy in force from here on, as if all that follows stood under its scope; None for the default one.

    It holds in this thread or task, and in tasks that it starts.

    Raises:
        ReplicaContextError: called inside a replica.
        TypeError: ``strategy`` is none.
    """
    from aiodist.strategy.base import Strategy

    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"expected a strategy or None, got {strategy!r}")
    here = current.get()
    if isinstance(here, ReplicaContext) and not here.strategy._is_default:
        raise ReplicaContextError(f"a strategy cannot be set inside replica {here.replica_id_in_sync_group}")
    current.set(None if strategy is None or strategy._is_default else CrossReplica(strategy))
