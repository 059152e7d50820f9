# SPDX-License-Identifier: Apache-2.0
"""Time the CPU reductions beside NumPy, C, torch and jax, and print tables in Markdown.

    python -m tests.benchmarks.cpu_reductions           # about four minutes, 2 GiB of memory
    python -m tests.benchmarks.cpu_reductions native    # one of its parts: sums, native, wide, tiny

Everything that is compared runs in turn in one process, and the least CPU time of each counts: figures differ
from machine to machine and from hour to hour, ratios less so.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import platform
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._arrays.leaves import LeafType, Spec
from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import ALL_REDUCE, Collective
from aiodist_kernels import KernelSpec, ReduceOp, reduce, reduction, warm
from tests.benchmarks.reduction_limit import Limit, compile_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SUM, MEAN, MIN, MAX, PRODUCT = ReduceOp
KIB, MIB = 1 << 10, 1 << 20
SINGLE = np.dtype(np.float32)
UFUNCS: dict[ReduceOp, Any] = {SUM: np.add, MIN: np.minimum, MAX: np.maximum, PRODUCT: np.multiply}


def best(calls: dict[str, Callable[[], object]], seconds: float = 0.4) -> dict[str, float]:
    """Return the least time of each call, in microseconds; calls take turns."""
    times = dict.fromkeys(calls, float("inf"))
    loops = {}
    for name, call in calls.items():
        call()
        once = _time(call, 1)
        loops[name] = max(1, int(100e-6 / max(once, 1e-9)))
    end = time.perf_counter() + seconds * len(calls)
    rounds = 0
    while rounds < 4 or time.perf_counter() < end:
        rounds += 1
        for name, call in calls.items():
            if loops[name] > 1 or times[name] < 5e-3:
                call()  # what ran before has taken the caches
            times[name] = min(times[name], _time(call, loops[name]) / loops[name])
    return {name: 1e6 * least for name, least in times.items()}


def _time(call: Callable[[], object], loops: int) -> float:
    start = time.process_time()
    for _ in range(loops):
        call()
    return time.process_time() - start


def random_buffers(count: int, nbytes: int, dtype: np.dtype) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    size = max(1, nbytes // dtype.itemsize)
    blocks = [generator.uniform(0.5, 100, min(size, MIB)).astype(dtype) for _ in range(count)]
    return [np.resize(block, size) for block in blocks]


def aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Return an array at a multiple of 64 bytes, its pages touched."""
    raw = np.zeros(size * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * dtype.itemsize].view(dtype)


def fresh_chain(op: ReduceOp, buffers: Sequence[np.ndarray]) -> Callable[[], object]:
    """Return the fold that one writes by hand, into an array of its own."""
    ufunc = UFUNCS[op]

    def call() -> object:
        out = ufunc(buffers[0], buffers[1])
        for buffer in buffers[2:]:
            ufunc(out, buffer, out=out)
        return out

    return call


def chain(op: ReduceOp, buffers: Sequence[np.ndarray], out: np.ndarray) -> Callable[[], object]:
    """Return the fold that one writes by hand."""
    ufunc = UFUNCS[op]

    def call() -> None:
        ufunc(buffers[0], buffers[1], out=out)
        for buffer in buffers[2:]:
            ufunc(out, buffer, out=out)

    return call


def peers(buffers: Sequence[np.ndarray]) -> dict[str, Callable[[], object]]:
    """Return the same sum in the libraries that are installed."""
    calls: dict[str, Callable[[], object]] = {}
    if torch := _optional("torch"):
        tensors = [torch.from_numpy(buffer) for buffer in buffers]
        total = torch.empty_like(tensors[0])

        def add_in_place() -> None:
            total.copy_(tensors[0])
            for tensor in tensors[1:]:
                total.add_(tensor)

        calls["torch `add_` chain"] = add_in_place
    if jax := _optional("jax"):
        arrays = [jax.device_put(buffer) for buffer in buffers]
        jitted = jax.jit(lambda *xs: functools.reduce(operator.add, xs))
        calls["jax jit"] = lambda: jitted(*arrays).block_until_ready()
    return calls


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def sums(limit: Limit | None) -> dict[tuple[int, int], dict[str, float]]:
    """Time float32 sums by every scheme."""
    results = {}
    for count in (2, 4, 8):
        for nbytes in (4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB):
            buffers = random_buffers(count, nbytes, SINGLE)
            out = aligned(buffers[0].size, SINGLE)
            calls: dict[str, Callable[[], object]] = {}
            if limit:
                calls["C, non-temporal store"] = limit.sum(buffers, out, "streaming")
                calls["C, plain store"] = limit.sum(buffers, out, "plain")
            calls["`np.add` chain"] = chain(SUM, buffers, out)
            calls |= peers(buffers)
            calls["**aiodist, `out=`**"] = functools.partial(reduce, SUM, buffers, out=out)
            calls["aiodist, fresh output"] = functools.partial(reduce, SUM, buffers)
            results[count, nbytes] = best(calls)
            assert np.array_equal(reduce(SUM, buffers), functools.reduce(np.add, buffers))
    return results


