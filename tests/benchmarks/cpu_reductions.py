# SPDX-License-Identifier: Apache-2.0
"""Time the CPU reductions beside NumPy, C, torch and jax, and print tables in Markdown.

    python -m tests.benchmarks.cpu_reductions           # about four minutes, 2 GiB of memory

Everything that is compared runs in turn in one process, and the least time of each counts: figures differ
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
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist_kernels import KernelSpec, ReduceOp, cut, reduce, reduce_alike, reduce_numbers, warm
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
    while rounds < 5 or time.perf_counter() < end:
        rounds += 1
        for name, call in calls.items():
            if loops[name] > 1 or times[name] < 5e-3:
                call()  # what ran before has taken the caches
            times[name] = min(times[name], _time(call, loops[name]) / loops[name])
    return {name: 1e6 * least for name, least in times.items()}


def _time(call: Callable[[], object], loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return time.perf_counter() - start


def random_buffers(count: int, nbytes: int, dtype: np.dtype) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    size = max(1, nbytes // dtype.itemsize)
    return [generator.uniform(0.5, 100, size).astype(dtype) for _ in range(count)]


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


def _added(numbers: Sequence[float]) -> object:
    return functools.reduce(operator.add, numbers)


def _stacked(buffers: Sequence[np.ndarray]) -> object:
    return np.add.reduce(np.stack(buffers))


def in_threads(pool: ThreadPoolExecutor, buffers: Sequence[np.ndarray], out: np.ndarray) -> Callable[[], object]:
    def call() -> None:
        pieces = cut(SUM, buffers, out=out, parts=2)
        for future in [pool.submit(piece) for piece in pieces.calls]:
            future.result()

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

        calls["`torch.stack().sum(0)`"] = lambda: torch.stack(tensors).sum(0)
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


def sums(limit: Limit | None, pool: ThreadPoolExecutor) -> dict[tuple[int, int], dict[str, float]]:
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
            calls["`np.add.reduce(np.stack())`"] = functools.partial(_stacked, buffers)
            calls |= peers(buffers)
            calls["**aiodist, `out=`**"] = functools.partial(reduce, SUM, buffers, out=out)
            calls["aiodist, fresh output"] = functools.partial(reduce, SUM, buffers)
            calls["aiodist, two threads"] = in_threads(pool, buffers, out)
            results[count, nbytes] = best(calls)
            assert np.array_equal(reduce(SUM, buffers), functools.reduce(np.add, buffers))
    return results


def sweep() -> list[tuple[float, float, str]]:
    """Time native folds of all sizes, as collectives do them, beside the chain: (ratio, microseconds, what)."""
    rows = []
    for name, op in (("float32", SUM), ("float32", MAX), ("float64", SUM), ("int64", SUM)):
        dtype = np.dtype(name)
        for count in (2, 3, 4, 8, 16, 32):
            for nbytes in (8, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 16 * MIB):
                if count * nbytes > 256 * MIB:
                    continue
                buffers = random_buffers(count, nbytes, dtype)
                calls: dict[str, Callable[[], object]] = {
                    "chain": fresh_chain(op, buffers),
                    "ours": functools.partial(reduce_alike, op, buffers),
                }
                times = best(calls, 0.1)
                rows.append(
                    (
                        times["ours"] / times["chain"],
                        times["ours"],
                        f"{op.name} {name}, n = {count}, {size_name(nbytes)}",
                    )
                )
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


def tiny() -> list[tuple[str, dict[str, float]]]:
    """Time what is too small for anything but calls to count."""
    rows: list[tuple[str, dict[str, float]]] = []
    for count in (2, 8, 64):
        numbers = [1.5 + i for i in range(count)]
        calls: dict[str, Callable[[], object]] = {
            "beside": functools.partial(_added, numbers),
            "ours": functools.partial(reduce_numbers, SUM, numbers),
        }
        rows.append((f"{count} Python floats, SUM, beside `functools.reduce`", best(calls, 0.1)))
    for op, shape in ((SUM, ()), (SUM, (1,)), (SUM, (100,)), (MEAN, ()), (MEAN, (100,))):
        for count in (2, 8, 64):
            arrays = [np.ones(shape, SINGLE) for _ in range(count)]
            out = np.empty(shape, SINGLE)
            calls = {"beside": chain(SUM, arrays, out), "ours": functools.partial(reduce_alike, op, arrays)}
            rows.append(
                (f"{count} float32 arrays of shape {shape}, {op.name}, beside the `np.add` chain", best(calls, 0.1))
            )
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


def gates(
    results: dict[tuple[int, int], dict[str, float]], native: list[tuple[float, float, str]], halves: Any
) -> None:
    """Print each gate beside what was measured."""
    large = results[8, 64 * MIB]
    ours, numpy_chain = large["**aiodist, `out=`**"], large["`np.add` chain"]
    limit = large.get("C, non-temporal store")
    rows = [
        ("float32, n = 8, 64 MiB: share of the C limit", "≥ 0.95", f"{limit / ours:.2f}" if limit else "no C compiler")
    ]
    rows.append(("the same: times faster than the NumPy chain", "≥ 1.6", f"{numpy_chain / ours:.2f}"))
    for least, most, name in (
        (256 * KIB, 1 << 40, "from 256 KiB"),
        (16 * KIB, 256 * KIB, "16 to 64 KiB"),
        (0, 16 * KIB, "below 16 KiB"),
    ):
        rows.append(_worst(native, least, most, name))
    for name, times in halves:
        if "float16" in name and "SUM" in name:
            rows.append(
                (f"{name}, n = 8: times faster than the NumPy chain", "≥ 5", f"{times['chain'] / times['ours']:.1f}")
            )
    table(("gate", "wanted", "measured"), rows)


def _worst(native: list[tuple[float, float, str]], least: int, most: int, name: str) -> tuple[str, str, str]:
    inside = [row for row in native if least <= _bytes_of(row[2]) < most]
    ratio, _, what = max(inside)
    middle = sorted(row[0] for row in inside)[len(inside) // 2]
    return (
        f"native dtype, {name}: time over the NumPy chain's",
        "≤ 1.05",
        f"median {middle:.2f}, worst {ratio:.2f} ({what})",
    )


def _bytes_of(what: str) -> int:
    number, unit = what.rsplit(", ", 1)[1].split()
    return int(number) * {"B": 1, "KiB": KIB, "MiB": MIB}[unit]


def main() -> None:
    """Warm up, measure, print."""
    counts = (2, 3, 4, 8, 16, 32)
    started = time.perf_counter()
    warm(KernelSpec(op, np.dtype(d), n) for d in ("f4", "f8", "i8") for op in (SUM, MAX) for n in counts)
    warmed = time.perf_counter() - started
    extra = [np.dtype(np.float16)] + ([np.dtype(m.bfloat16)] if (m := _optional("ml_dtypes")) else [])
    warm(KernelSpec(op, d, 8) for d in [*extra, SINGLE] for op in (SUM, MEAN))
    limit = compile_limit()
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, Numba {_optional('numba').__version__}"
    print(f"{time.strftime('%B %Y')}; {platform.machine()}, {os.cpu_count()} cores; {versions}.")
    print(f"A copy of 256 MiB moves {copy_bandwidth():.1f} GB/s, read and written.")
    print(f"{len(counts) * 6} kernels compiled in {warmed:.1f} s.")
    absent = [name for name in ("torch", "jax") if not _optional(name)] + ([] if limit else ["a C compiler"])
    print("".join(f"Not installed: {name}. " for name in absent))
    with ThreadPoolExecutor(2) as pool:
        results = sums(limit, pool)
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
    native, halves = sweep(), wide()
    table(
        ["wider accumulator, n = 8", "NumPy chain in its own dtype, µs", "aiodist, µs", "times faster"],
        [[name, f"{t['chain']:.0f}", f"{t['ours']:.0f}", f"{t['chain'] / t['ours']:.1f}"] for name, t in halves],
    )
    table(
        ["tiny values", "beside, µs", "aiodist, µs"],
        [[name, f"{t['beside']:.2f}", f"{t['ours']:.2f}"] for name, t in tiny()],
    )
    gates(results, native, halves)
    loaded, first = cold_start()
    print(f"\nImport of the kernels after NumPy {loaded:.1f} ms, first reduction {first:.2f} ms, Numba not imported.")


if __name__ == "__main__":
    main()
