"""Arrays on GPUs over several workers: their bits, and what collectives of them take beside those of host arrays.

    python -m tests.benchmarks.cuda_workers                       # two simulated workers in one process
    aiodist run -n 2 tests/benchmarks/cuda_workers.py             # real ones

Worker k takes GPU k as far as there are so many, and else they share them. It takes
about a minute, 1 GiB of GPU memory, numba, and the extra ``cuda``. A line has microseconds, or
what went wrong, and the first wrong value where there is one. Without a GPU it says so, and does nothing.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiodist import MultiWorkerMirroredStrategy, PerReplica, ReplicaContext, get_replica_context
from aiodist._arrays import devices, environment
from aiodist._workers.engines.simulated import SimulatedCluster
from tests.benchmarks.timing import least

SIZES = {
    "4 B": (1, 100),
    "64 KiB": (1 << 14, 50),
    "1 MiB": (1 << 18, 20),
    "16 MiB": (1 << 22, 5),
    "64 MiB": (1 << 24, 3),
}
"""Elements of float32, and how often."""

LEAVES = 160, 1 << 10, 10
ROUNDS = 3


class Gpu:
    """Arrays on GPUs: Numba's."""

    def __init__(self) -> None:
        self._cuda: Any = importlib.import_module("numba.cuda")

    def put(self, values: np.ndarray, ordinal: int) -> Any:
        """Return an array on a GPU."""
        with self._cuda.gpus[ordinal]:
            return self._cuda.to_device(values)

    def get(self, array: Any) -> np.ndarray:
        """Return an array of the host's with the same values."""
        found: np.ndarray = array.copy_to_host()
        return found


Call = Callable[[ReplicaContext, Any], Awaitable[Any]]

CALLS: dict[str, Call] = {
    "all_reduce": lambda ctx, value: ctx.all_reduce("SUM", value),
    "all_gather": lambda ctx, value: ctx.all_gather(value, 0),
    "broadcast": lambda ctx, value: ctx.broadcast(value, 1),
}


@dataclass
class Row:
    """One line: what was measured, in microseconds, for host arrays and for those on GPUs."""

    what: str
    host: float
    gpu: float
    wrong: str = ""

    def __str__(self) -> str:
        return f"{self.what:24} host {self.host:10.0f}   gpu {self.gpu:10.0f}   {self.wrong or 'same bits'}"


async def measured(call: Callable[[], Awaitable[Any]], repeats: int) -> tuple[float, Any]:
    """Return the least microseconds that a call takes, and what it returns."""
    return await least(call, repeats, ROUNDS), await call()


def of(rank: int, size: int) -> np.ndarray:
    """Return whole numbers, whose sums are exact in every order."""
    values: np.ndarray = (np.arange(size) % 7 + rank).astype(np.float32)
    return values


def differ(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """Say where results on GPUs are not those on the host."""
    for leaf, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one.shape != other.shape:
            return f"WRONG: leaf {leaf} has the shape {one.shape}, not {other.shape}"
        places = np.flatnonzero(one != other)
        if places.size:
            at = places[0]
            return f"WRONG: {places.size} values, first {one.flat[at]} for {other.flat[at]} at {at} of leaf {leaf}"
    return ""


async def replica(lab: Gpu, ordinal: int, sizes: dict[str, tuple[int, int]], leaves: tuple[int, int, int]) -> list[Row]:
    """Measure collectives of a run."""
    ctx = get_replica_context()
    me, rows = ctx.replica_id_in_sync_group, []
    for name, (size, repeats) in sizes.items():
        for kind, call in CALLS.items():
            value = of(me, size)
            rows.append(await beside(lab, f"{kind} {name}", ctx, call, [value], ordinal, repeats))
    count, size, repeats = leaves
    nest = [of(me + leaf, size) for leaf in range(count)]
    name = f"all_reduce {count} leaves"
    rows.append(await beside(lab, name, ctx, CALLS["all_reduce"], nest, ordinal, repeats))
    return rows


async def beside(
    lab: Gpu, what: str, ctx: ReplicaContext, call: Call, values: list[np.ndarray], ordinal: int, repeats: int
) -> Row:
    """Measure a collective of host arrays, and of the same on a GPU."""
    there = [lab.put(value, ordinal) for value in values]
    host, wanted = await measured(lambda: call(ctx, values), repeats)
    gpu, found = await measured(lambda: call(ctx, there), repeats)
    return Row(what, host, gpu, differ([lab.get(array) for array in found], wanted))


async def outside(lab: Gpu, strategy: MultiWorkerMirroredStrategy, rank: int, ordinal: int, size: int) -> Row:
    """Measure what is called outside of replicas."""
    value = of(rank, size)
    on_host, there = PerReplica([value]), PerReplica([lab.put(value, ordinal)])
    to = strategy.extended.worker_devices[0]
    host, wanted = await measured(lambda: strategy.extended.reduce_to("SUM", on_host, to), 20)
    gpu, found = await measured(lambda: strategy.extended.reduce_to("SUM", there, to), 20)
    return Row(f"reduce_to {4 * size >> 10} KiB", host, gpu, differ([lab.get(found)], [wanted]))


async def measure(
    lab: Gpu,
    strategy: MultiWorkerMirroredStrategy,
    rank: int,
    sizes: dict[str, tuple[int, int]] = SIZES,
    leaves: tuple[int, int, int] = LEAVES,
) -> list[Row]:
    """Measure all on one worker, whose strategy has one replica."""
    ordinal = devices.gpu_number(strategy.extended.worker_devices[0])
    (rows,) = strategy.experimental_local_results(await strategy.run(replica, (lab, ordinal, sizes, leaves)))
    return [*rows, await outside(lab, strategy, rank, ordinal, min(1 << 18, max(size for size, _ in sizes.values())))]


def show(strategy: MultiWorkerMirroredStrategy, rows: Sequence[Row]) -> None:
    """Print what was found."""
    print(f"{strategy!r}, through host memory; microseconds")
    for row in rows:
        print(row)


async def simulated(
    lab: Gpu, sizes: dict[str, tuple[int, int]] = SIZES, leaves: tuple[int, int, int] = LEAVES
) -> tuple[MultiWorkerMirroredStrategy, list[Row]]:
    """Measure with two workers in this process."""
    strategies = [MultiWorkerMirroredStrategy(["GPU:0"], each) for each in SimulatedCluster(2).communicators]
    workers = [measure(lab, strategy, rank, sizes, leaves) for rank, strategy in enumerate(strategies)]
    try:
        return strategies[0], (await asyncio.gather(*workers))[0]
    finally:
        for strategy in strategies:
            strategy.close()


def main() -> int:
    """Run the benchmark; return 1 where a value is wrong, else 0."""
    found = devices.find_gpus().gpus
    if not found:
        print(f"There is no GPU to measure: {devices.why_absent()}.")
        return 0
    gc.disable()
    rank = environment.worker_rank()
    if (environment.launched_workers() or 1) == 1:
        strategy, rows = asyncio.run(simulated(Gpu()))
    else:
        strategy = MultiWorkerMirroredStrategy(devices=[f"GPU:{rank % len(found)}"])
        rows = asyncio.run(measure(Gpu(), strategy, rank))
    if rank == 0:
        show(strategy, rows)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
