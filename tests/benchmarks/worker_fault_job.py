"""The program of `worker_faults`: three workers, of which the last does something wrong.

    python worker_fault_job.py aiodist FAULT SECONDS      what the others report, and when
    python worker_fault_job.py mpi FAULT SECONDS          the same calls of mpi4py's, blocking

Times are by the clock of the machine, which all workers share.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, get_replica_context


def say(word: str, *told: object) -> None:
    """Print a line in one piece."""
    sys.stdout.write(" ".join(map(str, (word, f"{time.time():.4f}", *told))) + "\n")
    sys.stdout.flush()


def go_wrong(fault: str, seconds: float) -> None:
    """Do what no collective sees."""
    say("fault")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises":
        raise ValueError("bad batch")
    if fault == "blocks its loop":
        time.sleep(seconds + 2.5)


async def replica(fault: str, seconds: float) -> None:
    """Go wrong on the last worker."""
    ctx = get_replica_context()
    await ctx.barrier()
    odd = ctx.replica_id_in_sync_group == ctx.num_replicas_in_sync - 1
    if odd:
        go_wrong(fault, seconds)
    if odd and fault == "never arrives":
        await asyncio.get_running_loop().create_future()
    if odd and fault == "returns early":
        return
    first, second = (np.zeros(5), np.ones(5)) if fault == "swapped order" else (np.ones(5), None)
    if odd and fault == "swapped order":
        await ctx.all_reduce("SUM", second)
        await ctx.all_reduce("SUM", first)
    elif odd and fault == "other kind":
        await ctx.barrier()
    else:
        op = "MAX" if odd and fault == "other op" else "SUM"
        await ctx.all_reduce(op, value_of(fault, first, odd=odd))
        if second is not None:
            await ctx.all_reduce("SUM", second)


def value_of(fault: str, value: Any, *, odd: bool) -> Any:
    """Return the odd worker's value, or everybody's."""
    if odd and fault == "other shape":
        return np.ones(7)
    return value.astype(np.int64) if odd and fault == "other dtype" else value


def ours(fault: str, seconds: float) -> None:
    """Run it on aiodist."""
    limit = seconds if fault in {"blocks its loop", "never arrives"} else None
    strategy = MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(timeout_seconds=limit))
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    say("maps", *sorted({line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}))
    try:
        asyncio.run(strategy.run(replica, (fault, seconds)))
    except Exception as error:  # noqa: BLE001  (whatever it is, it is what this worker is told)
        say("told", strategy.cluster_resolver.task_id, type(error).__name__, str(error).splitlines()[0])
        sys.exit(1)  # tracebacks of several workers would run into each other, and into these lines


def with_mpi(fault: str, seconds: float) -> None:
    """Run it on mpi4py alone; a worker that gets through says what it got."""
    mpi = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    odd = world.rank == world.size - 1
    world.Barrier()
    if odd:
        go_wrong(fault, seconds)
    if odd and fault == "never arrives":
        time.sleep(60)
    if odd and fault == "returns early":
        return
    if odd and fault == "other kind":
        world.Barrier()
        return
    values = [value_of(fault, np.zeros(5) if fault == "swapped order" else np.ones(5), odd=odd)]
    if fault == "swapped order":
        values.insert(0 if odd else 1, np.ones(5))
    for value in values:
        out = np.empty_like(value)
        world.Allreduce(value, out, mpi.MAX if odd and fault == "other op" else mpi.SUM)
        say("got", world.rank, *out)


if __name__ == "__main__":
    {"aiodist": ours, "mpi": with_mpi}[sys.argv[1]](sys.argv[2], float(sys.argv[3]))
