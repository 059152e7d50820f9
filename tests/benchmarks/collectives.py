"""The cost of a checked collective beside a bare rendezvous of as many tasks: docs/benchmarks/collectives.md.

    python -m tests.benchmarks.collectives

Every ratio is the median over several turns of two loops that are timed in turn in one process, in its CPU time: the
machine need not be idle. It takes about two minutes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import numpy as np

from aiodist import CollectiveMismatchError, ReduceOp, get_replica_context
from tests.benchmarks.timing import cpus, fresh_python, in_turn, ratio, show, versions

Program = Callable[[int], Awaitable[float]]


class BareRendezvous:
    """The least that n tasks can do to meet: the last one sets the future that the others await."""

    def __init__(self, size: int) -> None:
        self._size = self._missing = size
        self._loop = asyncio.get_running_loop()
        self._future = self._loop.create_future()

    async def wait(self) -> None:
        self._missing -= 1
        if self._missing:
            await self._future
        else:
            future, self._future, self._missing = self._future, self._loop.create_future(), self._size
            future.set_result(None)


def seconds_without(barrier: Callable[[int], BareRendezvous | asyncio.Barrier], size: int, rounds: int) -> float:
    """Return the seconds in which that many tasks meet once at a barrier, without aiodist."""
    took: list[float] = []

    async def task(wait: Callable[[], Awaitable[object]]) -> None:
        await wait()
        begin = time.process_time()
        for _ in range(rounds):
            await wait()
        took.append(time.process_time() - begin)

    async def main() -> None:
        wait = barrier(size).wait
        async with asyncio.TaskGroup() as tasks:
            for _ in range(size):
                tasks.create_task(task(wait))

    asyncio.run(main())
    return statistics.median(took) / rounds


def seconds(program: Program, size: int, rounds: int) -> float:
    """Return the seconds of one collective of a program on that many replicas, once all of them are running."""
    strategy = cpus(size)
    took = strategy.experimental_local_results(asyncio.run(strategy.run(program, (rounds,))))
    return statistics.median(map(float, took)) / rounds


# The replicas' own functions make the calls: in a helper a call takes 0.2 µs more, because its callers are recorded.


async def array(rounds: int) -> float:
    ctx, value = get_replica_context(), np.ones(1, np.float32)
    await ctx.barrier()
    begin = time.process_time()
    for _ in range(rounds):
        await ctx.all_reduce("SUM", value)
    return time.process_time() - begin


async def nest(rounds: int) -> float:
    ctx = get_replica_context()
    value = {"a": np.ones(4, np.float32), "b": [np.ones(2, np.float32), np.ones((), np.float32)]}
    await ctx.barrier()
    begin = time.process_time()
    for _ in range(rounds):
        await ctx.all_reduce("SUM", value)
    return time.process_time() - begin


async def barrier(rounds: int) -> float:
    ctx = get_replica_context()
    await ctx.barrier()
    begin = time.process_time()
    for _ in range(rounds):
        await ctx.barrier()
    return time.process_time() - begin


PROGRAMS: dict[str, Program] = {"array": array, "nest": nest, "barrier": barrier}


def collectives_table() -> None:
    """Print the cost of a collective per replica, and its ratio to the bare rendezvous."""
    rows = []
    for size in (2, 8, 64, 512):
        rounds = max(40, 24_000 // size)
        few = max(5, rounds // 20) if size > 64 else rounds
        loops: dict[str, Callable[[], float]] = {
            "bare": partial(seconds_without, BareRendezvous, size, rounds),
            **{name: partial(seconds, program, size, rounds) for name, program in PROGRAMS.items()},
            "asyncio.Barrier": partial(seconds_without, asyncio.Barrier, size, few),
        }
        took = in_turn(loops, 7)
        bare, *others = (
            f"{statistics.median(values) / size * 1e6:.2f} µs, {ratio(took, name, 'bare'):.2f}×"
            for name, values in took.items()
        )
        rows.append([str(size), bare.partition(",")[0], *others])
    show(("n", "bare future", "array", "nest, 3 arrays", "barrier", "asyncio.Barrier"), rows)
    print("\nTo reach: array 2.6× at n = 2 and 2.3× from 8 on, nest of three arrays 4×, barrier 2×.\n")


def many_replicas() -> None:
    """Print the cost and memory of each of 10,000 replicas, beside the cost of each of 64."""
    loops = {"few": lambda: seconds(array, 64, 1500) / 64, "many": lambda: seconds(array, 10_000, 20) / 10_000}
    took = in_turn(loops, 3)
    kib = fresh_python("-c", "from tests.benchmarks.collectives import memory; memory()")
    rows = [
        ("array all_reduce, per replica", f"{statistics.median(took['many']) * 1e6:.2f} µs", ""),
        ("beside that at n = 64", f"{ratio(took, 'many', 'few'):.2f}×", "1.3×"),
        ("memory per replica", f"{kib} KiB", "10 KiB"),
    ]
    show(("10,000 replicas", "measured", "to reach"), rows)


def memory() -> None:
    """Print the KiB of memory that each of 10,000 replicas takes while it waits in an all_reduce."""
    taken: list[float] = []

    async def replica(before: int) -> None:
        ctx = get_replica_context()
        if ctx.replica_id_in_sync_group == 9_999:
            taken.append((tracemalloc.get_traced_memory()[0] - before) / 1024 / 10_000)
        await ctx.all_reduce(ReduceOp.SUM, np.ones(1, np.float32))

    async def main() -> None:
        strategy = cpus(10_000)
        tracemalloc.start()
        await strategy.run(replica, (tracemalloc.get_traced_memory()[0],))
        print(f"{taken[0]:.1f}")

    asyncio.run(main())


def mismatch() -> None:
    """Print the time from a mismatching call to the exception from `run`, with 512 replicas."""
    called = 0.0

    async def program() -> None:
        nonlocal called
        ctx = get_replica_context()
        await ctx.all_reduce(ReduceOp.SUM, 1.0)
        if ctx.replica_id_in_sync_group == 511:
            called = time.process_time()
            await ctx.barrier()
        await ctx.all_reduce(ReduceOp.SUM, 2.0)

    async def main() -> list[float]:
        strategy = cpus(512)
        took = []
        for _ in range(9):
            with suppress(CollectiveMismatchError):
                await strategy.run(program)
            took.append((time.process_time() - called) * 1e3)
        return took

    took = asyncio.run(main())
    rows = [
        ("mismatching call to exception out of `run`, first", f"{took[0]:.1f} ms", "50 ms"),
        ("the same, median", f"{statistics.median(took):.1f} ms", "50 ms"),
    ]
    show(("512 replicas, one differs", "measured", "to reach"), rows)


IMPORTS = {
    "`import numpy, anyio, asyncio`": "import numpy, anyio, asyncio",
    "the same, optree, and anyio's asyncio backend": "import numpy, anyio._backends._asyncio, asyncio, optree",
    "`import aiodist`": "import aiodist",
    "`from aiodist import MirroredStrategy`": "from aiodist import MirroredStrategy",
}
FIRST = """
import asyncio, sys, time
import numpy as np
from aiodist import MirroredStrategy, get_replica_context
times = []
async def step():
    times.append(time.perf_counter())
    await get_replica_context().all_reduce("SUM", np.ones(3, np.float32))
    times.append(time.perf_counter())
