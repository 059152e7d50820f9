"""What the recorder and a trace cost: collectives with and without them, and the writing and reading of a trace.

Run from a checkout: ``python -m tests.benchmarks.tracing``. It prints the tables of docs/benchmarks/tracing.md. Every
ratio is of loops timed in turn in one process, the smallest of several turns. It takes about a minute.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import timeit
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiodist
from aiodist import get_replica_context
from aiodist._core.call import Call
from aiodist._core.instrument import observing
from aiodist._core.ledger import HISTORY
from aiodist._tools.trace.file import read_trace, write_trace
from aiodist._tools.trace.recording import Recording
from aiodist._tools.trace.show import count_up, page_of
from tests.benchmarks.collectives import SIZES, array, barrier, seconds
from tests.benchmarks.timing import MIB, cpus, show, versions

TURNS = 15


def costs(folder: Path) -> None:
    """Print what a collective costs per replica, as it is and traced."""
    rows = []
    for size in SIZES:
        for name, program in (("array", array), ("barrier", barrier)):
            rounds = max(10, 4_000 // size)
            plain = traced = float("inf")
            for _ in range(TURNS):
                plain = min(plain, seconds(program, size, rounds) / size * 1e6)
                with aiodist.trace(folder / "run.json"):
                    traced = min(traced, seconds(program, size, rounds) / size * 1e6)
            rows.append([str(size), name, *(f"{took:.2f} µs" for took in (plain, traced, traced - plain))])
    show(("n", "collective", "as it is", "traced", "a trace adds"), rows)


def ring() -> None:
    """Print what it takes to keep one agreed collective in the recorder's ring, once for all replicas."""
    kept: deque[tuple[Any, ...]] = deque(maxlen=HISTORY)
    entry = (0, Call("barrier"), ring.__code__, 0, None, None, ())
    took = min(timeit.repeat(lambda: kept.append(entry), number=100_000, repeat=9)) / 100_000
    empty = min(timeit.repeat(lambda: None, number=100_000, repeat=9)) / 100_000
    print(f"\nThe recorder's ring: {(took - empty) * 1e9:.0f} ns a collective, whatever the number of replicas.")


def memory() -> None:
    """Print what a trace keeps of a call until it ends."""
    recording = Recording()
    tracemalloc.start()
    with observing(recording):
        asyncio.run(cpus(8).run(barrier, (2_000,)))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"\nA trace keeps {kept / (8 * 2_000):.0f} bytes a call.")


def files(folder: Path) -> None:
    """Print what a large trace takes to write, to read and to show as a page."""

    async def program(rounds: int) -> None:
        ctx = get_replica_context()
        for _ in range(rounds):
            await ctx.all_reduce("SUM", 1.0)

    rows = []
    for size, rounds in ((8, 12_500), (1_000, 100), (10_000, 90)):
        recording = Recording()
        with observing(recording):
            asyncio.run(cpus(size).run(program, (rounds,)))
        recording.close()
        wrote, _ = timed(lambda kept=recording: write_trace(kept, folder / "run.json"))  # type: ignore[misc]
        read, trace = timed(lambda: read_trace(folder / "run.json"))
        counted, _ = timed(lambda trace=trace: count_up(trace))  # type: ignore[misc]
        made, page = timed(lambda trace=trace: page_of(trace, "run.json"))  # type: ignore[misc]
        file = (folder / "run.json").stat().st_size
        times = [f"{took:.1f} s" for took in (wrote, read, counted, made)]
        page_size = f"{len(page) / MIB:.1f} MiB"
        rows.append([f"{size:,} × {rounds:,}", times[0], f"{file / MIB:.0f} MiB", *times[1:], page_size])
    kinds = ("written", "file", "read", "statistics", "page", "page's size")
    show(("replicas × collectives", *kinds), rows)


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long something takes, and what it gives."""
    begin = time.perf_counter()
    result = act()
    return time.perf_counter() - begin, result


if __name__ == "__main__":
    print(versions())
    with tempfile.TemporaryDirectory() as name:
        costs(Path(name))
        ring()
        memory()
        files(Path(name))
