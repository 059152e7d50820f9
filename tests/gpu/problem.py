"""Reductions of leaves on the devices of any driver, and the expected results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiodist._gpu.enqueue import Batch, Completion, Queue, Schedule, symbol
from aiodist._gpu.steps import Job, Place
from aiodist_kernels import Accumulate, ReduceOp, reduce
from aiodist_kernels.rules import rule_for
from tests.kernels import arrays

POISON = 0xA5


class Problem:
    """Leaves of one dtype, with a result for each replica.

    Args:
        put: returns memory on a device with some values.
        op: the reduce op.
        dtype: the leaves' dtype.
        devices: the replicas' devices.
        sizes: the leaves' sizes.
        accumulate: the accumulator.
        receivers: the devices of the results; all replicas' if empty.
        values: returns a replica's values, from a seed, the size and the dtype.

    Attributes:
        inputs: by leaf and replica, memory and its values.
        results: by leaf and replica, memory, poisoned at first, and the expected values.
    """

    def __init__(
        self,
        put: Callable[[int, np.ndarray], Any],
        op: ReduceOp,
        dtype: np.dtype,
        devices: list[int],
        sizes: list[int],
        accumulate: Accumulate = "native",
        receivers: Sequence[int] = (),
        values: Callable[[int, tuple[int], np.dtype], np.ndarray] = arrays.values,
    ) -> None:
        receivers = receivers or devices
        self.inputs: list[tuple[Any, np.ndarray]] = []
        self.results: list[tuple[Any, np.ndarray]] = []
        self.places: list[Place] = []
        jobs = []
        for leaf, size in enumerate(sizes):
            buffers = [np.asarray(values(leaf + 7 * replica, (size,), dtype)) for replica in range(len(devices))]
            wanted = reduce(op, buffers, accumulate=accumulate)
            poison = np.full(wanted.nbytes, POISON, np.uint8)
            inputs = [(put(device, buffer), buffer) for device, buffer in zip(devices, buffers, strict=True)]
            results = [(put(device, poison), wanted) for device in receivers]
            places = [
                Place(d, m.address) for d, (m, _) in zip([*devices, *receivers], [*inputs, *results], strict=True)
            ]
            first = len(self.places)
            numbered = [Place(place.device, symbol(first + i)) for i, place in enumerate(places)]
            jobs.append(Job(tuple(numbered[: len(devices)]), tuple(numbered[len(devices) :]), size))
            self.inputs += inputs
            self.results += results
            self.places += places
        self.batches = [Batch(rule_for(op, dtype, accumulate), jobs)]
        self.schedule: Schedule | None = None

    def run(self, queue: Queue, streams: list[Any]) -> Completion:
        """Enqueue it; the caller keeps the memory."""
        if self.schedule is None:
            self.schedule = queue.schedule(self.batches, arrays=len(self.places))
            queue.load(self.schedule)
        keeps = [memory for memory, _ in (*self.inputs, *self.results)]
        with queue.driver.using():
            return queue.run(self.schedule, streams, keeps, tuple([place.address for place in self.places]))
