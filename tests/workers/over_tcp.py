"""Workers in one process: their values are simulated, their control connections real, with threads and sockets."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiodist import MultiWorkerMirroredStrategy
from aiodist._workers.engines.simulated import SimulatedCluster, SimulatedCommunicator


class OverTcp:
    """A simulated communicator, whose worker does as if it had a process of its own."""

    def __init__(self, simulated: SimulatedCommunicator) -> None:
        self._simulated = simulated
        self.rank, self.size = simulated.rank, simulated.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulated, name)


def strategies(workers: int) -> list[MultiWorkerMirroredStrategy]:
    """Return a strategy for each worker; they wait for each other, so each is made in a thread."""
    communicators: list[Any] = [OverTcp(one) for one in SimulatedCluster(workers).communicators]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda one: MultiWorkerMirroredStrategy(["CPU:0"], one), communicators))
