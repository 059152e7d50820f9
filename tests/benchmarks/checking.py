"""What checking costs: schedules explored a second, and the check of thousands of replicas.

Run it on a quiet machine: ``python tests/benchmarks/checking.py``.
"""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import aiodist
from aiodist import MirroredStrategy, get_replica_context
from aiodist.testing import explore, run_replicas

VALUE = np.ones(4)
COLLECTIVES = 100
TARGET = """
import numpy as np
from aiodist import get_replica_context

VALUE = np.ones(4)

async def replica():
    ctx = get_replica_context()
    for _ in range(100):
        await ctx.all_reduce("SUM", VALUE)
"""


async def replica() -> None:
    """Make a hundred collectives."""
    ctx = get_replica_context()
    for _ in range(COLLECTIVES):
        await ctx.all_reduce("SUM", VALUE)


def cpus(count: int) -> MirroredStrategy:
    """Return a strategy of that many replicas."""
    return MirroredStrategy([f"CPU:{index}" for index in range(count)])


def least(fn: Callable[[], Any], repeats: int) -> float:
    """Return the least time that a call takes, in seconds."""
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        fn()
        took.append(time.perf_counter() - begin)
    return min(took)


def exploring(replicas: int, schedules: int) -> None:
    """Print how many schedules a second are explored, and what the same runs take on asyncio's own loop."""
    strategy = cpus(replicas)
    plain = least(lambda: asyncio.run(strategy.run(replica)), 30)
    controlled = least(lambda: run_replicas(replica, strategy), 30)
    explored = least(lambda: explore(replica, strategy, schedules=schedules), 3) / schedules
    print(f"{replicas} replicas, {COLLECTIVES} collectives each, ms a run:")
    print(f"  asyncio's own loop   {plain * 1e3:6.2f}")
    print(f"  controlled, plain    {controlled * 1e3:6.2f}")
    print(f"  explored             {explored * 1e3:6.2f}   {1 / explored:.0f} schedules a second")


def checking(replicas: int) -> None:
    """Print how long `aiodist check` takes, from the start of the process to its end."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "many.py").write_text(TARGET)
        command = [sys.executable, "-m", "aiodist", "check", "many.py:replica", "--replicas", str(replicas)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        begin = time.perf_counter()
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    print(f"aiodist check of {replicas} replicas, {COLLECTIVES} collectives each: {time.perf_counter() - begin:.1f} s")


def main() -> None:
    """Print everything."""
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, aiodist {aiodist.__version__}\n")
    exploring(8, 200)
    checking(4096)


if __name__ == "__main__":
    main()
