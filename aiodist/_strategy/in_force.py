"""The strategy in force: functions that return it, and one that sets it."""

from __future__ import annotations

from typing import Any

from aiodist._core.errors import ReplicaContextError
from aiodist._runtime.context import ReplicaContext, context_of
from aiodist._runtime.current import CrossReplica, current
from aiodist._runtime.participant import Participant
from aiodist._strategy.base import Strategy, default_replica_context, default_strategy
from aiodist._strategy.scope import replicas_of, strategy_in_force


def get_strategy() -> Strategy:
    """Return the strategy in force: the replica's, the scope's, or the default strategy."""
    here = current.get()
    strategy: Strategy = default_strategy() if here is None else here.strategy
    return strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is in force."""
    return strategy_in_force(current.get()) is not None


def in_cross_replica_context() -> bool:
    """Return whether this is in a strategy's scope or in a merge function, and not inside a replica."""
    return isinstance(current.get(), CrossReplica)


def get_replica_context() -> ReplicaContext:
    """Return this replica's context; None in cross-replica context; without a strategy, the default replica's.

    The return type omits None, so that replica functions need not check for it.
    """
    here = current.get()
    if isinstance(here, Participant):
        return context_of(here)
    context: Any = None if here is not None else default_replica_context()
    return context  # type: ignore[no-any-return]


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enter a strategy's cross-replica context for good, in this thread or task and in tasks started from now on.

    Args:
        strategy: the strategy; None for the default one.

    Raises:
        ReplicaContextError: called inside a replica, in a scope or in a merge function.
        TypeError: ``strategy`` has another type.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"expected a strategy or None, got {strategy!r}")
    here = current.get()
    if strategy_in_force(here) is not None:
        if isinstance(here, Participant):
            raise ReplicaContextError(f"a strategy cannot be set inside replica {here.replica.id}")
        if not here.lasting:
            raise ReplicaContextError(
                f"a strategy cannot be set in the scope or a merge function of {here.strategy!r}, whose end would undo "
                "it; leave that first"
            )
    if strategy is None or replicas_of(strategy).is_default:
        current.set(None)
    else:
        current.set(CrossReplica(strategy, replicas_of(strategy).local, lasting=True))
