"""What an ``all_reduce`` of PyTorch's tensors on the first GPU takes, from four replicas' calls to their results."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from time import perf_counter
from typing import Any

from aiodist import MirroredStrategy, ReduceOp, get_replica_context
from aiodist._arrays import gpus

REPLICAS = 4
NESTS = {"a tensor of 64 KiB": (1 << 14,), "160 tensors of 1000 and more": tuple(range(1000, 1160))}
ROUNDS = 50


def measure() -> dict[str, str]:
    """Return a line for a person; nothing where PyTorch sees no GPU."""
    if importlib.util.find_spec("torch") is None:
        return {}
    try:
        found = {name: took(sizes) for name, sizes in NESTS.items()}
    except Exception as error:  # noqa: BLE001  (whatever ails it, the table is made)
        return {"all_reduce of torch tensors": f"failed, {type(error).__name__}: {error}".splitlines()[0]}
    times = ", ".join(f"{name} {time:.0f} µs" for name, time in found.items())
    return {"all_reduce of torch tensors": f"{REPLICAS} replicas on one GPU, the whole way: {times}"}


def took(sizes: tuple[int, ...]) -> float:
    """Return microseconds, as the median of some."""
    torch: Any = importlib.import_module("torch")
    times: list[float] = []

    async def replica() -> None:
        ctx = get_replica_context()
        me = ctx.replica_id_in_sync_group
        value = [torch.full((size,), float(me), device="cuda") for size in sizes]
        result: list[Any] = []
        for _ in range(ROUNDS):
            start = perf_counter()
            result = await ctx.all_reduce(ReduceOp.SUM, value)
            times.append(perf_counter() - start)
        assert all(bool((leaf == sum(range(REPLICAS))).all()) for leaf in result)

    before = gpus.logical
    gpus.logical = gpus.LogicalGpus()
    gpus.logical.split[0] = REPLICAS
    try:
        asyncio.run(MirroredStrategy([f"GPU:{k}" for k in range(REPLICAS)]).run(replica))
    finally:
        gpus.logical = before
    return 1e6 * sorted(times)[len(times) // 2]