NATIVE_COUNTS = (2, 3, 4, 8, 16)
NATIVE_SIZES = (64, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)


def sweep() -> dict[str, dict[int, dict[int, tuple[float, float]]]]:
    """Time native sums of all sizes, as collectives do them, beside the chain: µs by dtype, count and bytes."""
    rows: dict[str, dict[int, dict[int, tuple[float, float]]]] = {}
    for name in ("float32", "int64"):
        for count in NATIVE_COUNTS:
            row = rows.setdefault(name, {}).setdefault(count, {})
            for nbytes in NATIVE_SIZES:
                buffers = random_buffers(count, nbytes, np.dtype(name))
                calls: dict[str, Callable[[], object]] = {
                    "chain": fresh_chain(SUM, buffers),
                    "ours": functools.partial(reduction(SUM, np.dtype(name), buffers[0].shape, count), buffers),
                }
                times = best(calls, 0.05)
                row[nbytes] = times["chain"], times["ours"]
    return rows


def wide() -> list[tuple[str, dict[str, float]]]:
    """Time folds with a wider accumulator, n = 8, beside the chain in the buffers' own dtype."""
    rows = []
    dtypes: list[np.dtype] = [np.dtype(np.float16), SINGLE]
    if ml_dtypes := _optional("ml_dtypes"):
        dtypes.insert(1, np.dtype(ml_dtypes.bfloat16))
    for dtype in dtypes:
        for op, chained in ((SUM, SUM), (MEAN, SUM)):
            for nbytes in (64 * KIB, MIB, 16 * MIB):
                buffers = random_buffers(8, nbytes, dtype)
                out = np.empty_like(buffers[0])
                calls: dict[str, Callable[[], object]] = {
                    "chain": chain(chained, buffers, out),
                    "ours": functools.partial(reduce, op, buffers, out=out),
                }
                rows.append((f"{op.name} {dtype.name}, {size_name(nbytes)}", best(calls, 0.2)))
    return rows


def tiny() -> list[list[str]]:
    """Time reductions of numbers and of arrays of no dimension, as the scheduler calls them; µs by their count."""
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
            calls: dict[str, Callable[[], object]] = {}
            for count in counts:
                leaves = [make(1.5 + i / 8) for i in range(count)]
                dtype = getattr(leaves[0], "dtype", type(leaves[0]))
                collective = Collective(ALL_REDUCE, op, None, Spec(((),), (dtype,), (mark,), single=True))
                calls[str(count)] = functools.partial(executor(collective, count).run, leaves)
            times = best(calls, 0.05)
            rows.append([f"{op.name} of {name}", *(f"{times[str(count)]:.2f}" for count in counts)])
    return rows


START = """
import time, sys, numpy
a = time.perf_counter(); import aiodist_kernels as k; b = time.perf_counter()
k.reduce(k.ReduceOp.SUM, [numpy.ones(4, "f4")] * 2); c = time.perf_counter()
assert "numba" not in sys.modules
print(b - a, c - b)
"""


def cold_start() -> tuple[float, float]:
    """Return the milliseconds to import the kernels after NumPy, and of the first reduction."""
    runs = [subprocess.run([sys.executable, "-c", START], check=True, capture_output=True, text=True) for _ in range(5)]
    pairs = [tuple(map(float, run.stdout.split())) for run in runs]
    return 1e3 * min(p[0] for p in pairs), 1e3 * min(p[1] for p in pairs)


def copy_bandwidth() -> float:
    """Return bytes read and written a second, in GB, of a copy of 256 MiB."""
    source, target = np.ones(256 * MIB, np.uint8), np.ones(256 * MIB, np.uint8)
    return 2 * source.nbytes / best({"copy": lambda: np.copyto(target, source)}, 1)["copy"] / 1e3


