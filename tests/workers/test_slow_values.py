"""Values that take long from worker to worker: who waits for them is told of only where they stand still."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiodist import ReplicaContext
from aiodist.replica.stall import StallWatch
from aiodist.workers import arrays, segments
from aiodist.workers.simulated import SimulatedCommunicator
from tests.runtime.test_stall import Looks
from tests.runtime.warned import warned
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio
PARTS = 6


class Slowness:
    """How many operations of each worker may be complete."""

    def __init__(self) -> None:
        self.most = 0
        self.begun = [0, 0]
        self.asked = [-1, -1]

    async def until_asked_for(self, number: int) -> None:
        """Wait until both workers wait for an operation."""
        while min(self.asked) < number:
            await anyio.lowlevel.checkpoint()


class SlowRequest:
    """One of these operations."""

    def __init__(self, slowness: Slowness, rank: int, request: Any) -> None:
        self._slowness, self._rank, self._request = slowness, rank, request
        self._number = slowness.begun[rank]
        slowness.begun[rank] += 1

    def test(self) -> bool:
        self._slowness.asked[self._rank] = self._number
        return self._number < self._slowness.most and bool(self._request.test())


async def test_values_that_come_in_time_are_told_of_only_when_they_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, slowness = Looks(), Slowness()
    watch = StallWatch(10.0, looks.after, lambda: looks.now)
    monkeypatch.setattr("aiodist.replica.scheduler.watch_here", lambda: watch)
    for module in (segments, arrays):
        monkeypatch.setattr(module, "SEGMENT", 2000)
    begin = SimulatedCommunicator.iallgatherv

    def begin_slow(communicator: SimulatedCommunicator, *arguments: Any) -> SlowRequest:
        return SlowRequest(slowness, communicator.rank, begin(communicator, *arguments))

    monkeypatch.setattr(SimulatedCommunicator, "iallgatherv", begin_slow)

    async def program(ctx: ReplicaContext) -> Any:
        return (await ctx.all_gather(np.ones(125 * PARTS), 0)).sum()

    async def later() -> None:
        with warned() as stalls:
            for number in range(PARTS):
                await slowness.until_asked_for(number)
                looks.pass_time(4)
                looks.pass_time(4)
                slowness.most = min(number + 1, PARTS - 1)
            before = list(stalls)
            looks.pass_time(12)
        slowness.most = PARTS
        assert before == []
        assert len(stalls) == 2  # each worker's
        assert all("values that they have brought do not come: timeout_seconds" in stall.text for stall in stalls)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(later)
        assert await Job(1, 1).values(program) == [250 * PARTS] * 2
