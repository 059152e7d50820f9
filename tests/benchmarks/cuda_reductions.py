# SPDX-License-Identifier: Apache-2.0
"""Check and time the GPU reductions beside a plain copy, torch, CuPy and jax, and write a table in Markdown.

    python -m tests.benchmarks.cuda_reductions FOLDER         # one call, under eight minutes, 5 GiB of GPU memory

It needs the extra `cuda` and ml_dtypes. What there is of torch, CuPy and jax is timed beside. The table is written
after each case, the quick ones first.

Every result is poisoned first and then compared with the CPU tier bit by bit, on random inputs. Timed rounds take
several sets of inputs in turn, larger together than any GPU's cache. The copy that bandwidth is compared with is
measured in the same call. Without a GPU it says so, and does nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import importlib
import importlib.metadata
import importlib.util
import operator
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from aiodist._arrays import devices
from aiodist._arrays.device import LEGACY_DEFAULT_STREAM
from aiodist._gpu.enqueue import Batch, Queue, symbol
from aiodist._gpu.steps import Job, Place
from aiodist_kernels import Accumulate, ReduceOp, reduce
from aiodist_kernels.rules import Rule, rule_for
from tests.benchmarks.timing import GIB, KIB, MIB, in_units, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiodist._gpu.cuda_core import DeviceMemory

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SINGLE = np.dtype(np.float32)

ROUNDS = 200
"""Of a small case; a tenth of a large one's."""

BEYOND_CACHE = 256 * MIB
BLOCK = 16 * MIB + 48
"""Bytes of random input that a larger buffer repeats: no power of two, so that no two accesses of a thread agree."""

POISON = 0xA5


