"""Several workers in one process: their strategies, and runs of one program on all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy
from aiodist._workers.engines.simulated import SimulatedCluster
from tests.runtime.programs import Program, run

# Event loops hardly differ for workers: most tests run on asyncio, and some of each subject on more.
on_uvloop_too = pytest.mark.every_loop
on_trio_too = pytest.mark.every_loop("asyncio", "trio")


class Job:
    """Simulated workers with a strategy each.

    Args:
        counts: the number of replicas of each worker.
        kind: the kind of their devices.
        reduction: the strategies' reduction.
        cluster: makes the cluster of that many workers.
        answer_seconds: how long the coordinator waits for idle workers once there is trouble.
        options: the strategies' communication options.
    """

    def __init__(
        self,
        *counts: int,
        kind: str = "CPU",
        reduction: str = "fast",
        cluster: Callable[..., SimulatedCluster] = SimulatedCluster,
        answer_seconds: float = 1.0,
        **options: Any,
    ) -> None:
        self.cluster = cluster(len(counts), answer_seconds=answer_seconds)
        settings: Any = {"reduction": reduction, "communication_options": CommunicationOptions(**options)}
        self.strategies = [
            MultiWorkerMirroredStrategy([f"{kind}:{i}" for i in range(count)], communicator, **settings)
            for communicator, count in zip(self.cluster.communicators, counts, strict=True)
        ]

    async def everywhere(self, fn: Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]) -> list[Any]:
        """Call a function with each worker's strategy; return the results or exceptions."""
        outcomes: list[Any] = [None] * len(self.strategies)

        async def one(rank: int) -> None:
            try:
                outcomes[rank] = await fn(self.strategies[rank])
            except Exception as error:  # noqa: BLE001  (it is the outcome)
                outcomes[rank] = error

        async with anyio.create_task_group() as tasks:
            for rank in range(len(self.strategies)):
                tasks.start_soon(one, rank)
        return outcomes

    async def run(self, program: Program) -> list[Any]:
        """Run a program on all replicas; return each worker's local results, or its exception."""
        return await self.everywhere(lambda strategy: run(strategy, program))

    async def values(self, program: Program) -> list[Any]:
        """Run a program on all replicas; return each replica's result, or raise the first exception."""
        found: list[Any] = []
        for outcome in await self.run(program):
            if isinstance(outcome, Exception):
                raise outcome
            found += outcome
        return found
