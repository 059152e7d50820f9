# SPDX-License-Identifier: Apache-2.0
"""Check and time the GPU reductions beside a plain copy, torch, CuPy and jax, and write a table in Markdown and JSON.

    python -m tests.benchmarks.cuda_reductions FOLDER         # one call, under eight minutes, 5 GiB of GPU memory

It needs numba, ml_dtypes, cuda-core and a compiler for CUDA: the package numba-cuda with its libraries, or a toolkit
in /usr/local/cuda or CUDA_HOME. What there is of torch, CuPy and jax is timed beside. The table is written after each
case, the quick ones first.

Every result is poisoned first and then compared with the CPU tier bit by bit, on random inputs. Timed rounds take
several sets of inputs in turn, larger together than any GPU's cache. The copy that bandwidth is compared with is
measured in the same call. Without a GPU it says so, and does nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib
import importlib.metadata
import os
import platform
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from aiodist._arrays import gpus
from aiodist._arrays.frameworks import LEGACY_DEFAULT_STREAM
from aiodist._gpu.enqueue import Queue
from aiodist._gpu.schedule import Batch, symbol
from aiodist._gpu.steps import Job, Place
from aiodist_kernels import reduce
from tests.benchmarks import cuda_whole_way
from tests.benchmarks.cuda_cases import GIB, MIB, Case, Row, cases, in_units, write
from tests.benchmarks.cuda_peers import times_of_others

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiodist._gpu.driver import Driver, Memory

BEYOND_CACHE = 256 * MIB
BLOCK = 16 * MIB + 48
"""Bytes of random input that a larger buffer repeats: no power of two, so that no two accesses of a thread agree."""

POISON = 0xA5

TOOLKIT = Path("/usr/local/cuda")
"""Where CUDA's own installer puts it."""


class Lab(Protocol):
    """The device as the benchmark needs it, beside the driver."""

    @property
    def driver(self) -> Driver:
        """The driver."""
        ...

    def put(self, values: np.ndarray) -> Memory:
        """Return device memory with these values."""
        ...

    def get(self, memory: Memory, nbytes: int) -> np.ndarray:
        """Return bytes of device memory, once all that was enqueued is done."""
        ...

    def measure(self, enqueue: Callable[[int], object], rounds: int) -> tuple[float, float]:
        """Return microseconds of host time and of device time of a round."""
        ...


class Set:
    """Inputs and results of a case, once."""

    def __init__(self, lab: Lab, case: Case, seed: int) -> None:
        self.case = case
        self.inputs = [
            [random_values(case, size, seed + 1000 * leaf + n) for n in range(case.count)]
            for leaf, size in enumerate(case.sizes)
        ]
        self.memory = [lab.put(values) for buffers in self.inputs for values in buffers]
        size = case.rule.result.itemsize
        self.outs = [lab.put(np.full(buffers[0].size * size, POISON, np.uint8)) for buffers in self.inputs]
        self.begins = tuple([memory.address for memory in (*self.memory, *self.outs)])

    def agrees(self, lab: Lab) -> bool:
        """Return whether the results have the bits of the CPU tier."""
        for buffers, out in zip(self.inputs, self.outs, strict=True):
            wanted = reduce(self.case.op, buffers, accumulate=self.case.accumulate)
            if lab.get(out, wanted.nbytes).tobytes() != wanted.tobytes():
                return False
        return True


def batch(case: Case) -> Batch:
    """Return the reduction, with the arrays of a `Set` by their numbers; one result, so that it alone is timed."""
    jobs = []
    for leaf, size in enumerate(case.sizes):
        inputs = tuple(Place(0, symbol(leaf * case.count + n)) for n in range(case.count))
        out = Place(0, symbol(len(case.sizes) * case.count + leaf))
        elements = size // case.dtype.itemsize
        jobs.append(Job(inputs, (out,), elements, case.dtype.itemsize, case.rule.result.itemsize))
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


def measure(lab: Lab, queue: Queue, case: Case, copy: float, rounds: int) -> Row:
    """Check and time one case.

    Args:
        lab: the device.
        queue: carries out reductions.
        case: the case.
        copy: bytes a microsecond of a plain copy.
        rounds: how many are timed.
    """
    found = _reduced(lab, queue, case, rounds)
    of_one = None
    if len(case.sizes) > 1:
        total = sum(case.sizes) // 16 * 16
        one = Case(case.op, case.dtype, case.count, (total,), case.accumulate)
        of_one = found.device / _reduced(lab, queue, one, rounds).device
    share = case.moved / found.device / copy
    return Row(case, found.enqueue, found.device, share, found.bits, of_one, {}, found.anew)


class Reduced(NamedTuple):
    """What came of a case: whether the bits are right, and microseconds."""

    bits: bool
    enqueue: float
    anew: float
    device: float


