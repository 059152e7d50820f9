"""The program of the doctor's job: every worker reduces something small and something large; the first prints figures.

A line that begins with the mark has them, as JSON: what else workers and launchers print does not matter.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from aiodist import MultiWorkerMirroredStrategy, get_replica_context

MARK: Final = "aiodist doctor measured: "
_ROUNDS: Final = 5
_LARGE: Final = 8 << 20


async def _least(fn: Callable[[], Awaitable[Any]], repeats: int) -> float:
    """Return the seconds of one call: the least mean of some rounds, the first of which do not count."""
    found = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        for _ in range(repeats):
            await fn()
        found.append((time.perf_counter() - begun) / repeats)
    return min(found[1:])


async def _measure() -> dict[str, float]:
    ctx = get_replica_context()
    small, large = np.ones(1, np.float32), np.ones(_LARGE // 4, np.float32)
    seconds = await _least(lambda: ctx.all_reduce("SUM", small), 200)
    large_seconds = await _least(lambda: ctx.all_reduce("SUM", large), 4)
    return {"microseconds": seconds * 1e6, "gigabytes": _LARGE / large_seconds / 1e9}


def _engine(name: str) -> str:
    if name != "mpi":
        return name
    from aiodist.workers.mpi import library

    return library()


def main() -> None:
    """Measure, and print it on the first worker."""
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"])
    measured = asyncio.run(strategy.run(_measure))
    cluster = strategy.cluster_resolver
    if cluster.task_id == 0:
        told = {
            **measured,
            "hosts": sorted(set(cluster.spec["worker"])),
            "engine": _engine(strategy._communicator.engine),
        }
        sys.stdout.write(f"{MARK}{json.dumps(told)}\n")


if __name__ == "__main__":
    main()
