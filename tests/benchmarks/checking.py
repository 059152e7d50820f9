"""What checking costs: schedules explored a second, and the check of thousands of replicas.

Run it on a quiet machine, from a checkout: ``python -m tests.benchmarks.checking``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from aiodist import get_replica_context
from aiodist.testing import explore, run_replicas
from tests.benchmarks.timing import cpus, fresh_python, versions

VALUE = np.ones(4)
COLLECTIVES = 100


async def replica() -> None:
    """Make a hundred collectives."""
    ctx = get_replica_context()
    for _ in range(COLLECTIVES):
        await ctx.all_reduce("SUM", VALUE)


def least_seconds(fn: Callable[[], Any], repeats: int) -> float:
    """Return the least time that a call takes."""
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        fn()
        took.append(time.perf_counter() - begin)
    return min(took)


def exploring(replicas: int, schedules: int) -> None:
    """Print how many schedules a second are explored, and what the same runs take on asyncio's own loop."""
    strategy = cpus(replicas)
    plain = least_seconds(lambda: asyncio.run(strategy.run(replica)), 30)
    controlled = least_seconds(lambda: run_replicas(replica, strategy), 30)
    explored = least_seconds(lambda: explore(replica, strategy, schedules=schedules), 3) / schedules
    print(f"{replicas} replicas, {COLLECTIVES} collectives each, ms a run:")
    print(f"  asyncio's own loop   {plain * 1e3:6.2f}")
    print(f"  controlled, plain    {controlled * 1e3:6.2f}")
    print(f"  explored             {explored * 1e3:6.2f}   {1 / explored:.0f} schedules a second")


def checking(replicas: int) -> None:
    """Print how long `aiodist check` takes, from the start of the process to its end."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "many.py"
        target.write_text(f"from {__spec__.name} import replica")
        took = least_seconds(
            lambda: fresh_python("-m", "aiodist", "check", f"{target}:replica", "--replicas", str(replicas)), 1
        )
    print(f"aiodist check of {replicas} replicas, {COLLECTIVES} collectives each: {took:.1f} s")


if __name__ == "__main__":
    print(versions())
    exploring(8, 200)
    checking(4096)
