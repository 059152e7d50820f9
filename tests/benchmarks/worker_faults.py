"""What workers report of each other's faults, and when: the table of docs/benchmarks/worker-faults.md.

    python -m tests.benchmarks.worker_faults [--python PATH]... [--rounds N]

Every PATH is the interpreter of an environment with aiodist and an MPI; the default is this interpreter. Of three
workers on this machine, the last goes wrong. Each job runs N times, has a time limit, and must leave no process, shared
memory or file. It takes some minutes. The workers run this file, too, with the fault as its argument.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, get_replica_context
from tests.tools.command import environment
from tests.tools.jobs import Jobs, marked
from tests.workers.job import go_wrong, say

WORKERS = 3
Call = Callable[[], Awaitable[Any]]
LIMIT_SECONDS = 40
FAULTS = (
    "other kind", "other shape", "other dtype", "other op", "swapped order", "returns early", "raises", "killed",
    "stopped", "blocks its loop", "never arrives",
)  # fmt: skip


def library_of(python: str) -> str:
    look = "from aiodist._workers.engines.mpi import library; print(library())"
    return subprocess.check_output([python, "-c", look], text=True, env=environment(), timeout=60).strip()


def cell(python: str, fault: str, rounds: int) -> str:
    """Return what the workers report of a fault, and the medians of the times."""
    found = [_once(python, fault) for _ in range(rounds)]
    for outcome in found:
        if isinstance(outcome, str):
            return f"**{outcome}**"
    names, reported, ended = zip(*found, strict=True)
    return f"{'/'.join(sorted(set(names)))} {median(reported):.2f} s; end {median(ended):.1f} s"


def _once(python: str, fault: str) -> tuple[str, float, float] | str:
    """Return the error of both others, the seconds until both raise it and until the job ends; or what is wrong."""
    with closing(Jobs()) as jobs, tempfile.TemporaryDirectory() as folder:
        job = jobs.start(["-n", str(WORKERS), __file__, fault], python, TMPDIR=folder)
        try:
            output = job.process.communicate(timeout=LIMIT_SECONDS)[0].decode()
        except subprocess.TimeoutExpired:
            return "no end"
        ended_at = time.time()
        if left := _left(job.mark, output, Path(folder)):
            return f"leaves {', '.join(left)}"
    begun = re.search(r"fault ([\d.]+)", output)
    reports = re.findall(rf"reports ([\d.]+) [0-{WORKERS - 2}] (\w+)", output)  # the odd one's may come later, or never
    if len(reports) < WORKERS - 1 or begun is None:
        return f"reported by {len(reports)} of {WORKERS - 1}"
    latest = max(float(at) for at, _ in reports)
    return "/".join(sorted({name for _, name in reports})), latest - float(begun[1]), ended_at - float(begun[1])


def _left(mark: str, output: str, folder: Path) -> list[str]:
    """List the processes, files and shared memory that a job has left."""
    memory = {Path(path) for path in re.findall(r"/dev/shm/\S+", output)}
    assert memory, output
    until = time.monotonic() + 1
    while True:
        left = [*marked(mark), *(path for path in memory if path.exists()), *folder.iterdir()]
        if not left or time.monotonic() > until:
            return list(map(str, left))
        time.sleep(0.05)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--python", action="append", metavar="PATH", help="an interpreter; may be given again")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how many times to run each job")
    arguments = parser.parse_args()
    pythons = arguments.python or [sys.executable]
    print(f"| the last of three | {' | '.join(map(library_of, pythons))} |")
    print("|---" * (1 + len(pythons)) + "|")
    for fault in FAULTS:
        cells = [cell(python, fault, arguments.rounds) for python in pythons]
        print(f"| {fault} | {' | '.join(cells)} |", flush=True)


# What a worker runs. Times are those of the machine's clock, which all workers share.


async def replica(fault: str) -> None:
    ctx = get_replica_context()
    await ctx.barrier()
    odd = ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1
    sums: list[Call] = [
        lambda: ctx.all_reduce("SUM", np.ones(5)),
        lambda: ctx.all_reduce("SUM", np.zeros(5)),
    ]
    calls = sums if fault == "swapped order" else sums[:1]
    wrong: dict[str, list[Call]] = {
        "other kind": [ctx.barrier],
        "other shape": [lambda: ctx.all_reduce("SUM", np.ones(7))],
        "other dtype": [lambda: ctx.all_reduce("SUM", np.ones(5, np.int64))],
        "other op": [lambda: ctx.all_reduce("MAX", np.ones(5))],
        "swapped order": sums[::-1],
        "returns early": [],
        "never arrives": [asyncio.Event().wait],
    }
    if odd:
        say(f"fault {time.time():.4f}")
        go_wrong("blocked" if fault == "blocks its loop" else fault)
    for call in wrong.get(fault, calls) if odd else calls:
        await call()


def run(fault: str) -> None:
    limit = 0.5 if fault in {"blocks its loop", "never arrives"} else None
    strategy = MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(timeout_seconds=limit))
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    say(" ".join({line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}))
    try:
        asyncio.run(strategy.run(replica, (fault,)))
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the report)
        say(f"reports {time.time():.4f} {strategy.cluster_resolver.task_id} {type(error).__name__}")
        sys.exit(1)  # tracebacks of several workers would run into each other and into these lines


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in FAULTS:
        run(sys.argv[1])
    else:
        main()
