"""What workers report of each other's faults, and when: the tables of docs/benchmarks/worker-faults.md.

    python -m tests.benchmarks.worker_faults [--python PATH]... [--rounds N]

Every PATH is the interpreter of an environment with an MPI besides what aiodist needs; without one it is this
interpreter. Three workers run on this machine, and the last goes wrong. Every job has a limit, and is ended by its own
process; aiodist's are run so many times, and have left no process, shared memory or file. It takes some minutes. The
workers of a job run this file, too, with what it is: ``aiodist`` or ``mpi`` (mpi4py's blocking calls), and the fault.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, get_replica_context
from tests.tools.command import environment
from tests.tools.jobs import marked

WORKERS = 3
SECONDS = 0.5
LIMIT_SECONDS = 40
BARE_SECONDS = 4
LEAVING_SECONDS = 1
FAULTS = (
    "other kind", "other shape", "other dtype", "other op", "swapped order", "returns early", "raises", "killed",
    "stopped", "blocks its loop", "never arrives",
)  # fmt: skip


class Engine(NamedTuple):
    """An environment's MPI.

    Attributes:
        name: what tables call it.
        python: the interpreter.
    """

    name: str
    python: str


class Ended(NamedTuple):
    """How a job ended.

    Attributes:
        output: what it printed.
        code: its exit code; None where it had to be ended.
        at: when, by the clock of the machine.
    """

    output: str
    code: int | None
    at: float


def engine_of(python: str) -> Engine:
    """Return what an environment has."""
    look = "from aiodist._workers.engines.mpi import library; print(library())"
    said = subprocess.run(
        [python, "-c", look], capture_output=True, text=True, check=True, env=environment(), timeout=60
    )
    return Engine(said.stdout.strip(), python)


def run(command: Sequence[str], seconds: float, **variables: str) -> Ended:
    """Run a job; end it some seconds after the fault, where it has not ended."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(**variables), start_new_session=True
        ) as process:
            code = _wait(process, output.fileno(), seconds)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return Ended(output.read().decode(errors="replace"), code, time.time())


def _wait(process: subprocess.Popen[bytes], output: int, seconds: float) -> int | None:
    until, begun = time.monotonic() + LIMIT_SECONDS, False
    while time.monotonic() < until:
        if not begun and b"fault" in os.pread(output, 1 << 20, 0):
            until, begun = time.monotonic() + seconds, True
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.02)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    return None


def ours(engine: Engine, fault: str, rounds: int) -> str:
    """Return what aiodist's workers report of a fault, every time the same, and the medians of the times."""
    found = [_once(engine, fault) for _ in range(rounds)]
    wrong = next((one for one in found if isinstance(one, str)), None)
    if wrong is not None:
        return f"**{wrong}**"
    names, told, ended = zip(*found, strict=True)
    return f"{'/'.join(sorted(set(names)))} {median(told):.2f} s; end {median(ended):.1f} s"


def _once(engine: Engine, fault: str) -> tuple[str, float, float] | str:
    """Return the error that both others raise, when the later does, and when the job has ended; or what is wrong."""
    words = [engine.python, "-m", "aiodist", "run", "-n", str(WORKERS), __file__, "aiodist", fault, str(SECONDS)]
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        ended = run(words, LIMIT_SECONDS, AIODIST_MARK=mark, TMPDIR=folder)
        if left := _left(mark, ended.output, Path(folder)):
            return f"leaves {', '.join(left)}"
    begun = [float(at) for at in re.findall(r"fault ([\d.]+)", ended.output)]
    told = re.findall(r"told ([\d.]+) (\d) (\w+) (.*)", ended.output)
    told = [line for line in told if int(line[1]) < WORKERS - 1]  # the odd one may hear of it later, or never
    if ended.code is None:
        return "no end"
    if len(told) < WORKERS - 1 or not begun:
        return f"told to {len(told)} of {WORKERS - 1}"
    latest = max(float(at) for at, *_ in told) - begun[0]
    return "/".join(sorted({line[2] for line in told})), latest, ended.at - begun[0]


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


def bare(engine: Engine, fault: str) -> str:
    """Return what the engine makes of a fault by itself."""
    mpiexec = str(Path(engine.python).with_name("mpiexec"))
    root = ["--allow-run-as-root", "--oversubscribe"] if "Open" in engine.name else []
    ended = run([mpiexec, *root, "-n", str(WORKERS), engine.python, __file__, "mpi", fault, str(SECONDS)], BARE_SECONDS)
    got = len(set(re.findall(r"^got [\d.]+ (\d)", ended.output, re.MULTILINE)))
    begun = [float(at) for at in re.findall(r"^fault ([\d.]+)", ended.output, re.MULTILINE)]
    if ended.code is None:
        return f"hangs, {got} of {WORKERS} with wrong data" if got else "hangs"
    seconds = ended.at - begun[0] if begun else 0.0
    if "Error" in ended.output or "rror in" in ended.output or ended.code:
        some = f", {got} of {WORKERS} with wrong data" if got else ""
        return f"error or end of all {seconds:.1f} s{some}"
    return f"{'waits for it' if fault.startswith('blocks') else 'wrong data'} {seconds:.1f} s"


def table(engines: Sequence[Engine], cell: Callable[[Engine, str], str]) -> list[str]:
    """Return a table with a row for each fault and a column for each engine."""
    lines = [f"| the last of three | {' | '.join(engine.name for engine in engines)} |"]
    lines.append("|---" * (1 + len(engines)) + "|")
    for fault in FAULTS:
        cells = []
        for engine in engines:
            cells.append(cell(engine, fault))
            print(fault, "|", engine.name, "|", cells[-1], file=sys.stderr, flush=True)
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    """Print the tables."""
    parser = ArgumentParser()
    parser.add_argument("--python", action="append", metavar="PATH", help="an interpreter; may be given again")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how many times to run aiodist's jobs")
    arguments = parser.parse_args()
    engines = [engine_of(python) for python in arguments.python or [sys.executable]]
    our = partial(ours, rounds=arguments.rounds)
    print("\n".join(["## aiodist", "", *table(engines, our), "## The engines alone", "", *table(engines, bare)]))


# What a worker runs. Times are by the clock of the machine, which all workers share.


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


def with_aiodist(fault: str, seconds: float) -> None:
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
    values = [value_of(fault, odd=odd)]
    if fault == "swapped order":
        values = [np.ones(5), np.zeros(5)] if odd else [np.zeros(5), np.ones(5)]
    for value in values:
        out = np.empty_like(value)
        world.Allreduce(value, out, mpi.MAX if odd and fault == "other op" else mpi.SUM)
        say("got", world.rank, *out)


if __name__ == "__main__":
    jobs = {"aiodist": with_aiodist, "mpi": with_mpi}
    if sys.argv[1:2] and sys.argv[1] in jobs:
        jobs[sys.argv[1]](sys.argv[2], float(sys.argv[3]))
    else:
        main()
