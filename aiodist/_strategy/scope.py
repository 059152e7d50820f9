"""Scopes, which enter a strategy's cross-replica context, and checks that a call is made in the right context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from aiodist._core.errors import ReplicaContextError
from aiodist._core.ledger import Group
from aiodist._runtime.current import ContextStack, CrossReplica, RunFactory, current
from aiodist._runtime.participant import Participant


class Share(NamedTuple):
    """A process's share of a strategy's replicas."""

    replicas: int  # the number of replicas of all workers
    own: range  # the ids of this process's replicas
    workers: int = 1
    rank: int = 0
    fill_up: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]] | None = None  # see `StepRule`


class Replicas:
    """The replicas of a strategy; this base class is for strategies in one process."""

    combine: Any = None  # carries out an operation over several workers, see `Workers.combine`

    def __init__(self, count: int, *, is_default: bool = False) -> None:
        self.local: Final = count
        self.is_default: Final = is_default

    def caller(self) -> Any:
        """Return the call site of a call that all workers make; None for one process."""
        return None

    @property
    def share(self) -> Share:
        """This process's share of the replicas."""
        return Share(self.local, range(self.local))

    @property
    def several_workers(self) -> Any:
        """The `Workers`, if variables have components on others; None otherwise."""
        return None


class HasReplicas(RunFactory):
    """Base class of strategies."""

    _replicas: Replicas


def replicas_of(strategy: HasReplicas | None) -> Replicas:
    """Return the replicas of a strategy; None is the default one."""
    return Replicas(1, is_default=True) if strategy is None else strategy._replicas  # noqa: SLF001  (declared above, for this module alone)


def unless_default(strategy: HasReplicas | None) -> Any:
    """Return a strategy; None for the default one, as its variables have it."""
    return None if replicas_of(strategy).is_default else strategy


def strategy_in_force(here: Participant | CrossReplica | None) -> Any:
    """Return the strategy of the current context ``here``; None for the default one."""
    return None if here is None else unless_default(here.strategy)


S = TypeVar("S", bound=HasReplicas)


class Scope(Generic[S]):
    """A context manager that enters a strategy's cross-replica context and returns the strategy.

    It may be entered again, and by several tasks at a time.
    """

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        self._entries = ContextStack()

    def __enter__(self) -> S:
        here, replicas = current.get(), replicas_of(self._strategy)
        if not replicas.is_default:
            require_cross_replica(self._strategy, "strategy.scope()")
            if not isinstance(here, CrossReplica) or here.lasting:  # else stay in its scope or merge function
                here = CrossReplica(self._strategy, replicas.local)
        self._entries.enter(here)
        return self._strategy

    def __exit__(self, *_: object) -> None:
        self._entries.exit()


def group_here() -> Group | None:
    """Return the group whose merge function is running, if one is."""
    here = current.get()
    return here.group if isinstance(here, CrossReplica) else None


def replicas_here(strategy: HasReplicas) -> Sequence[int]:
    """Return the ids of the replicas whose components this context has."""
    here, group = current.get(), group_here()
    if group is not None and here.strategy is strategy:
        return [member.replica_id for member in group.members]
    return replicas_of(strategy).share.own


def require_cross_replica(strategy: object, what: str) -> None:
    """Check that a call is made outside of replicas and outside of other strategies' scopes."""
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
    """Check that this is not a group's merge function, which only some workers run."""
    group = group_here()
    if group is not None:
        raise ReplicaContextError(
            f"an operation of all workers cannot be called in the merge function of {group.label()}, which runs "
            "only on the workers of its members; combine values in the group first"
        )
