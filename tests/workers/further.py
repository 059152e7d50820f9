"""Workers that make more strategies than one: threads of one process, with real control planes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import numpy as np

from aiodist import MultiWorkerMirroredStrategy, get_replica_context
from aiodist.workers.makings import Makings
from aiodist.workers.simulated import SimulatedCluster
from tests.workers.over_tcp import OverTcp

Program = Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]
WORKERS = 2  # more keep links among each other, which take a while to be made
LAST = WORKERS - 1


class Workers:
    """Workers in threads of one process, whose strategies are the k-th of a job."""

    def __init__(self) -> None:
        self.makings = [Makings() for _ in range(WORKERS)]
        self.worlds = [SimulatedCluster(WORKERS) for _ in range(3)]
        self.pool = ThreadPoolExecutor(WORKERS)
        self.strategies = list(self.pool.map(self.make, range(WORKERS)))
        self.further: list[MultiWorkerMirroredStrategy] = []

    def make(self, rank: int) -> MultiWorkerMirroredStrategy:
        """Make a worker's next strategy, in its thread."""
        mine = self.makings[rank]
        communicator: Any = OverTcp(self.worlds[mine.made].communicators[rank])
        mine.wait(communicator.iallgather(np.zeros(1, np.uint8), np.zeros(WORKERS, np.uint8)), rank, WORKERS)
        communicator.makings = mine
        return MultiWorkerMirroredStrategy(communicator, ["CPU:0"])

    def start(self, rank: int, fn: Program, backend: str) -> Future[Any]:
        """Use a worker's strategy, then run a coroutine function with it, in an event loop in a thread."""

        async def main() -> Any:
            await reduces(self.strategies[rank])
            return await fn(self.strategies[rank])

        return self.pool.submit(partial(anyio.run, main, backend=backend))

    def make_further(self) -> list[tuple[MultiWorkerMirroredStrategy, ...]]:
        """Make another strategy on each worker; return both of each."""
        self.further = list(self.pool.map(self.make, range(WORKERS)))
        return list(zip(self.strategies, self.further, strict=True))

    def everywhere(self, fn: Callable[[int], Awaitable[Any]], backend: str) -> list[Any]:
        """Run a coroutine function of the rank on every worker; return what it returns."""

        def main(rank: int) -> Any:
            return anyio.run(fn, rank, backend=backend)

        return [one.result(20) for one in [self.pool.submit(main, rank) for rank in range(WORKERS)]]

    def start_making(self, rank: int, backend: str = "asyncio") -> Future[Any]:
        """Make a worker's next strategy, in an event loop in a thread."""

        async def make(_: MultiWorkerMirroredStrategy) -> MultiWorkerMirroredStrategy:
            return self.make(rank)

        return self.start(rank, make, backend)

    def close(self) -> None:
        """Close the strategies."""
        for strategy in [*self.strategies, *self.further]:
            strategy.close()
        self.pool.shutdown()


async def reduces(strategy: MultiWorkerMirroredStrategy) -> Any:
    """Reduce something with all workers."""
    return await strategy.reduce("SUM", np.ones(2), None)


async def runs(strategy: MultiWorkerMirroredStrategy) -> Any:
    """Run something with all workers."""

    async def program() -> Any:
        return await get_replica_context().all_reduce("SUM", 1)

    return await strategy.run(program)