def size_name(nbytes: int) -> str:
    units = ((MIB, "MiB"), (KIB, "KiB"), (1, "B"))
    return next(f"{nbytes // unit} {name}" for unit, name in units if nbytes >= unit)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def print_native(rows: dict[str, dict[int, dict[int, tuple[float, float]]]]) -> None:
    """Print the time over the chain's of every cell, and the gate."""
    for name, by_count in rows.items():
        table(
            (f"{name} SUM: time over the NumPy chain's", *map(size_name, NATIVE_SIZES)),
            [(f"n = {n}", *(f"{ours / chain:.2f}" for chain, ours in row.values())) for n, row in by_count.items()],
        )
    cells = sorted(
        (ours / chain, f"{name}, n = {n}, {size_name(nbytes)}")
        for name, by_count in rows.items()
        for n, row in by_count.items()
        for nbytes, (chain, ours) in row.items()
    )
    within = sum(ratio <= 1.05 for ratio, _ in cells)
    middle = cells[len(cells) // 2][0]
    print(f"\nNative dtype, wanted ≤ 1.05: {within} of {len(cells)} cells within, median {middle:.2f}.")
    print("Beyond: " + "; ".join(f"{ratio:.2f} ({what})" for ratio, what in cells[within:]))


def print_sums() -> None:
    """Print float32 sums by every scheme, and the gate."""
    limit = compile_limit()
    absent = [name for name in ("torch", "jax") if not _optional(name)] + ([] if limit else ["a C compiler"])
    print("".join(f"Not installed: {name}. " for name in absent))
    results = sums(limit)
    columns = list(results)
    table(
        ["float32 SUM, µs", *(f"n = {n}, {size_name(b)}" for n, b in columns)],
        [
            [
                name,
                *(f"{results[c][name]:.3g}" if results[c][name] < 1000 else f"{results[c][name]:.0f}" for c in columns),
            ]
            for name in results[columns[0]]
        ],
    )
    large = results[8, 64 * MIB]
    ours, streaming = large["**aiodist, `out=`**"], large.get("C, non-temporal store")
    print(
        f"\nn = 8, 64 MiB: {large['`np.add` chain'] / ours:.2f} times faster than the NumPy chain, wanted ≥ 1.6;",
        end=" ",
    )
    print(f"share of the C limit {streaming / ours:.2f}, wanted ≥ 0.95." if streaming else "no C compiler.")


def print_wide() -> None:
    """Print folds with wider accumulators."""
    table(
        ["wider accumulator, n = 8", "NumPy chain in its own dtype, µs", "aiodist, µs", "times faster"],
        [[name, f"{t['chain']:.0f}", f"{t['ours']:.0f}", f"{t['chain'] / t['ours']:.1f}"] for name, t in wide()],
    )


def print_tiny() -> None:
    """Print what is too small for anything but calls to count."""
    head = ("µs", *(f"n = {count}" for count in (2, 4, 8, 16, 64)))
    table(("NumPy and Python alone, " + head[0], *head[1:]), tiny())
    loaded, first = cold_start()
    print(f"\nImport of the kernels after NumPy {loaded:.1f} ms, first reduction {first:.2f} ms, no compiler imported.")


def _warm(ops: Sequence[ReduceOp], dtypes: Sequence[Any], counts: Sequence[int]) -> None:
    started = time.perf_counter()
    specs = [KernelSpec(op, np.dtype(dtype), count) for op in ops for dtype in dtypes for count in counts]
    warm(specs)
    print(f"{len(specs)} kernels compiled in {time.perf_counter() - started:.1f} s.")


def main() -> None:
    """Warm up, measure, print."""
    parts = sys.argv[1:] or ["tiny", "sums", "wide", "native"]
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, Numba {_optional('numba').__version__}"
    print(f"{time.strftime('%B %Y')}; {platform.machine()}, {os.cpu_count()} cores; {versions}.")
    print(f"A copy of 256 MiB moves {copy_bandwidth():.1f} GB/s, read and written.")
    if "tiny" in parts:
        print_tiny()
    if "sums" in parts:
        _warm((SUM,), (SINGLE,), (2, 4, 8))
        print_sums()
    if "wide" in parts:
        extra = [np.dtype(m.bfloat16)] if (m := _optional("ml_dtypes")) else []
        _warm((SUM, MEAN), (np.float16, *extra, SINGLE), (8,))
        print_wide()
    if "native" in parts:
        _warm((SUM,), ("f4", "i8"), NATIVE_COUNTS)
        print_native(sweep())


if __name__ == "__main__":
    main()
