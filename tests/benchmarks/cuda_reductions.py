# SPDX-License-Identifier: Apache-2.0
"""The GPU reductions: their bits compared with the CPU's, their times beside a plain copy's, as a table in Markdown.

    python -m tests.benchmarks.cuda_reductions FOLDER         # under eight minutes, 5 GiB of GPU memory

It needs the extra `cuda` and ml_dtypes. The table is written anew after each case, quick cases first.

Buffers for results are poisoned beforehand. Timed rounds take several sets of random inputs in turn, together larger
than any GPU's cache. Bandwidth is compared with that of a copy in the same process. Without a GPU nothing is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from aiodist._arrays import devices
from aiodist._arrays.device import LEGACY_DEFAULT_STREAM
from aiodist._gpu.enqueue import Queue
from aiodist._gpu.steps import Copy, Place
from aiodist_kernels import Accumulate, ReduceOp
from tests.benchmarks.timing import GIB, KIB, MIB, in_units, table, versions
from tests.gpu.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiodist._gpu.cuda_core import DeviceMemory

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SINGLE = np.dtype(np.float32)

ROUNDS = 200
"""For a small case; a large one has a tenth of them."""

BEYOND_CACHE = 256 * MIB
BLOCK = 16 * MIB + 48
"""Bytes of random input that a larger buffer repeats: no power of two, so that no two accesses of a thread agree."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A reduction of one leaf or of several.

    Attributes:
        sizes: the bytes of one buffer of each leaf.
        share: the least share of the copy's bandwidth.
        enqueue: the most microseconds of host time.
        of_one: the longest time over that of one leaf as large as all.
    """

    op: ReduceOp
    dtype: np.dtype[Any]
    count: int
    sizes: tuple[int, ...]
    accumulate: Accumulate = "native"
    share: float = 0.0
    enqueue: float = float("inf")
    of_one: float = float("inf")

    @property
    def name(self) -> str:
        many = f"{len(self.sizes)} leaves, " if len(self.sizes) > 1 else ""
        wide = ", in float64" if self.accumulate == "float64" else ""
        return f"{self.op.name} {self.dtype.name} n={self.count}, {many}{in_units(sum(self.sizes))}{wide}"


def cases() -> list[Case]:
    """Return all cases, quick ones first: a run that is ended early has those."""
    leaves = tuple(KIB * round(2 ** (12 * (i % 16) / 15)) for i in range(160))  # of 1 KiB to 4 MiB, as gradients are
    add, mean, most = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX
    f64, i32, f16 = map(np.dtype, ("f8", "i4", "f2"))
    large = (256 * MIB,)
    return [
        *[Case(add, SINGLE, n, (size,), enqueue=10.0) for size in (4 * KIB, 64 * KIB, 256 * KIB, MIB) for n in (2, 8)],
        Case(add, SINGLE, 4, leaves, of_one=1.25),
        Case(add, SINGLE, 2, (GIB,), share=0.90),
        *[Case(add, dtype, 8, large, share=0.90) for dtype in (SINGLE, BFLOAT16)],
        *[Case(add, dtype, 8, large, share=0.85) for dtype in (f64, i32)],
        Case(most, SINGLE, 8, large, share=0.85),
        Case(add, SINGLE, 8, large, "float64", share=0.85),
        Case(mean, SINGLE, 8, large, share=0.85),
        Case(add, f16, 8, large, share=0.85),
        *[Case(add, SINGLE, n, (size * MIB,), share=0.80) for n, size in ((16, 64), (64, 16), (256, 8))],
    ]


class Times(NamedTuple):
    """The measurements of a reduction; times are in microseconds.

    Attributes:
        bits: whether the result has the bits of the CPU tier.
        enqueue: host time.
        anew: host time for arrays at addresses that are new to the queue.
        device: device time.
        moved: the bytes that it reads and writes.
    """

    bits: bool
    enqueue: float
    anew: float
    device: float
    moved: int


class Gpu:
    """The first GPU."""

    def __init__(self) -> None:
        from aiodist._gpu.cuda_core import CudaCore

        self.core: Any = importlib.import_module("cuda.core")
        self.driver: Any = CudaCore()

    def put(self, values: np.ndarray) -> DeviceMemory:
        with self.driver.using():
            memory: DeviceMemory = self.driver.upload(0, values)
            return memory

    def get(self, memory: DeviceMemory, nbytes: int) -> np.ndarray:
        """Return bytes of device memory, after all enqueued work."""
        found = np.empty(nbytes, np.uint8)
        with self.driver.using():
            self.driver.wait_for(self.driver.record(self.driver.stream(0)))
            self.driver._call("cuMemcpyDtoH", found.ctypes.data, memory.address, nbytes)
        return found

    def measure(self, enqueue: Callable[[int], object], rounds: int) -> tuple[float, float]:
        """Return the microseconds of host time and of device time of a round."""
        self.driver._current.make(0)  # as a framework leaves it; events are made in the current context
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

    def copy_speed(self, nbytes: int) -> float:
        """Return the bytes that a copy on the device reads and writes in a microsecond."""
        source, target = (self.put(np.resize(np.arange(BLOCK, dtype=np.uint8), nbytes)) for _ in range(2))

        def copy(_: int) -> None:
            with self.driver.using():
                self.driver.copy(Copy(0, Place(0, target.address), Place(0, source.address), nbytes))

        return 2 * nbytes / min(self.measure(copy, 20)[1] for _ in range(3))


def random_values(seed: int, shape: tuple[int], dtype: np.dtype[Any]) -> np.ndarray:
    """Return random numbers: integers of any bits, floats around 1, because sums of any bits soon are NaN."""
    generator = np.random.default_rng(seed)
    block = min(*shape, BLOCK // dtype.itemsize)
    if dtype.kind in "iu":
        return np.resize(generator.integers(0, 256, block * dtype.itemsize, np.uint8).view(dtype), shape)
    return np.resize(generator.standard_normal(block, np.float32).astype(dtype), shape)


def measure(gpu: Gpu, queue: Queue, case: Case) -> Times:
    """Check and time a case on several sets of arrays in turn."""
    total = sum(case.sizes) * (case.count + 1)
    sizes, replicas = [size // case.dtype.itemsize for size in case.sizes], [0] * case.count

    def made(turn: int) -> Problem:
        """Return a set of arrays with a single result, so that only the reduction is timed."""
        return Problem(
            lambda _, values: gpu.put(values), case.op, case.dtype, replicas, sizes, case.accumulate, [0],
            lambda seed, *like: random_values(seed + 1000 * turn, *like),
        )  # fmt: skip

    sets = [made(turn) for turn in range(max(1, min(16, BEYOND_CACHE // total + 1)))]
    begins = [tuple([place.address for place in each.places]) for each in sets]
    schedule = queue.schedule(sets[0].batches, arrays=len(begins[0]))
    queue.load(schedule)
    with gpu.driver.using():
        stream = gpu.driver.foreign_stream(0, LEGACY_DEFAULT_STREAM)  # PyTorch's default

    def enqueue(turn: int) -> None:
        with gpu.driver.using():
            completion = queue.run(schedule, [stream], [], begins[turn % len(sets)])
        while completion._events:  # as a waiter does; otherwise each round would make new ones
            gpu.driver.release(completion._events.pop())

    def enqueue_anew(turn: int) -> None:
        queue._bound.clear()
        enqueue(turn)

    for turn in range(len(sets)):
        enqueue(turn)
    results = [result for each in sets for result in each.results]
    bits = all(gpu.get(memory, wanted.nbytes).tobytes() == wanted.tobytes() for memory, wanted in results)
    moved = sum(values.nbytes for _, values in (*sets[0].inputs, *sets[0].results))
    rounds = ROUNDS // 10 if moved > 64 * MIB else ROUNDS
    host, anew = (min(gpu.measure(call, rounds)[0] for _ in range(3)) for call in (enqueue, enqueue_anew))
    return Times(bits, host, anew, min(gpu.measure(enqueue, rounds)[1] for _ in range(3)), moved)


def run(gpu: Gpu, chosen: Sequence[Case], folder: Path) -> bool:
    """Measure the cases and write the table after each; return whether all have the bits of the CPU tier."""
    queue, copy = Queue(gpu.driver), gpu.copy_speed(max(size for case in chosen for size in case.sizes))
    rows: list[dict[str, str]] = []
    right = True
    for case in chosen:
        times = measure(gpu, queue, case)
        share, of_one = times.moved / times.device / copy, 0.0
        if len(case.sizes) > 1:
            one = measure(gpu, queue, dataclasses.replace(case, sizes=(sum(case.sizes) // 16 * 16,)))
            of_one = times.device / one.device
        failed = [
            *(["other bits than on the CPU"] if not times.bits else []),
            *([f"{share:.0%} of the copy, not {case.share:.0%}"] if share < case.share else []),
            *([f"{times.enqueue:.1f} µs to enqueue, not {case.enqueue:.0f}"] if times.enqueue > case.enqueue else []),
            *([f"{of_one:.2f} times one leaf, not {case.of_one}"] if of_one > case.of_one else []),
        ]
        row = {"reduction": case.name}
        row |= {f"{name}, µs": f"{getattr(times, name):.1f}" for name in ("enqueue", "anew", "device")}
        row |= {"of the copy": f"{share:.0%}", "gate": "; ".join(failed) or "met"}
        rows.append(row)
        print(f"{case.name}: {times.device:.1f} µs, {share:.0%} of the copy; {row['gate']}", flush=True)
        write(folder, copy, rows)
        right &= times.bits
    return right


def write(folder: Path, copy: float, rows: list[dict[str, str]]) -> None:
    """Write the table into a folder, under the device and the versions."""
    gpu, driver = devices.find_gpus().gpus[0], devices.find_gpus().driver
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("numba", "numba-cuda", "cuda-core")]
    lines = [
        f"- device: {gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}, CUDA {driver}",
        f"- versions: {', '.join(packages)}; {versions()}",
        f"- device copy: {copy * 1e6 / 1e12:.2f} TB/s, read and written, {in_units(GIB)}",
        "",
        *table(list(rows[0]), [list(row.values()) for row in rows]),
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda-reductions.md").write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    """Run the benchmark; return 1 if a case has other bits than the CPU tier, else 0."""
    parser = argparse.ArgumentParser(description="Check and time the GPU reductions.")
    parser.add_argument("folder", type=Path, help="where the table goes")
    given = parser.parse_args()
    if not devices.find_gpus().gpus:
        print(f"There is no GPU to measure: {devices.why_absent()}.")
        return 0
    return 0 if run(Gpu(), cases(), given.folder) else 1


if __name__ == "__main__":
    raise SystemExit(main())
