"""A call that fails at any of the functions that are called before its record is brought: the others hear of it."""

from __future__ import annotations

import gc
import sys
from contextvars import ContextVar
from types import FrameType
from typing import Any

import numpy as np
import pytest

from aiodist import MultiWorkerMirroredStrategy, WorkerLostError, get_replica_context
from aiodist.collective.signature import KIND
from aiodist.replica.carrying import Carrier
from aiodist.replica.failing import bring_failure
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio
_victim: ContextVar[bool] = ContextVar("victim", default=False)
NUMBER = 3
_OF_LOCKS = ("__enter__", "__exit__")


class Lacking:
    """Memory that lacks once, at one of the calls that a worker makes for collective #3 before its record.

    Args:
        at: which call, from 0.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.happened = False

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        """Look at what is called: `sys.setprofile` has it so."""
        if not _victim.get() or event not in ("call", "c_call") or getattr(called, "__name__", "") in _OF_LOCKS:
            return
        step: FrameType | None = frame
        while step is not None and step.f_code is not Carrier._carry.__code__:
            if step.f_code is bring_failure.__code__:
                return
            step = step.f_back
        if step is None or step is frame:
            return
        meeting = step.f_locals["meeting"]
        if meeting.signature[KIND].name != "all_gather" or meeting.number != NUMBER:
            return
        carrier = step.f_locals["self"]
        if not carrier.lane.in_exchange and not carrier.moving:
            self.left -= 1
            if self.left < 0:
                self.happened = True
                raise MemoryError("no room")


async def program() -> None:
    ctx = get_replica_context()
    for step in range(5):
        try:
            found = await ctx.all_gather(np.array([step]), 0)
        except MemoryError:
            continue
        assert found.tolist() == [step] * ctx.num_replicas_in_sync, "values of several steps were put together"


async def test_wherever_it_fails() -> None:
    at, happened = 0, True

    async def one(strategy: MultiWorkerMirroredStrategy) -> Any:
        _victim.set(strategy is team.strategies[1])
        return await strategy.run(program)

    while happened:
        team, lacking = Job(1, 2), Lacking(at)
        gc.disable()  # it calls what libraries have asked it to, and who fails there is not told of
        sys.setprofile(lacking)
        try:
            outcomes = await team.everywhere(one)
        finally:
            sys.setprofile(None)
            gc.enable()
        happened, at = lacking.happened, at + 1
        if happened:
            assert all(isinstance(outcome, WorkerLostError) for outcome in outcomes), (at, outcomes)
            (text,) = {str(outcome).splitlines()[0] for outcome in outcomes}
            assert text == "worker 1 of 2 has given up: MemoryError: no room; it had replicas 1 and 2"
    assert at > 10
