"""The current context: what `get_replica_context` and its family answer, in the task or thread that asks.

It is a context variable, so a child task or a worker thread of a replica keeps its replica's context, and concurrent
runs keep apart. It holds the replica's context inside a replica, a `CrossReplica` under a strategy's scope or in a
merge function, and nothing outside: then the default strategy's only replica is the current one.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Self

from aiodist._core.ledger import Group


@dataclass(frozen=True, slots=True, eq=False)
class CrossReplica:
    """Cross-replica context of a strategy.

    Attributes:
        strategy: the strategy.
        size: how many components per-replica values have: in a merge function, as many as its group has replicas here.
        group: in a merge function of a group that `new_group` made, that group.
        replica, seat: None, as this is no replica's.
    """

    strategy: Any
    size: int
    group: Group | None = None
    replica: None = None
    seat: None = None


class Block:
    """What a with-block makes the current context."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: list[Token[Any]] = []

    def __enter__(self) -> Self:
        self._tokens.append(current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        for index in reversed(range(len(self._tokens))):  # the last that was entered in this task
            with suppress(ValueError):
                current.reset(self._tokens[index])
                del self._tokens[index]
                return


current: ContextVar[Any] = ContextVar("aiodist_current", default=None)
"""A `ReplicaContext`, a `CrossReplica`, or None."""
