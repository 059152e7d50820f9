# SPDX-License-Identifier: Apache-2.0
"""The CPU reductions beside NumPy, as tables in Markdown.

    python -m tests.benchmarks.cpu_reductions           # about three minutes, 2 GiB of memory
    python -m tests.benchmarks.cpu_reductions native    # one of its parts: tiny, wide, native, whole

Calls that are compared run in turn in one process, and the least CPU time of each counts: ratios differ less from
machine to machine and from hour to hour than times do.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from aiodist import get_replica_context
from aiodist._arrays.leaves import LeafType, Spec
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import ALL_REDUCE, Collective
from aiodist_kernels import ReduceOp, plan_for, reduce, reduction, warm
from tests.benchmarks.timing import KIB, MIB, best, cpus, in_units, show, versions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Calls = dict[str, Callable[[], object]]

SUM, MEAN, MIN, MAX, PRODUCT = ReduceOp
SINGLE, HALF, BFLOAT16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def random_buffers(count: int, nbytes: int, dtype: np.dtype) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    size = max(1, nbytes // dtype.itemsize)
    blocks = [generator.uniform(0.5, 100, min(size, MIB)).astype(dtype) for _ in range(count)]
    return [np.resize(block, size) for block in blocks]


def chain(buffers: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    """Fold as one does by hand, into a new array if none is given."""
    total: np.ndarray = np.add(buffers[0], buffers[1], out=out)
    for buffer in buffers[2:]:
        np.add(total, buffer, out=total)
    return total


def compiled(ops: Sequence[ReduceOp], dtypes: Sequence[Any], counts: Sequence[int]) -> None:
    started = time.perf_counter()
    specs = [plan_for(op, np.dtype(dtype), count, "native") for op in ops for dtype in dtypes for count in counts]
    warm(specs)
    print(f"\n{len(specs)} kernels compiled in {time.perf_counter() - started:.1f} s.")


def native() -> None:
    """Print the time of sums in the native dtype, as collectives compute them, over the NumPy chain's."""
    counts = (2, 3, 4, 8, 16)
    sizes = (64, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    compiled((SUM,), ("f4", "i8"), counts)
    cells = []
    for dtype in map(np.dtype, ("f4", "i8")):
        rows = []
        for count in counts:
            ratios = []
            for nbytes in sizes:
                buffers = random_buffers(count, nbytes, dtype)
                ours = reduction(SUM, dtype, buffers[0].shape, count)
                times = best({"chain": partial(chain, buffers), "ours": partial(ours, buffers)}, 0.05)
                ratios.append(times["ours"] / times["chain"])
                cells.append((ratios[-1], f"{dtype.name}, n = {count}, {in_units(nbytes)}"))
            rows.append((f"n = {count}", *(f"{ratio:.2f}" for ratio in ratios)))
        show((f"{dtype.name} SUM: time over the NumPy chain's", *map(in_units, sizes)), rows)
    cells.sort()
    within = sum(ratio <= 1.05 for ratio, _ in cells)
    middle = cells[len(cells) // 2][0]
    print(f"\nNative dtype, wanted ≤ 1.05: {within} of {len(cells)} cells within, median {middle:.2f}.")
    print("Beyond: " + "; ".join(f"{ratio:.2f} ({what})" for ratio, what in cells[within:]))


def wide() -> None:
    """Print the times of folds with a wider accumulator beside the chain in the buffers' own dtype."""
    compiled((SUM, MEAN), (HALF, BFLOAT16, SINGLE), (8,))
    rows = []
    for dtype, op, nbytes in product((HALF, BFLOAT16, SINGLE), (SUM, MEAN), (64 * KIB, MIB, 16 * MIB)):
        buffers = random_buffers(8, nbytes, dtype)
        out = np.empty_like(buffers[0])
        calls: Calls = {"chain": partial(chain, buffers, out), "ours": partial(reduce, op, buffers, out=out)}
        chained, ours = best(calls, 0.2).values()
        times = f"{chained:.0f}", f"{ours:.0f}", f"{chained / ours:.1f}"
        rows.append((f"{op.name} {dtype.name}, {in_units(nbytes)}", *times))
    show(("wider accumulator, n = 8", "NumPy chain in its own dtype, µs", "aiodist, µs", "times faster"), rows)


def tiny() -> None:
    """Print the times of reductions of numbers and of arrays of no dimension, as the scheduler calls them."""
    counts = (2, 4, 8, 16, 64)
    rows = []
    for op in (SUM, MEAN, MAX, PRODUCT):
        for name, mark, make in (
            ("Python floats", LeafType.PYTHON_NUMBER, float),
            ("Python ints", LeafType.PYTHON_NUMBER, int),
            ("NumPy scalars, float64", LeafType.NUMPY_SCALAR, np.float64),
            ("arrays of shape (), float32", LeafType.NUMPY_ARRAY, lambda x: np.array(x, SINGLE)),
            ("arrays of shape (), int64", LeafType.NUMPY_ARRAY, lambda x: np.array(x, np.int64)),
        ):
            calls: Calls = {}
            for count in counts:
                leaves = [make(1.5 + i / 8) for i in range(count)]
                dtype = getattr(leaves[0], "dtype", type(leaves[0]))
                collective = Collective(ALL_REDUCE, op, None, Spec(((),), (dtype,), (mark,), single=True))
                calls[str(count)] = partial(executor(collective, count).run, leaves)
            rows.append([f"{op.name} of {name}", *(f"{took:.2f}" for took in best(calls, 0.05).values())])
    show(("NumPy and Python alone, µs", *(f"n = {count}" for count in counts)), rows)


async def whole_calls(nbytes: int, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of each all_reduce of two replicas, and of the same reduction alone just before it."""
    arrays = random_buffers(2, nbytes, SINGLE)
    found: list[tuple[float, float]] = []

    async def replica() -> None:
        ctx = get_replica_context()
        kept: list[Any] = []
        for _ in range(rounds):
            await ctx.barrier()
            begin = time.perf_counter()
            if ctx.replica_id_in_sync_group == 0:
                kept[:1] = [reduce(SUM, arrays)]
            alone = time.perf_counter() - begin
            await ctx.barrier()
            begin = time.perf_counter()
            kept[1:] = [await ctx.all_reduce(SUM, arrays[ctx.replica_id_in_sync_group])]
            if ctx.replica_id_in_sync_group == 0:
                found.append((time.perf_counter() - begin, alone))

    await cpus(2).run(replica)
    return found


def whole() -> None:
    """Print the wall-clock times of a whole all_reduce and of the reduction alone."""
    compiled((SUM,), (SINGLE,), (2,))
    rows = []
    for nbytes in (MIB // 4, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB):
        times = asyncio.run(whole_calls(nbytes, max(40, 400 * MIB // nbytes)))
        took, alone = (f"{1e6 * statistics.median(column):.0f}" for column in zip(*times, strict=True))
        rows.append((in_units(nbytes), took, alone, f"{statistics.median(one / other for one, other in times):.2f}"))
    show(("SUM float32, n = 2", "all_reduce, µs", "the reduction alone, µs", "ratio"), rows)


def main() -> None:
    parts = {"tiny": tiny, "wide": wide, "native": native, "whole": whole}
    print(f"{versions()} Numba {version('numba')}.")
    source, target = np.ones(256 * MIB, np.uint8), np.ones(256 * MIB, np.uint8)
    bandwidth = 2 * source.nbytes / best({"copy": lambda: np.copyto(target, source)}, 1)["copy"] / 1e3
    print(f"A copy of 256 MiB moves {bandwidth:.1f} GB/s, read and written.")
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
