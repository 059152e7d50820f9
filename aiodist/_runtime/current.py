"""The current context: what `get_replica_context` and its family return in a task or thread.

It is a context variable, so a child task or a worker thread of a replica keeps its replica's context, and concurrent
runs stay separate. It is a `Participant` inside a replica, a `CrossReplica` under a strategy's scope or in a merge
function, and not set elsewhere: there the default strategy's only replica is the current one.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from aiodist._core.ledger import Group


class CrossReplica(NamedTuple):
    """Cross-replica context of a strategy."""

    strategy: Any
    size: int  # how many components per-replica values have: in a merge function, its group's replicas here
    group: Group | None = None  # in a merge function of a group that `new_group` made, that group
    lasting: bool = False  # `experimental_set_strategy` has made it, and not a with-block or a merge function
    replica: None = None  # it is no replica's


class Entries:
    """The open with-blocks of one object; several tasks and threads may each be in one."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: list[Token[Any]] = []

    def enter(self, context: Any) -> None:
        """Make a context the current one."""
        self._tokens.append(current.set(context))

    def exit(self) -> None:
        """Restore the context from before the last `enter` in this task."""
        for token in reversed(self._tokens.copy()):
            with suppress(ValueError):  # another task's
                current.reset(token)
                self._tokens.remove(token)
                return


current: ContextVar[Any] = ContextVar("aiodist_current", default=None)
"""A `Participant`, a `CrossReplica`, or None."""


class MakesRuns:
    """Base class of strategies: what a replica context that a program makes itself needs."""

    def _new_standing_run(self) -> Any:
        raise NotImplementedError


def standing_run(strategy: object) -> Any:
    """Return the run of a replica context that a program has made itself."""
    if not isinstance(strategy, MakesRuns):
        raise TypeError(f"ReplicaContext expects a strategy, got {strategy!r}")
    return strategy._new_standing_run()  # noqa: SLF001  (declared above, for this module alone)


get_current = current.get
"""Returns what ``current`` holds; bound once, for an imported name's method is looked up at every call."""