def _reduced(lab: Lab, queue: Queue, case: Case, rounds: int) -> Reduced:
    total = sum(case.sizes) * (case.count + 1)
    sets = [Set(lab, case, seed) for seed in range(max(1, min(16, BEYOND_CACHE // total + 1)))]
    schedule = queue.schedule([batch(case)], arrays=len(sets[0].begins))
    queue.load(schedule)
    with lab.driver.using():
        stream = lab.driver.foreign_stream(0, LEGACY_DEFAULT_STREAM)  # what replicas with PyTorch's default have

    def enqueue(turn: int) -> None:
        completion = queue.run(schedule, [stream], [], sets[turn % len(sets)].begins)
        for event in completion._events:  # as who waits for it does, or new ones would be made for every round
            lab.driver.release(event)

    def enqueue_anew(turn: int) -> None:
        queue._bound.clear()
        enqueue(turn)

    for turn in range(len(sets)):
        enqueue(turn)
    bits = all(each.agrees(lab) for each in sets)
    host, anew = (min(lab.measure(call, rounds)[0] for _ in range(3)) for call in (enqueue, enqueue_anew))
    return Reduced(bits, host, anew, min(lab.measure(enqueue, rounds)[1] for _ in range(3)))


def copy_speed(lab: Lab, nbytes: int, rounds: int) -> float:
    """Return the bytes a microsecond that a plain copy on the device reads and writes."""
    source = lab.put(np.resize(np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8), nbytes))
    target = lab.put(np.zeros(nbytes, np.uint8))

    def copy(_: int) -> None:
        with lab.driver.using():
            lab.driver.copy(0, target.address, 0, source.address, nbytes)

    return 2 * nbytes / min(lab.measure(copy, rounds)[1] for _ in range(3))


@dataclasses.dataclass
class Outcome:
    """What came of the cases.

    Attributes:
        copy: bytes a microsecond of a plain copy.
        rows: what was measured, so far.
        failures: by case, what went wrong in those that have no row.
        left_out: what time did not allow.
    """

    copy: float
    rows: list[Row] = dataclasses.field(default_factory=list)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    left_out: Sequence[Case] = ()


def run(
    lab: Lab,
    chosen: Sequence[Case],
    seconds: float,
    others: Callable[[Case], dict[str, float]],
    save: Callable[[Outcome], object],
) -> Outcome:
    """Measure cases until the time is up; save what there is after each, so that one that ends all leaves the others.

    Args:
        lab: the device.
        chosen: the cases.
        seconds: after so many, no further case is begun.
        others: what others take for a case.
        save: saves what there is so far.
    """
    deadline = time.monotonic() + seconds
    queue = Queue(lab.driver)
    outcome = Outcome(copy_speed(lab, max(size for case in chosen for size in case.sizes), 20))
    save(outcome)
    for place, case in enumerate(chosen):
        if time.monotonic() > deadline:
            outcome.left_out = chosen[place:]
            break
        try:
            row = measure(lab, queue, case, outcome.copy, 20 if case.moved > MIB * 64 else 200)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other cases are measured)
            outcome.failures[case.name] = f"{type(error).__name__}: {error}"
            print(f"{case.name}: failed\n{traceback.format_exc()}", flush=True)
        else:
            beside = others(case) if time.monotonic() < deadline else {}
            row = dataclasses.replace(row, others=beside)
            outcome.rows.append(row)
            print(f"{case.name}: {row.device:.1f} µs, {row.share:.0%} of the copy; {row.failed() or 'met'}", flush=True)
        save(outcome)
    save(outcome)
    return outcome


class Gpu:
    """The lab on the first GPU."""

    def __init__(self) -> None:
        from aiodist._gpu.cuda_core import CudaCore

        self.core: Any = importlib.import_module("cuda.core")
        self.bindings: Any = importlib.import_module("cuda.bindings.driver")
        self.driver: Any = CudaCore()

    def put(self, values: np.ndarray) -> Memory:
        with self.driver.using():
            memory: Memory = self.driver.upload(0, values)
            return memory

    def get(self, memory: Memory, nbytes: int) -> np.ndarray:
        found = np.empty(nbytes, np.uint8)
        with self.driver.using():
            self.driver.wait_for(self.driver.record(self.driver.stream(0)))
            self.driver._call("cuMemcpyDtoH", found.ctypes.data, memory.address, nbytes)
        return found

    def measure(self, enqueue: Callable[[int], object], rounds: int) -> tuple[float, float]:
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


def about(copy: float) -> dict[str, str]:
    """Return what the figures were measured on."""
    found = gpus.find()
    packages = ["numba", "numba-cuda", "cuda-core", "numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "jax"]
    versions = [f"{name} {_version(name)}" for name in packages if _version(name)]
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "device": f"{found.gpus[0].name}, compute capability {'.'.join(map(str, found.gpus[0].capability))}",
        "driver": f"CUDA {found.driver}{_driver_version()}",
        "versions": f"Python {platform.python_version()}, {', '.join(versions)}",
        "device copy": f"{copy * 1e6 / 1e12:.2f} TB/s, read and written, {in_units(GIB)}",
    }


def _driver_version() -> str:
    """Return the version of the kernel's part of the driver, where Linux tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    return f", {text.splitlines()[0].partition(':')[2].strip()}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where a case failed or has other bits than the CPU tier's, else 0."""
    parser = argparse.ArgumentParser(description="Check and time the GPU reductions.")
    parser.add_argument("folder", type=Path, help="where the table goes, as Markdown and as JSON")
    parser.add_argument("--seconds", type=float, default=400, help="after so many no further case is begun")
    given = parser.parse_args(arguments)
    if not gpus.find().gpus:
        print(f"There is no GPU to measure: {gpus.why_absent()}.")
        return 0
    if TOOLKIT.is_dir():
        os.environ.setdefault("CUDA_HOME", str(TOOLKIT))  # where no package has the compiler's libraries
    try:
        lab = Gpu()
    except ImportError as error:
        print(error)
        return 1
    whole_way = cuda_whole_way.measure()

    def save(outcome: Outcome) -> None:
        head = about(outcome.copy) | whole_way
        write(given.folder, head, outcome.rows, outcome.left_out, outcome.failures)

    outcome = run(lab, cases(), given.seconds, times_of_others, save)
    print(f"\nwritten to {given.folder}")
    return 0 if not outcome.failures and all(row.bits for row in outcome.rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
