"""The current context: what `get_replica_context` and its family return in a task or thread.

It is a context variable, so a child task or a worker thread of a replica keeps its replica's context, and concurrent
runs stay separate. It is a `Participant` inside a replica, a `CrossReplica` under a strategy's scope or in a merge
function, and None elsewhere, where the default strategy's only replica is the current one.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from aiodist._core.ledger import Group


class CrossReplica(NamedTuple):
    """Cross-replica context of a strategy."""

    strategy: Any
    size: int  # the number of components of per-replica values: in a merge function, of its group's local replicas
    group: Group | None = None  # that `new_group` made, in a merge function of that group
    lasting: bool = False  # made by `experimental_set_strategy`, not by a with-block or a merge function
    replica: None = None  # as in a `Participant`


class ContextStack:
    """The open with-blocks of one object, which several tasks and threads may have entered."""

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


class RunFactory:
    """Base class of strategies, for replica contexts that a program makes itself."""

    def _new_detached_run(self) -> Any:
        raise NotImplementedError


def standing_run(strategy: object) -> Any:
    """Return the run of a replica context that a program has made itself."""
    if not isinstance(strategy, RunFactory):
        raise TypeError(f"ReplicaContext expects a strategy, got {strategy!r}")
    return strategy._new_detached_run()  # noqa: SLF001  (declared above)


get_current = current.get
"""Returns the value of ``current``; bound once, because a method is otherwise looked up at every call."""
