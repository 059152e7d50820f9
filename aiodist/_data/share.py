"""Which of a strategy's replicas a process has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

FillUp = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]
"""Returns a step's batches, after other workers have said whether they have some; none at the end."""


class Share(NamedTuple):
    """Which of a strategy's replicas this process has.

    Attributes:
        replicas: how many there are over all workers.
        mine: the ids of those that are here.
        workers: how many workers there are.
        rank: which of them this is.
        fill_up: how the workers agree on a step; None without other workers.
    """

    replicas: int
    mine: range
    workers: int = 1
    rank: int = 0
    fill_up: FillUp | None = None
