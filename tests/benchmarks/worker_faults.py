"""What workers report of each other's faults, and when: the table of docs/benchmarks/worker-faults.md.

    python -m tests.benchmarks.worker_faults [--python PATH]... [--rounds N]

Every PATH is the interpreter of an environment with an MPI besides what aiodist needs; without one it is this
interpreter. Three workers run on this machine, and the last goes wrong. Every job has a limit, is run so many times,
and has left no process, shared memory or file. It takes some minutes. The workers run this file, too, with the fault.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, get_replica_context
from tests.tools.command import environment
from tests.tools.jobs import Jobs, marked

WORKERS = 3
SECONDS = 0.5
LIMIT_SECONDS = 40
LEAVING_SECONDS = 1
FAULTS = (
    "other kind", "other shape", "other dtype", "other op", "swapped order", "returns early", "raises", "killed",
    "stopped", "blocks its loop", "never arrives",
)  # fmt: skip


def library_of(python: str) -> str:
    """Return the MPI that an environment has."""
    look = "from aiodist._workers.engines.mpi import library; print(library())"
    return subprocess.check_output([python, "-c", look], text=True, env=environment(), timeout=60).strip()


def cell(python: str, fault: str, rounds: int) -> str:
    """Return what the workers report of a fault, every time the same, and the medians of the times."""
    found = [_once(python, fault) for _ in range(rounds)]
    wrong = next((one for one in found if isinstance(one, str)), None)
    if wrong is not None:
        return f"**{wrong}**"
    names, told, ended = zip(*found, strict=True)
    return f"{'/'.join(sorted(set(names)))} {median(told):.2f} s; end {median(ended):.1f} s"


def _once(python: str, fault: str) -> tuple[str, float, float] | str:
    """Return the error that both others raise, when the later does, and when the job has ended; or what is wrong."""
    with closing(Jobs()) as jobs, tempfile.TemporaryDirectory() as folder:
        job = jobs.start(["-n", str(WORKERS), __file__, fault], python, TMPDIR=folder)
        try:
            output = job.process.communicate(timeout=LIMIT_SECONDS)[0].decode()
        except subprocess.TimeoutExpired:
            return "no end"
        ended_at = time.time()
        if left := _left(job.mark, output, Path(folder)):
            return f"leaves {', '.join(left)}"
    begun = [float(at) for at in re.findall(r"fault ([\d.]+)", output)]
    told = re.findall(r"told ([\d.]+) (\d) (\w+) (.*)", output)
    told = [line for line in told if int(line[1]) < WORKERS - 1]  # the odd one may hear of it later, or never
    if len(told) < WORKERS - 1 or not begun:
        return f"told to {len(told)} of {WORKERS - 1}"
    latest = max(float(at) for at, *_ in told) - begun[0]
    return "/".join(sorted({line[2] for line in told})), latest, ended_at - begun[0]


def _left(mark: str, output: str, folder: Path) -> list[str]:
    """List the processes, files and shared memory that a job has left."""
    memory = {Path(path) for path in re.findall(r"/dev/shm/\S+", output)}
    assert memory, output
    until = time.monotonic() + LEAVING_SECONDS
    while True:
        left = [*marked(mark), *(path for path in memory if path.exists()), *folder.iterdir()]
        if not left or time.monotonic() > until:
            return list(map(str, left))
        time.sleep(0.05)


def main() -> None:
    """Print the table, row by row."""
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


# What a worker runs. Times are by the clock of the machine, which all workers share.


def say(word: str, *told: object) -> None:
    """Print a line in one piece."""
    sys.stdout.write(" ".join(map(str, (word, f"{time.time():.4f}", *told))) + "\n")
    sys.stdout.flush()


def go_wrong(fault: str) -> None:
    """Do what no collective sees."""
    say("fault")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ValueError("bad batch")
    if fault == "blocks its loop":
        time.sleep(SECONDS + 2.5)


async def replica(fault: str) -> None:
    """Go wrong on the last worker."""
    ctx = get_replica_context()
    await ctx.barrier()
    odd = ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1
    if odd:
        go_wrong(fault)
    if odd and fault == "never arrives":
        await asyncio.get_running_loop().create_future()
    if odd and fault == "returns early":
        return
    if fault == "swapped order":
        calls: list[Callable[[], Any]] = [
            lambda: ctx.all_reduce("SUM", np.zeros(5)),
            lambda: ctx.all_reduce("SUM", np.ones(5)),
        ]
        for call in calls[::-1] if odd else calls:
            await call()
    elif odd and fault == "other kind":
        await ctx.barrier()
    else:
        await ctx.all_reduce("MAX" if odd and fault == "other op" else "SUM", value_of(fault, odd=odd))


def value_of(fault: str, *, odd: bool) -> Any:
    """Return the odd worker's value, or everybody's."""
    if odd and fault == "other shape":
        return np.ones(7)
    return np.ones(5, np.int64 if odd and fault == "other dtype" else np.float64)


def run(fault: str) -> None:
    """Let this worker's replica run, and print what it is told."""
    limit = SECONDS if fault in {"blocks its loop", "never arrives"} else None
    strategy = MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(timeout_seconds=limit))
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    say("maps", *sorted({line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}))
    try:
        asyncio.run(strategy.run(replica, (fault,)))
    except Exception as error:  # noqa: BLE001  (whatever it is, it is what this worker is told)
        say("told", strategy.cluster_resolver.task_id, type(error).__name__, str(error).splitlines()[0])
        sys.exit(1)  # tracebacks of several workers would run into each other, and into these lines


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in FAULTS:
        run(sys.argv[1])
    else:
        main()
