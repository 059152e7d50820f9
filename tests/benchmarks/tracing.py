"""What the recorder and a trace cost: collectives with and without them, and the writing and reading of a trace.

Run from a checkout: ``python -m tests.benchmarks.tracing``. It prints the tables of docs/benchmarks/tracing.md. Every
ratio is of loops timed in turn in one process, the smallest of several turns. It takes about a minute.
"""

from __future__ import annotations

import asyncio
import platform
import tempfile
import time
import timeit
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import aiodist
from aiodist import MirroredStrategy, get_replica_context
from aiodist._core.call import Call
from aiodist._core.instrument import observing
from aiodist._core.ledger import HISTORY
from aiodist._tools.trace.page import page_of
from aiodist._tools.trace.reader import read_trace
from aiodist._tools.trace.summary import count_up
from aiodist._tools.trace.writer import Tracer
from tests.benchmarks.collectives import array, barrier

TURNS = 15
SIZES = (2, 8, 64, 512)


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Trace what runs in the block."""
    with aiodist.trace(folder / "run.json"):
        yield


def seconds(program: Callable[[int], Awaitable[float]], size: int, rounds: int) -> float:
    """Return the seconds of one collective of a program on that many replicas."""
    strategy = MirroredStrategy([f"CPU:{i}" for i in range(size)])
    took = asyncio.run(strategy.run(program, (rounds,)))
    return float(np.median([float(value) for value in strategy.experimental_local_results(took)])) / rounds


def costs(folder: Path) -> None:
    """Print what a collective costs per replica, as it is and traced."""
    print("| n | collective | as it is | traced | a trace adds |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        for name, program in (("array", array), ("barrier", barrier)):
            rounds = max(10, 4_000 // size)
            plain = traced = float("inf")
            for _ in range(TURNS):
                plain = min(plain, seconds(program, size, rounds) / size * 1e6)
                with recording(folder):
                    traced = min(traced, seconds(program, size, rounds) / size * 1e6)
            print(f"| {size} | {name} | {plain:.2f} µs | {traced:.2f} µs | {traced - plain:.2f} µs |", flush=True)


def ring() -> None:
    """Print what it takes to keep one agreed collective in the recorder's ring, once for all replicas."""
    kept: deque[tuple[Any, ...]] = deque(maxlen=HISTORY)
    entry = (0, Call("barrier"), ring.__code__, 0, None, None, ())
    took = min(timeit.repeat(lambda: kept.append(entry), number=100_000, repeat=9)) / 100_000
    empty = min(timeit.repeat(lambda: None, number=100_000, repeat=9)) / 100_000
    print(f"\nThe recorder's ring: {(took - empty) * 1e9:.0f} ns a collective, whatever the number of replicas.")


def files(folder: Path) -> None:
    """Print what a large trace takes to write, to read and to show as a page."""

    async def program(rounds: int) -> None:
        ctx = get_replica_context()
        for _ in range(rounds):
            await ctx.all_reduce("SUM", 1.0)

    print("\n| replicas × collectives | kept in memory | written | file | read | statistics | page | page's size |")
    print("|---|---|---|---|---|---|---|---|")
    for size, rounds in ((8, 12_500), (1_000, 100), (10_000, 90)):
        tracer = Tracer(folder / "run.json")
        with observing(tracer.recording):
            asyncio.run(MirroredStrategy([f"CPU:{i}" for i in range(size)]).run(program, (rounds,)))
        kept = 3 * 8 * tracer.recording.arrivals  # three numbers of eight bytes
        wrote, _ = timed(tracer.close)
        read, trace = timed(lambda: read_trace(folder / "run.json"))
        counted, _ = timed(lambda trace=trace: count_up(trace))  # type: ignore[misc]
        made, page = timed(lambda trace=trace: page_of(trace, "run.json"))  # type: ignore[misc]
        print(
            f"| {size:,} × {rounds:,} | {kept / 2**20:.0f} MiB | {wrote:.1f} s | "
            f"{(folder / 'run.json').stat().st_size / 2**20:.0f} MiB | {read:.1f} s | {counted:.1f} s | {made:.1f} s "
            f"| {len(page) / 2**20:.1f} MiB |",
            flush=True,
        )


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long something takes, and what it gives."""
    begin = time.perf_counter()
    result = act()
    return time.perf_counter() - begin, result


def main() -> None:
    """Print every table."""
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, aiodist {aiodist.__version__}\n")
    with tempfile.TemporaryDirectory() as folder:
        costs(Path(folder))
        ring()
        files(Path(folder))


if __name__ == "__main__":
    main()