async def main():
    begin = time.perf_counter()
    await MirroredStrategy(["CPU:0", "CPU:1"]).run(step)
    print(max(times) - min(times), time.perf_counter() - begin, "numba" in sys.modules)
asyncio.run(main())
"""


def import_seconds(imports: str) -> float:
    """Return the CPU time of imports in a fresh process, without that of its start."""
    program = f"import time; begin = time.process_time(); {imports}; print(time.process_time() - begin)"
    return float(fresh_python("-c", program))


def cold_start() -> None:
    """Print the CPU time of imports and the time of the first tiny all_reduce, each in fresh processes."""
    measures = {name: partial(import_seconds, imports) for name, imports in IMPORTS.items()}
    in_turn(measures, 1)  # which may compile the modules
    took = in_turn(measures, 13)
    base, reach = "`import numpy, anyio, asyncio`", {"`import aiodist`": "1.5×"}
    rows = [
        (name, f"{statistics.median(values) * 1e3:.0f} ms, {ratio(took, name, base):.2f}×", reach.get(name, ""))
        for name, values in took.items()
    ]
    *first, compilers = zip(*(fresh_python("-c", FIRST).split() for _ in range(13)), strict=True)
    collective, run = (f"{statistics.median(map(float, each)) * 1e3:.2f} ms" for each in first)
    rows.append(("first tiny all_reduce, from the first replica's call to the last one's result", collective, "1 ms"))
    rows.append(("the run that it is in, from making the strategy to its end", run, ""))
    rows.append(("compiler imported by then", compilers[0], "False"))
    show(("fresh process", "measured", "to reach"), rows)


if __name__ == "__main__":
    print(versions())
    collectives_table()
    many_replicas()
    mismatch()
    cold_start()
