"""A strategy that serves one event loop after another, as in a program that calls `asyncio.run` for each epoch."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from aiodist import CollectiveError, MirroredStrategy, Variable, get_replica_context
from aiodist._workers.driver import Timer
from tests.workers.simulated import Job

pairs = pytest.mark.parametrize(("first", "second"), [("asyncio", "asyncio"), ("asyncio", "trio"), ("trio", "asyncio")])
Scenario = Callable[[Any], Awaitable[Any]]


async def _replica_fails(strategy: Any) -> None:
    async def program() -> None:
        ctx = get_replica_context()
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 0:
            raise ValueError("bad batch")
        await ctx.barrier()

    with pytest.raises((ValueError, CollectiveError)):
        await strategy.run(program)


async def _caller_leaves_a_run(strategy: Any) -> None:
    async def program() -> None:
        ctx = get_replica_context()
        await ctx.barrier()
        if ctx.replica_id_in_sync_group == 0:
            await anyio.sleep_forever()
        await ctx.barrier()

    with anyio.move_on_after(0.01):
        await strategy.run(program)


async def _variable_is_made(strategy: Any) -> None:
    with strategy.scope():
        Variable(np.zeros(3), aggregation="mean")


SCENARIOS = [_replica_fails, _caller_leaves_a_run, _variable_is_made]


async def _works(strategy: Any) -> None:
    async def program() -> Any:
        ctx = get_replica_context()
        return await ctx.all_reduce("SUM", 1)

    n = strategy.num_replicas_in_sync
    found = await strategy.run(program)
    assert set(strategy.experimental_local_results(found)) == {n}
    per_replica = await strategy.run(lambda: np.float64(2))
    assert await strategy.reduce("SUM", per_replica, None) == 2 * n


@pairs
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_strategy_works_on_the_next_loop_or_has_ended(first: str, second: str, scenario: Scenario) -> None:
    job, here = Job(1, 1), MirroredStrategy(["CPU:0", "CPU:1"])
    anyio.run(job.everywhere, scenario, backend=first)
    for backend in (second, first, second):
        outcomes = anyio.run(job.everywhere, _works, backend=backend)
        if scenario is _variable_is_made:
            assert outcomes == [None, None]
        else:  # the error has ended the strategy
            assert all(isinstance(outcome, CollectiveError) for outcome in outcomes), outcomes
    anyio.run(scenario, here, backend=first)
    anyio.run(_works, here, backend=second)


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files as Linux shows them")
def test_file_descriptors_of_each_loop_are_closed() -> None:
    async def nap() -> None:
        await Timer().sleep(1e-6)

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    asyncio.run(nap())
    gc.collect()
    before = open_files()
    for _ in range(3):
        asyncio.run(nap())
    assert open_files() == before
