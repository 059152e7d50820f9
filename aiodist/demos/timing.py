"""Where a replica's time goes: computing, reducing, or waiting for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """One replica's times, in seconds.

    Attributes:
        computing: the total inside `computing` blocks.
        meetings: the time inside each `meeting` block.
    """

    computing_seconds: float = 0.0
    meetings: list[float] = field(default_factory=list)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block as computing."""
        start = time.perf_counter()
        yield
        self.computing_seconds += time.perf_counter() - start

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Count the block as one collective."""
        start = time.perf_counter()
        yield
        self.meetings.append(time.perf_counter() - start)


@dataclass(frozen=True, slots=True)
class Account:
    """Seconds of an average replica."""

    computing: float
    reducing: float
    waiting: float


def account(clocks: Sequence[Clock]) -> Account:
    """Split the collectives' time into reducing and waiting.

    The last replica to arrive waits for nobody: all its time in a collective is the reduction's. What another one
    spends in the same collective beyond that, it waits. (So computing on fewer cores than replicas counts as
    computing, queueing for a core included.)
    """
    computing = sum(clock.computing_seconds for clock in clocks) / len(clocks)
    reducing = sum(map(min, zip(*(clock.meetings for clock in clocks), strict=True)))
    in_meetings = sum(sum(clock.meetings) for clock in clocks) / len(clocks)
    return Account(computing, reducing, in_meetings - reducing)
