"""Calls that fail on some of several workers before their records are brought."""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any

import pytest

from aiodist import MultiWorkerMirroredStrategy, get_replica_context
from aiodist.collective.signature import KIND
from aiodist.replica.carrying import Carrier
from tests.workers.simulated import Job, Program

_worker: ContextVar[int | None] = ContextVar("worker", default=None)
Call = tuple[int, str, int | None]
"""A worker, a kind of collective, and its number; None for all."""


class Failures:
    """What fails.

    Args:
        patch: takes its place where calls are planned.

    Attributes:
        planned: the calls, and what they raise.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.planned: dict[Call, Exception] = {}
        of = Carrier._planned

        def of_or_fail(carrier: Carrier, meeting: Any) -> Any:
            rank, kind = _worker.get() or 0, meeting.signature[KIND].name
            error = self.planned.get((rank, kind, meeting.number)) or self.planned.get((rank, kind, None))
            if error is not None:
                raise error.with_traceback(None)
            return of(carrier, meeting)

        patch.setattr(Carrier, "_planned", of_or_fail)

    async def run(self, job: Job, program: Program) -> list[Any]:
        """Run a program on all replicas; return the workers' local results, or the exceptions."""

        async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
            found = await strategy.run(lambda: program(get_replica_context()))
            return strategy.experimental_local_results(found)

        return await self.everywhere(job, one)

    async def everywhere(self, job: Job, fn: Any) -> list[Any]:
        """Call a function with every worker's strategy; all that a worker does counts as its own."""

        async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
            _worker.set(job.strategies.index(strategy))
            awaited: Awaitable[Any] = fn(strategy)
            return await awaited

        return await job.everywhere(one)
