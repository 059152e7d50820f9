"""The cost of thousands of workers, simulated in one process: `python tests/benchmarks/many_workers.py [WORKERS...]`.

For each number of workers, with one replica each, it prints

- the seconds in which all strategies are constructed and connected, and those of an empty run;
- the seconds of a step, an `all_reduce` of 1 KiB on every worker: the mean with garbage collection, the least without;
- the seconds from the step at which one worker diverges until all have raised the report, which must name that worker,
  and how many of them the first worker spends on reading messages and on the analysis, both without garbage collection;
- the peak memory of a worker, and a step's microseconds divided by the number of workers: the share of one of them.

All workers share one thread, and seconds are CPU time. The last line is the cost of a heartbeat to the first worker.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiodist import CollectiveMismatchError, MultiWorkerMirroredStrategy, get_replica_context
from aiodist._workers.control import BEAT, Peer
from aiodist._workers.coordinator import Coordinator
from aiodist._workers.engines import simulated
from aiodist._workers.engines.simulated import SimulatedCluster


async def nothing() -> None:
    """Return at once."""


async def steps(marks: list[float]) -> None:
    """Take the steps and record when this replica has taken each."""
    ctx, value = get_replica_context(), np.ones(128)
    for _ in range(max(5, 4096 // ctx.num_replicas_in_sync)):
        await ctx.all_reduce("SUM", value)
        marks.append(time.process_time())


async def diverging(culprit: int, marks: list[float]) -> None:
    """Take a step, then let one replica make another call."""
    ctx = get_replica_context()
    await ctx.all_reduce("SUM", np.ones(128))
    marks.append(time.process_time())
    if ctx.replica_id_in_sync_group == culprit:
        await ctx.barrier()
    await ctx.all_reduce("SUM", np.ones(128))


async def everywhere(strategies: list[Any], fn: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
    """Run a function on the replicas of all workers; return what each worker's run returns or raises."""
    runs = [strategy.run(fn, args) for strategy in strategies]
    return await asyncio.gather(*runs, return_exceptions=True)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def times(strategies: list[Any]) -> list[float]:
    """Return the seconds of each step but the first: from the last worker's end of a step to that of the next.

    The last step is left out, because in it no worker posts the next one.
    """
    marks: list[float] = []
    await everywhere(strategies, steps, marks)
    return list(np.diff(marks[len(strategies) - 1 :: len(strategies)])[:-1])


def timed(fn: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Wrap a function so that its seconds are recorded."""

    def call(*args: Any) -> Any:
        begun = time.process_time()
        found = fn(*args)
        if isinstance(found, Iterator):
            found = iter(list(found))
        spent.append(time.process_time() - begun)
        return found

    return call


async def heartbeat(peers: int = 256, times: int = 20) -> float:
    """Return the CPU seconds of sending a heartbeat to a worker and of receiving one from it."""
    pairs = [socket.socketpair() for _ in range(peers)]
    heard = [Peer(rank, *await asyncio.open_connection(sock=mine)) for rank, (mine, _) in enumerate(pairs)]
    hearing = [asyncio.create_task(peer.receive()) for peer in heard]
    spent = []
    for _ in range(times):
        for peer, (_, other) in zip(heard, pairs, strict=True):
            other.send(BEAT)
            peer.heard = 0.0
        begun = time.process_time()
        for peer in heard:
            peer.writer.write(BEAT)
        while not all(peer.heard for peer in heard):  # noqa: ASYNC110  (only CPU time counts)
            await asyncio.sleep(0)
        spent.append((time.process_time() - begun) / peers)
    for task, peer in zip(hearing, heard, strict=True):
        task.cancel()
        peer.writer.transport.abort()
    return min(spent)


async def measure(workers: int) -> list[float]:
    """Return the row of the table for a number of workers."""
    before, begun = peak_kib(), time.process_time()
    cluster = SimulatedCluster(workers)
    strategies = [MultiWorkerMirroredStrategy(["CPU:0"], communicator) for communicator in cluster.communicators]
    assert [strategy.num_replicas_in_sync for strategy in strategies] == [workers] * workers
    constructed = time.process_time() - begun
    await everywhere(strategies, nothing)

    begun = time.process_time()
    await everywhere(strategies, nothing)
    opened = time.process_time() - begun

    collected = float(np.mean(await times(strategies)))
    gc.disable()
    a_step = min(await times(strategies))

    marks: list[float] = []
    spent: list[float] = []  # by the first worker, on the messages of all
    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((simulated, "decode"), (Coordinator, "take")):
            patch.setattr(place, name, timed(getattr(place, name), spent))
        outcomes = await everywhere(strategies, diverging, workers // 2, marks)
    report = time.process_time() - marks[workers - 1]
    gc.enable()
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveMismatchError), outcome
        assert outcome.report.suspects == (workers // 2,)
    del outcomes
    return [constructed, opened, collected, a_step, report, sum(spent), (peak_kib() - before) / workers]


def main() -> None:
    os.environ["AIODIST_STALL_SECONDS"] = "0"  # a step of thousands of workers may take long, though nobody is late
    gc.freeze()
    names = ["workers", *(f"{what} s" for what in ("construct", "run", "gc step", "step", "report", "first's"))]
    names += ["KiB/worker", "µs/worker"]
    print("".join(f"{name:>12}" for name in names))
    for workers in map(int, sys.argv[1:] or (64, 512, 4096)):
        *seconds, memory = asyncio.run(measure(workers))
        shown = "".join(f"{one:12.3f}" for one in seconds)
        print(f"{workers:12}{shown}{memory:12.0f}{seconds[3] / workers * 1e6:12.0f}", flush=True)
    print(f"a heartbeat: {asyncio.run(heartbeat()) * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