@dataclasses.dataclass(frozen=True)
class Case:
    """One reduction, of one leaf or of many.

    Attributes:
        sizes: bytes of one buffer, for each leaf.
        share: of the copy's bandwidth that it must reach; None for none.
        enqueue: microseconds of host time that it may take; None for any.
        of_one: how many times longer than one leaf of the same total it may take; None for any.
    """

    op: ReduceOp
    dtype: np.dtype[Any]
    count: int
    sizes: tuple[int, ...]
    accumulate: Accumulate = "native"
    share: float | None = None
    enqueue: float | None = None
    of_one: float | None = None

    @property
    def name(self) -> str:
        many = f"{len(self.sizes)} leaves, " if len(self.sizes) > 1 else ""
        wide = ", in float64" if self.accumulate == "float64" else ""
        return f"{self.op.name} {self.dtype.name} n={self.count}, {many}{in_units(sum(self.sizes))}{wide}"

    @property
    def rule(self) -> Rule:
        return rule_for(self.op, self.dtype, self.accumulate)

    @property
    def moved(self) -> int:
        """Bytes that it reads and writes."""
        total = sum(self.sizes)
        return total * self.count + total // self.dtype.itemsize * self.rule.result.itemsize

    def smaller(self, by: int) -> Case:
        """Return the same on leaves of so many times fewer bytes, in whole elements."""
        sizes = tuple(max(size // by // 16, 1) * 16 for size in self.sizes)
        return dataclasses.replace(self, sizes=sizes)


def cases() -> list[Case]:
    """Return all that is measured, the quick ones first: a run that ends early has those."""
    leaves = tuple(KIB * round(2 ** (12 * (i % 16) / 15)) for i in range(160))  # of 1 KiB to 4 MiB, as gradients are
    add, f64, i32, f16 = ReduceOp.SUM, np.dtype(np.float64), np.dtype(np.int32), np.dtype(np.float16)
    large: list[tuple[ReduceOp, np.dtype[Any], int, int, Accumulate, float]] = [
        (add, SINGLE, 2, GIB, "native", 0.90),
        (add, SINGLE, 8, 256 * MIB, "native", 0.90),
        (add, BFLOAT16, 8, 256 * MIB, "native", 0.90),
        (add, f64, 8, 256 * MIB, "native", 0.85),
        (add, i32, 8, 256 * MIB, "native", 0.85),
        (ReduceOp.MAX, SINGLE, 8, 256 * MIB, "native", 0.85),
        (add, SINGLE, 8, 256 * MIB, "float64", 0.85),
        (ReduceOp.MEAN, SINGLE, 8, 256 * MIB, "native", 0.85),
        (add, f16, 8, 256 * MIB, "native", 0.85),
        (add, SINGLE, 16, 64 * MIB, "native", 0.80),
        (add, SINGLE, 64, 16 * MIB, "native", 0.80),
        (add, SINGLE, 256, 8 * MIB, "native", 0.80),
    ]
    return [
        *[Case(add, SINGLE, n, (size,), enqueue=10.0) for size in (4 * KIB, 64 * KIB, 256 * KIB, MIB) for n in (2, 8)],
        Case(add, SINGLE, 4, leaves, of_one=1.25),
        *[Case(op, dtype, n, (size,), wide, share=share) for op, dtype, n, size, wide, share in large],
    ]


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of a case.

    Attributes:
        bits: whether the result had the bits of the CPU tier.
        enqueue: microseconds of host time.
        anew: the same where arrays lie where none lay before.
        device: microseconds of device time.
        share: of the copy's bandwidth.
        of_one: how many times longer than one leaf of the same total it took; None where it has one leaf.
        others: microseconds of device time that others took, by name.
    """

    case: Case
    bits: bool
    enqueue: float
    anew: float
    device: float
    share: float = 0.0
    of_one: float | None = None
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def failed(self) -> list[str]:
        """Return what it falls short of."""
        case = self.case
        found = [] if self.bits else ["other bits than on the CPU"]
        if case.share is not None and self.share < case.share:
            found.append(f"{self.share:.0%} of the copy, not {case.share:.0%}")
        if case.enqueue is not None and self.enqueue > case.enqueue:
            found.append(f"{self.enqueue:.1f} µs to enqueue, not {case.enqueue:.0f}")
        if case.of_one is not None and self.of_one is not None and self.of_one > case.of_one:
            found.append(f"{self.of_one:.2f} times one leaf, not {case.of_one}")
        return found + [f"{name} takes {took:.1f} µs" for name, took in self.others.items() if took < self.device]


def write(folder: Path, about: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Write the table into a folder, with what it was measured on above it."""
    names = list(dict.fromkeys(name for row in rows for name in row.others))
    times = ["enqueue", "elsewhere", "device"]
    head = ["reduction", *(f"{name}, µs" for name in times), "of the copy", *(f"{name}, µs" for name in names), "gate"]
    cells = [
        [
            row.case.name,
            *(f"{took:.1f}" for took in (row.enqueue, row.anew, row.device)),
            f"{row.share:.0%}",
            *(f"{row.others[name]:.1f}" if name in row.others else "" for name in names),
            "; ".join(row.failed()) or "met",
        ]
        for row in rows
    ]
    lines = [*(f"- {key}: {value}" for key, value in about.items()), "", *table(head, cells), ""]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda-reductions.md").write_text("\n".join(lines), encoding="utf-8")


# Measuring.


class Gpu:
    """The first GPU."""

    def __init__(self) -> None:
        from aiodist._gpu.cuda_core import CudaCore

        self.core: Any = importlib.import_module("cuda.core")
        self.driver: Any = CudaCore()

    def put(self, values: np.ndarray) -> DeviceMemory:
        """Return device memory with these values."""
        with self.driver.using():
            memory: DeviceMemory = self.driver.upload(0, values)
            return memory

    def get(self, memory: DeviceMemory, nbytes: int) -> np.ndarray:
        """Return bytes of device memory, once all that was enqueued is done."""
        found = np.empty(nbytes, np.uint8)
        with self.driver.using():
            self.driver.wait_for(self.driver.record(self.driver.stream(0)))
            self.driver._call("cuMemcpyDtoH", found.ctypes.data, memory.address, nbytes)
        return found

    def measure(self, enqueue: Callable[[int], object], rounds: int) -> tuple[float, float]:
        """Return microseconds of host time and of device time of a round."""
        self.driver._current.make(0)  # it stays so, as a framework leaves it; events are made in the current context
        stream = self.driver.stream(0).stream
        timed = self.core.EventOptions(timing_enabled=True)
        stream.sync()
        first = stream.record(options=timed)
        start = time.perf_counter()
        for turn in range(rounds):
            enqueue(turn)
        host = time.perf_counter() - start
        last = stream.record(options=timed)
        last.sync()
        return 1e6 * host / rounds, 1e3 * (last - first) / rounds


class Set:
    """Inputs and results of a case, once."""

    def __init__(self, gpu: Gpu, case: Case, seed: int) -> None:
        self.case = case
        self.inputs = [
            [random_values(case, size, seed + 1000 * leaf + n) for n in range(case.count)]
            for leaf, size in enumerate(case.sizes)
        ]
        self.memory = [gpu.put(values) for buffers in self.inputs for values in buffers]
        size = case.rule.result.itemsize
        self.outs = [gpu.put(np.full(buffers[0].size * size, POISON, np.uint8)) for buffers in self.inputs]
        self.begins = tuple([memory.address for memory in (*self.memory, *self.outs)])

    def agrees(self, gpu: Gpu) -> bool:
        """Return whether the results have the bits of the CPU tier."""
        for buffers, out in zip(self.inputs, self.outs, strict=True):
            wanted = reduce(self.case.op, buffers, accumulate=self.case.accumulate)
            if gpu.get(out, wanted.nbytes).tobytes() != wanted.tobytes():
                return False
        return True


def batch(case: Case) -> Batch:
    """Return the reduction, with the arrays of a `Set` by their numbers; one result, so that it alone is timed."""
    jobs = []
    for leaf, size in enumerate(case.sizes):
        inputs = tuple(Place(0, symbol(leaf * case.count + n)) for n in range(case.count))
        out = Place(0, symbol(len(case.sizes) * case.count + leaf))
        elements = size // case.dtype.itemsize
        jobs.append(Job(inputs, (out,), elements))
    return Batch(case.rule, jobs)


def random_values(case: Case, nbytes: int, seed: int) -> np.ndarray:
    """Return random numbers: any bits for integers; floats around 1, as a sum of any bits is soon no number."""
    generator = np.random.default_rng(seed)
    size = nbytes // case.dtype.itemsize
    block = min(size, BLOCK // case.dtype.itemsize)
    if case.dtype.kind in "iu":
        values = generator.integers(0, 256, block * case.dtype.itemsize, np.uint8).view(case.dtype)
    else:
        values = generator.standard_normal(block, np.float32).astype(case.dtype)
    return np.resize(values, size)


def measure(gpu: Gpu, queue: Queue, case: Case, copy: float) -> Row:
    """Check and time one case; `copy` is the bytes a microsecond of a plain copy."""
    row = _reduced(gpu, queue, case)
    of_one = None
    if len(case.sizes) > 1:
        one = Case(case.op, case.dtype, case.count, (sum(case.sizes) // 16 * 16,), case.accumulate)
        of_one = row.device / _reduced(gpu, queue, one).device
    return dataclasses.replace(row, share=case.moved / row.device / copy, of_one=of_one)


def _reduced(gpu: Gpu, queue: Queue, case: Case) -> Row:
    rounds = max(1, ROUNDS // 10) if case.moved > 64 * MIB else ROUNDS
    total = sum(case.sizes) * (case.count + 1)
    sets = [Set(gpu, case, seed) for seed in range(max(1, min(16, BEYOND_CACHE // total + 1)))]
    schedule = queue.schedule([batch(case)], arrays=len(sets[0].begins))
    queue.load(schedule)
    with gpu.driver.using():
        stream = gpu.driver.foreign_stream(0, LEGACY_DEFAULT_STREAM)  # what replicas with PyTorch's default have

    def enqueue(turn: int) -> None:
        completion = queue.run(schedule, [stream], [], sets[turn % len(sets)].begins)
        for event in completion._events:  # as who waits for it does, or new ones would be made for every round
            gpu.driver.release(event)

    def enqueue_anew(turn: int) -> None:
        queue._bound.clear()
        enqueue(turn)

    for turn in range(len(sets)):
        enqueue(turn)
    bits = all(each.agrees(gpu) for each in sets)
    host, anew = (min(gpu.measure(call, rounds)[0] for _ in range(3)) for call in (enqueue, enqueue_anew))
    return Row(case, bits, host, anew, min(gpu.measure(enqueue, rounds)[1] for _ in range(3)))


def copy_speed(gpu: Gpu, nbytes: int) -> float:
    """Return the bytes a microsecond that a plain copy on the device reads and writes."""
    source = gpu.put(np.resize(np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8), nbytes))
    target = gpu.put(np.zeros(nbytes, np.uint8))

    def copy(_: int) -> None:
        with gpu.driver.using():
            gpu.driver.copy(0, 0, target.address, 0, source.address, nbytes)

    return 2 * nbytes / min(gpu.measure(copy, 20)[1] for _ in range(3))


def run(gpu: Gpu, chosen: Sequence[Case], folder: Path) -> list[Row]:
    """Measure cases; write what there is after each, so that one that ends all leaves the others."""
    queue, copy = Queue(gpu.driver), copy_speed(gpu, max(size for case in chosen for size in case.sizes))
    rows: list[Row] = []
    for case in chosen:
        row = dataclasses.replace(measure(gpu, queue, case, copy), others=times_of_others(case))
        rows.append(row)
        print(f"{case.name}: {row.device:.1f} µs, {row.share:.0%} of the copy; {row.failed() or 'met'}", flush=True)
        write(folder, about(copy), rows)
    return rows


# The same by others.


def times_of_others(case: Case) -> dict[str, float]:
    """Return microseconds of device time that torch, CuPy and jax take for the same, where they are installed."""
    if case.op is not ReduceOp.SUM or case.accumulate != "native" or len(case.sizes) > 1 or case.dtype.kind in "iu":
        return {}
    found: dict[str, float] = {}
    for name, times in (("torch", _torch), ("cupy", _cupy), ("jax", _jax)):
        if importlib.util.find_spec(name) is not None:
            found |= times(case, sum(case.sizes) // case.dtype.itemsize)
    return found


def _torch(case: Case, elements: int) -> dict[str, float]:
    torch: Any = importlib.import_module("torch")
    given = [torch.randn(elements, device="cuda").to(getattr(torch, case.dtype.name)) for _ in range(case.count)]
    total = torch.empty_like(given[0])

    def chain() -> None:
        torch.add(given[0], given[1], out=total)
        for value in given[2:]:
            total.add_(value)

    def foreach() -> None:
        total.copy_(given[0])
        for value in given[1:]:
            torch._foreach_add_([total], [value])

    calls = {"torch stack.sum": lambda: torch.stack(given).sum(0), "torch add_": chain, "torch foreach": foreach}
    took = {name: _timed(call, torch.cuda.synchronize) for name, call in calls.items()}
    torch.cuda.empty_cache()
    return took


def _cupy(case: Case, elements: int) -> dict[str, float]:
    cupy: Any = importlib.import_module("cupy")
    if case.dtype == BFLOAT16:
        return {}
    given = [cupy.random.standard_normal(elements, cupy.float32).astype(case.dtype) for _ in range(case.count)]
    calls = {"cupy add": lambda: functools.reduce(operator.add, given)}
    if case.count <= 16:
        names = [f"a{k}" for k in range(case.count)]
        kernel = cupy.ElementwiseKernel(
            ", ".join(f"T {name}" for name in names), "T out", f"out = {' + '.join(names)}", f"sum_of_{case.count}"
        )
        out = cupy.empty_like(given[0])
        calls["cupy elementwise"] = lambda: kernel(*given, out)
    return {name: _timed(call, cupy.cuda.Device().synchronize) for name, call in calls.items()}


def _jax(case: Case, elements: int) -> dict[str, float]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the GPU's memory for itself
    jax: Any = importlib.import_module("jax")
    if jax.default_backend() != "gpu" or case.dtype.itemsize == 8 or case.count > 64:
        return {}
    keys = jax.random.split(jax.random.key(0), case.count)
    given = [jax.random.normal(key, (elements,), case.dtype) for key in keys]
    add = jax.jit(lambda *values: functools.reduce(operator.add, values))
    return {"jax": _timed(lambda: add(*given), lambda: add(*given).block_until_ready())}


def _timed(call: Callable[[], object], settle: Callable[[], object], rounds: int = 10) -> float:
    """Return microseconds of a call, on the clock: the least of three times so many, with the device waited for."""
    call()
    settle()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        settle()
        best = min(best, (time.perf_counter() - start) / rounds)
    return 1e6 * best


def about(copy: float) -> dict[str, str]:
    """Return what the figures were measured on."""
    gpu, driver = devices.find_gpus().gpus[0], devices.find_gpus().driver
    packages = ["numba", "numba-cuda", "cuda-core", "numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "jax"]
    installed = {found.metadata["Name"].lower(): found.version for found in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in packages if name in installed]
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}, CUDA {driver}",
        "versions": f"Python {platform.python_version()}, {', '.join(versions)}",
        "device copy": f"{copy * 1e6 / 1e12:.2f} TB/s, read and written, {in_units(GIB)}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where a case has other bits than the CPU tier's, else 0."""
    parser = argparse.ArgumentParser(description="Check and time the GPU reductions.")
    parser.add_argument("folder", type=Path, help="where the table goes")
    given = parser.parse_args(arguments)
    if not devices.find_gpus().gpus:
        print(f"There is no GPU to measure: {devices.why_absent()}.")
        return 0
    rows = run(Gpu(), cases(), given.folder)
    print(f"\nwritten to {given.folder}")
    return 0 if all(row.bits for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
