"""Eight replicas on 1, 2, 4 or 8 workers: what a sum costs, and its bits.

Start it with `aiodist run -n 1 tests/benchmarks/layouts.py`, and with 2, 4 and 8. A digest is of the sums of all values
measured: with ``reduction="ordered"`` it is the same for every layout, and for every engine.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import time
from typing import Any

import numpy as np

from aiodist import MultiWorkerMirroredStrategy, get_replica_context
from aiodist._arrays import environment

REPLICAS = 8
SIZES = {"4 B": (1, 50), "64 KiB": (1 << 14, 10), "1 MiB": (1 << 18, 4)}
ROUNDS = 4


async def replica() -> tuple[list[float], str]:
    """Return the least microseconds by size, and a digest of the sums."""
    ctx = get_replica_context()
    found, bits = [], hashlib.sha256()
    for size, repeats in SIZES.values():
        value: Any = np.random.default_rng(ctx.replica_id_in_sync_group).normal(size=size).astype(np.float32)
        bits.update((await ctx.all_reduce("SUM", value)).tobytes())
        times = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for _ in range(repeats):
                await ctx.all_reduce("SUM", value)
            times.append((time.perf_counter() - begun) / repeats)
        found.append(1e6 * min(times))
    return found, bits.hexdigest()[:12]


def main() -> None:
    """Print a line for each way to reduce."""
    gc.disable()
    workers = environment.launched_workers() or 1
    devices = [f"CPU:{i}" for i in range(REPLICAS // workers)]
    for reduction in ("fast", "ordered"):
        strategy = MultiWorkerMirroredStrategy(devices, reduction=reduction)
        found, bits = strategy.experimental_local_results(asyncio.run(strategy.run(replica)))[0]
        if strategy.cluster_resolver.task_id == 0:
            shown = "  ".join(f"{name} {us:.0f}" for name, us in zip(SIZES, found, strict=True))
            print(f"{workers}x{REPLICAS // workers} {reduction:8} {shown}  µs  bits {bits}", flush=True)


if __name__ == "__main__":
    main()
