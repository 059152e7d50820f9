"""Scopes: a strategy's cross-replica context, and checks that a call is in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from aiodist._core.errors import ReplicaContextError
from aiodist._core.ledger import Group
from aiodist._runtime.current import CrossReplica, Entries, MakesRuns, current
from aiodist._runtime.participant import Participant


class Share(NamedTuple):
    """Which of a strategy's replicas this process has."""

    replicas: int  # how many there are over all workers
    mine: range  # the ids of those that are here
    workers: int = 1  # how many workers there are
    rank: int = 0  # which of them this is
    fill_up: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]] | None = None


class Replicas:
    """The replicas of a strategy, in this process and elsewhere; by default those of the default strategy."""

    combine: Any = None  # carries out an operation over all workers, where there may be others

    def __init__(self, count: int, *, is_default: bool = False) -> None:
        self.local: Final = count
        self.is_default: Final = is_default

    def caller(self) -> Any:
        """Return the place of a call that all workers make; None if there is only one worker."""
        return None

    @property
    def share(self) -> Share:
        """Which replicas run in this process."""
        return Share(self.local, range(self.local))

    @property
    def sharing(self) -> Any:
        """The workers of variables that have components in other processes, too; None where none have."""
        return None


class HasReplicas(MakesRuns):
    """Base class of strategies."""

    _replicas: Replicas


def replicas_of(strategy: HasReplicas | None) -> Replicas:
    """Return the replicas of a strategy; None is the default one."""
    return Replicas(1) if strategy is None else strategy._replicas  # noqa: SLF001  (declared above, for this module alone)


def strategy_in_force(here: Participant | CrossReplica | None) -> Any:
    """Return the strategy of a current context; None for the default one."""
    return None if here is None or replicas_of(here.strategy).is_default else here.strategy


S = TypeVar("S", bound=HasReplicas)


class Scope(Generic[S]):
    """A context manager that enters a strategy's cross-replica context, and gives the strategy.

    It is reusable, and may be entered by several tasks at a time.
    """

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._entries = Entries()

    def __enter__(self) -> S:
        here, replicas = current.get(), replicas_of(self._strategy)
        if not replicas.is_default:
            require_cross_replica(self._strategy, "strategy.scope()")
            if not isinstance(here, CrossReplica) or here.lasting:  # in its own scope or merge function all stays
                here = CrossReplica(self._strategy, replicas.local)
        self._entries.enter(here)
        return self._strategy

    def __exit__(self, *_: object) -> None:
        self._entries.exit()


def group_here() -> Group | None:
    """Return the group whose merge function is running; None elsewhere."""
    here = current.get()
    return here.group if isinstance(here, CrossReplica) else None


def replicas_here(strategy: HasReplicas) -> Sequence[int]:
    """Return the ids, over all workers, of the replicas whose components are here."""
    here, group = current.get(), group_here()
    if group is not None and here.strategy is strategy:
        return [member.replica_id for member in group.members]
    return replicas_of(strategy).share.mine


def require_cross_replica(strategy: object, what: str) -> None:
    """Check that a call is made outside of replicas and of other strategies' scopes."""
    here = current.get()
    if strategy_in_force(here) is None:
        return
    if here.strategy is not strategy:
        raise ReplicaContextError(
            f"{what} was called under another strategy, {here.strategy!r}; strategies do not nest: "
            "leave the other one's scope, or its replica function, first"
        )
    if isinstance(here, Participant):
        raise ReplicaContextError(
            f"{what} was called inside replica {here.replica.id}; it belongs outside, or in a function "
            "passed to `await ctx.merge_call(fn)`"
        )


def require_all_workers() -> None:
    """Check that this is not the merge function of a group, which only some workers run."""
    group = group_here()
    if group is not None:
        raise ReplicaContextError(
            f"an operation of all workers cannot be called in the merge function of {group.label()}, which runs "
            "only on the workers of its members; combine values in the group first"
        )
