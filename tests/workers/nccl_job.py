"""Simulated workers, each with GPUs of its own, that NCCL links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, set_logical_devices
from aiodist.workers.simulated import SimulatedCluster
from tests.gpu.conftest import planted_machine
from tests.gpu.fake_nccl import planted_nccl
from tests.workers.simulated import Job

if TYPE_CHECKING:
    import numpy as np
    import pytest

    from tests.gpu.conftest import PlantedArray


class NcclJob(Job):
    """Simulated workers whose replicas share a planted GPU for each worker.

    Args:
        patch: plants them.
        counts: how many replicas each worker has.
        same: all workers have the first GPU.
        options: of all strategies; or, by worker, of each.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        counts: tuple[int, ...],
        *,
        same: bool = False,
        unloaded: bool = False,
        options: list[dict[str, Any]] | dict[str, Any] | None = None,
    ) -> None:
        self.counts = counts
        self.machine = planted_machine(patch, 1 if same else len(counts), patient=True, unloaded=unloaded)
        self.machine.driver.eager = True
        self.nccl = planted_nccl(patch, self.machine.driver)
        self.cluster = SimulatedCluster(len(counts))
        self.same = same
        begin, self.devices = 0, []
        for ordinal, count in enumerate(counts):
            if count > 1:
                set_logical_devices(f"GPU:{ordinal}", count)
            self.devices.append([f"GPU:{begin + k}" for k in range(count)])
            begin += 0 if same else count
        self.options = options if isinstance(options, list) else [options or {}] * len(counts)
        self.strategies = self.new_strategies()
        self.ordinals = [0 if same else worker for worker, count in enumerate(counts) for _ in range(count)]

    def new_strategies(self) -> list[MultiWorkerMirroredStrategy]:
        """Return a strategy for each worker."""
        return [
            MultiWorkerMirroredStrategy(communicator, devices, communication_options=CommunicationOptions(**options))
            for communicator, devices, options in zip(
                self.cluster.communicators, self.devices, self.options, strict=True
            )
        ]

    def put(self, me: int, values: np.ndarray) -> PlantedArray:
        """Return an array on a replica's GPU."""
        return self.machine.put(values, self.ordinals[me])
