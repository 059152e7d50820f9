"""Several workers in one process: their strategies, and runs of one program on all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import Any

import anyio
import pytest

import aiodist
from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, ReplicaContext
from aiodist._workers.engines.simulated import SimulatedCluster

Program = Callable[[ReplicaContext], Awaitable[Any]]

# What is for workers alone hardly tells event loops apart: most tests run on asyncio, and some of each area on more.
on_uvloop_too = pytest.mark.every_loop
on_trio_too = pytest.mark.every_loop("asyncio", "trio")


class Job:
    """Simulated workers, and a strategy on each.

    Args:
        counts: how many replicas each has.
        kind: of their devices.
        reduction: the strategies'.
        cluster: makes what connects them, of their number and of the next.
        answer_seconds: how long workers that do nothing are waited for once there is trouble.
        options: of the strategies, for communication.
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
        self.strategies = [
            MultiWorkerMirroredStrategy(
                [f"{kind}:{i}" for i in range(count)],
                communicator,
                reduction=reduction,
                communication_options=CommunicationOptions(**options),
            )
            for communicator, count in zip(self.cluster.communicators, counts, strict=True)
        ]

    async def everywhere(self, fn: Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]) -> list[Any]:
        """Call a function with every worker's strategy; return what it returns, or the exceptions."""
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
        """Run a program on all replicas; return the workers' local results, or the exceptions."""

        async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
            return strategy.experimental_local_results(await strategy.run(_replica, (program,)))

        return await self.everywhere(one)

    async def run_and_lose(self, lost: int, program: Program) -> list[Any]:
        """Run a program in which a worker is lost; return the others' outcomes, which end the lost one's run, too."""
        running, others_have_ended = len(self.strategies) - 1, anyio.CancelScope()

        async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
            nonlocal running
            is_lost = strategy is self.strategies[lost]
            try:
                with others_have_ended if is_lost else nullcontext():
                    return await strategy.run(_replica, (program,))
            finally:
                running -= not is_lost
                if running == 0:
                    others_have_ended.cancel()

        outcomes = await self.everywhere(one)
        return outcomes[:lost] + outcomes[lost + 1 :]

    async def values(self, program: Program) -> list[Any]:
        """Run a program on all replicas; return what each returns.

        Raises:
            Exception: the first worker's that fails.
        """
        found: list[Any] = []
        for outcome in await self.run(program):
            if isinstance(outcome, Exception):
                raise outcome
            found += outcome
        return found

    async def check_that_it_works(self) -> None:
        """Check that the next run gives the right result."""

        async def program(ctx: ReplicaContext) -> int:
            return int(await ctx.all_reduce("SUM", ctx.replica_id_in_sync_group))

        n = self.strategies[0].num_replicas_in_sync
        assert await self.values(program) == [n * (n - 1) // 2] * n


def _replica(program: Program) -> Awaitable[Any]:
    return program(aiodist.get_replica_context())


async def on_one_machine(program: Program, replicas: int) -> Sequence[Any]:
    """Return what each replica of a `MirroredStrategy` returns."""
    strategy = aiodist.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    return strategy.experimental_local_results(await strategy.run(_replica, (program,)))
