"""What thousands of workers cost, simulated in one process: `python tests/benchmarks/many_workers.py [WORKERS...]`.

For each number of workers, one replica each: the seconds to construct all strategies and let them meet; of a run of
nothing but its opening and its end; of a step, which is an `all_reduce` of 1 KiB on every worker; from the step at
which one worker diverges until every worker has raised the verdict, which must name that one; and the memory that a
worker takes, at its most. All workers share one interpreter, so that a step's seconds, divided by their number, are the
processor time that one worker spends on a step.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from aiodist import CollectiveMismatchError, MultiWorkerMirroredStrategy, get_replica_context
from aiodist.workers.simulated import SimulatedCluster

WORKERS = (64, 512, 4096)
STEPS = 5


async def nothing() -> None:
    """Return at once."""


async def steps(marks: list[float]) -> None:
    """Take the steps, and note when this replica has taken each."""
    ctx, value = get_replica_context(), np.ones(128)
    for _ in range(STEPS):
        await ctx.all_reduce("SUM", value)
        marks.append(time.perf_counter())


async def diverging(culprit: int, marks: list[float]) -> None:
    """Agree once, then let one replica call something else."""
    ctx = get_replica_context()
    await ctx.all_reduce("SUM", np.ones(128))
    marks.append(time.perf_counter())
    if ctx.replica_id_in_sync_group == culprit:
        await ctx.barrier()
    await ctx.all_reduce("SUM", np.ones(128))


async def everywhere(strategies: list[Any], fn: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
    """Run a function on all replicas of all workers; return what each worker's run returns or raises."""
    runs = [strategy.run(fn, args) for strategy in strategies]
    return await asyncio.gather(*runs, return_exceptions=True)


def peak() -> int:
    """Return the most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def measure(workers: int) -> list[float]:
    """Return the row of the table for a number of workers."""
    before, begun = peak(), time.perf_counter()
    cluster = SimulatedCluster(workers)
    strategies = [MultiWorkerMirroredStrategy(communicator, ["CPU:0"]) for communicator in cluster.communicators]
    assert [strategy.num_replicas_in_sync for strategy in strategies] == [workers] * workers
    constructed = time.perf_counter() - begun
    await everywhere(strategies, nothing)

    begun = time.perf_counter()
    await everywhere(strategies, nothing)
    opened = time.perf_counter() - begun

    marks: list[float] = []
    await everywhere(strategies, steps, marks)
    ends = marks[workers - 1 :: workers]
    a_step = min(np.diff(ends))

    marks = []
    outcomes = await everywhere(strategies, diverging, workers // 2, marks)
    verdict = time.perf_counter() - marks[workers - 1]
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveMismatchError), outcome
        assert outcome.report.suspects == (workers // 2,)
    del outcomes
    return [constructed, opened, a_step, verdict, (peak() - before) / workers / 1024]


def main() -> None:
    """Print the table."""
    gc.freeze()
    names = ("workers", "construct s", "run s", "step s", "µs/worker", "verdict s", "KiB/worker")
    print("".join(f"{name:>12}" for name in names))
    for workers in map(int, sys.argv[1:] or WORKERS):
        constructed, opened, a_step, verdict, memory = asyncio.run(measure(workers))
        shown = (constructed, opened, a_step)
        print(f"{workers:12}" + "".join(f"{seconds:12.3f}" for seconds in shown), end="")
        print(f"{a_step / workers * 1e6:12.0f}{verdict:12.3f}{memory:12.0f}", flush=True)


if __name__ == "__main__":
    main()
