# SPDX-License-Identifier: Apache-2.0
"""Time what surrounds the CPU kernels: the event loop's patience, nests, the memory of results. Prints Markdown.

    python -m tests.benchmarks.cpu_event_loop           # about a minute, 2 GiB of memory

Everything that is compared runs in turn in one process, and the least time of each counts; of a ticker's delays, the
greatest.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist import get_replica_context
from aiodist._collectives.host import fold
from aiodist_kernels import ReduceOp, plan_for, pool, reduce, warm
from tests.benchmarks.cpu_reductions import HALF, SINGLE, SUM, random_buffers
from tests.benchmarks.timing import MIB, best, cpus, in_units, show

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

TICK = 1e-3
STEPS = 20


async def lateness(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Return by how many milliseconds a ticker was late meanwhile: at most, and in one of a hundred ticks."""
    delays: list[float] = []

    async def ticker() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TICK)
            delays.append(1e3 * (time.perf_counter() - begin - TICK))

    ticking = asyncio.create_task(ticker())
    await asyncio.sleep(0)
    await work()
    ticking.cancel()
    delays.sort()
    return delays[-1], delays[int(0.99 * len(delays))]


async def all_reduces(arrays: Sequence[np.ndarray], op: str = "SUM") -> None:
    async def replica() -> None:
        ctx = get_replica_context()
        for _ in range(STEPS):
            await ctx.all_reduce(op, arrays[ctx.replica_id_in_sync_group])

    await cpus(len(arrays)).run(replica)


async def chains_on_the_loop(arrays: Sequence[np.ndarray]) -> None:
    for _ in range(STEPS):
        functools.reduce(np.add, arrays)
        await asyncio.sleep(0)


def tickers() -> None:
    """Print how late a ticker was beside each kind of work, in each of three turns, and the least usual lateness."""
    cases: list[tuple[str, Callable[[], Awaitable[None]]]] = [("nothing", lambda: asyncio.sleep(0.5))]
    for count, dtype, op in ((2, "f4", "SUM"), (4, "f4", "SUM"), (8, "f4", "MEAN"), (8, "f2", "SUM"), (4, "i2", "SUM")):
        arrays = random_buffers(count, 256 * MIB // count, np.dtype(dtype))
        name = f"{op} {np.dtype(dtype).name}, n = {count}, {in_units(arrays[0].nbytes)} each"
        cases.append((name, functools.partial(all_reduces, arrays, op)))
    arrays = random_buffers(4, 64 * MIB, SINGLE)
    cases.append(("beside: `np.add` chain on the loop, n = 4, 64 MiB each", lambda: chains_on_the_loop(arrays)))
    rows = []
    for name, work in cases:
        turns = [asyncio.run(lateness(work)) for _ in range(3)]
        rows.append((name, ", ".join(f"{worst:.1f}" for worst, _ in turns), f"{min(usual for _, usual in turns):.1f}"))
    late = "a 1 ms ticker was late by at most, three turns, ms"
    show(("all_reduce of 256 MiB, again and again", late, "99 % of ticks"), rows)


async def whole_calls(nbytes: int, rounds: int) -> tuple[float, float, float]:
    """Time all_reduce of two replicas and, between each two, the reduction alone.

    Returns:
        The medians of both, in microseconds, and that of their ratio.
    """
    arrays = random_buffers(2, nbytes, SINGLE)
    whole: list[float] = []
    alone: list[float] = []

    async def replica() -> None:
        ctx = get_replica_context()
        kept: list[Any] = []
        first = ctx.replica_id_in_sync_group == 0
        for _ in range(rounds):
            await ctx.barrier()
            if first:
                begin = time.perf_counter()
                kept[:1] = [reduce(SUM, arrays)]
                alone.append(time.perf_counter() - begin)
            await ctx.barrier()
            begin = time.perf_counter()
            kept[1:] = [await ctx.all_reduce(SUM, arrays[ctx.replica_id_in_sync_group])]
            if first:
                whole.append(time.perf_counter() - begin)

    await cpus(2).run(replica)
    ratios = [one / other for one, other in zip(whole, alone, strict=True)]
    return 1e6 * statistics.median(whole), 1e6 * statistics.median(alone), statistics.median(ratios)


def nests() -> None:
    """Print what 160 leaves of one dtype take: one by one, as collectives do, and packed into one buffer first."""
    rows = []
    for elements in (16, 64, 256, 1000, 10_000):
        replicas = [random_buffers(160, 4 * elements, SINGLE) for _ in range(4)]
        columns = list(zip(*replicas, strict=True))
        calls: dict[str, Callable[[], object]] = {
            "one by one": functools.partial(_one_by_one, columns),
            "packed": functools.partial(_packed, replicas),
        }
        rows.append((str(elements), *(f"{took:.0f}" for took in best(calls, 0.5).values())))
    show(("160 float32 leaves, n = 4, elements each", "one by one, µs", "packed first, µs"), rows)


def _one_by_one(columns: Sequence[Sequence[np.ndarray]]) -> object:
    return [fold(SUM, column, None, among=True) for column in columns]


def _packed(replicas: Sequence[Sequence[np.ndarray]]) -> object:
    """Copy every replica's leaves into one buffer, reduce these, and cut the result."""
    whole = reduce(SUM, [np.concatenate(leaves) for leaves in replicas])
    return np.split(whole, np.cumsum([leaf.size for leaf in replicas[0]])[:-1])


def memory() -> None:
    """Print sums of two buffers into memory of each kind; a result is dropped when the next one is there."""
    rows = []
    for nbytes in (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB):
        one, other = random_buffers(2, nbytes, SINGLE)
        out = np.zeros_like(one)
        kept: list[np.ndarray] = []
        blocks = pool.Pool()

        def fresh(a: np.ndarray = one, b: np.ndarray = other, kept: list[np.ndarray] = kept) -> None:
            kept[:] = [np.add(a, b)]

        def pooled(a: np.ndarray = one, b: np.ndarray = other, kept: list[np.ndarray] = kept) -> None:
            kept[:] = [np.add(a, b, out=blocks.empty(a.shape, SINGLE))]  # noqa: B023

        times = best({"fresh": fresh, "pool": pooled, "`out=`": functools.partial(np.add, one, other, out=out)})
        rows.append((in_units(nbytes), *(f"{took:.0f}" for took in times.values())))
    show(("sum of two, µs", "fresh", "pool", "`out=`"), rows)


def main() -> None:
    """Warm up, measure, print."""
    warm(plan_for(op, SINGLE, n, "native") for op, n in ((SUM, 2), (SUM, 4), (ReduceOp.MEAN, 8)))
    warm([plan_for(SUM, HALF, 8, "native")])  # and none for int16: that one is compiled meanwhile
    tickers()
    rows = []
    for nbytes in (MIB // 4, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB):
        whole, alone, ratio = asyncio.run(whole_calls(nbytes, max(40, 400 * MIB // nbytes)))
        rows.append((in_units(nbytes), f"{whole:.0f}", f"{alone:.0f}", f"{ratio:.2f}"))
    show(("SUM float32, n = 2", "all_reduce, µs", "the reduction alone, µs", "ratio"), rows)
    nests()
    memory()


if __name__ == "__main__":
    main()
