# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: measurements in turn, tables in Markdown, the versions they were measured with.

A machine's speed changes from minute to minute. So calls that are compared take turns in one process, and the result is
the least of many turns, or the median of the ratios within each turn.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import aiodist
from aiodist import MirroredStrategy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def in_turn(measures: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Return what each function measures in that many turns."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(turns):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def ratio(found: Mapping[str, Sequence[float]], name: str, base: str) -> float:
    """Return one measurement over another, the base: the median of the turns."""
    return statistics.median(a / b for a, b in zip(found[name], found[base], strict=True))


def best(calls: dict[str, Callable[[], object]], seconds: float = 0.4) -> dict[str, float]:
    """Return the least CPU time of each call, in microseconds; calls take turns."""
    times = dict.fromkeys(calls, float("inf"))
    loops = {}
    for name, call in calls.items():
        call()
        loops[name] = max(1, int(100e-6 / max(_time(call, 1), 1e-9)))
    end = time.perf_counter() + seconds * len(calls)
    rounds = 0
    while rounds < 4 or time.perf_counter() < end:
        rounds += 1
        for name, call in calls.items():
            if loops[name] > 1 or times[name] < 5e-3:
                call()  # the call before has evicted this one's data from the caches
            times[name] = min(times[name], _time(call, loops[name]) / loops[name])
    return {name: 1e6 * least for name, least in times.items()}


def _time(call: Callable[[], object], loops: int) -> float:
    start = time.process_time()
    for _ in range(loops):
        call()
    return time.process_time() - start


async def least(call: Callable[[], Awaitable[Any]], repeats: int, rounds: int = 5) -> float:
    """Return the microseconds of wall-clock time of one call: the least of the rounds' means."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(repeats):
            await call()
        found.append((time.perf_counter() - begun) / repeats)
    return 1e6 * min(found)


def cpus(count: int) -> MirroredStrategy:
    return MirroredStrategy([f"CPU:{index}" for index in range(count)])


def fresh_python(*arguments: str) -> str:
    """Return what a fresh Python prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an import would compile its modules each time
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def in_units(nbytes: int) -> str:
    """Return a number of bytes as text, in the largest unit that it reaches."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def show(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("", *table(head, rows), sep="\n", flush=True)


def versions() -> str:
    """Return the date, machine and versions that go with the figures."""
    what = f"Python {platform.python_version()}, NumPy {np.__version__}, aiodist {aiodist.__version__}"
    return f"{time.strftime('%B %Y')}; {platform.machine()}, {os.cpu_count()} cores; {what}."
