"""What workers are told of each other's faults, and when: the tables of docs/benchmarks/worker-faults.md.

    python -m tests.benchmarks.worker_faults [--python PATH]... [PAGE]

Every PATH is the interpreter of an environment with an MPI, or with PyTorch, besides what aiodist needs; without one it
is this interpreter. Three workers run on this machine, and the last goes wrong; then the same on machines of network
namespaces, where they are permitted. Every job has a limit, and is ended by its own process. It takes some minutes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from tests.tools.command import environment
from tests.workers.namespaces import Machines, machines, why_not

JOB = str(Path(__file__).with_name("worker_fault_job.py"))
WORKERS = 3
SECONDS = 1.5
LIMIT_SECONDS = 40
BARE_SECONDS = 6
FAULTS = (
    "other kind", "other shape", "other dtype", "other op", "swapped order", "returns early", "raises", "killed",
    "stopped", "blocks its loop", "never arrives",
)  # fmt: skip
APART = ("killed", "stopped", "cut link to the first", "cut link between two others")
LOOK = """
import importlib.util, json
print(importlib.util.find_spec("torch") is not None)
if importlib.util.find_spec("mpi4py"):
    from aiodist.workers.mpi import library
    print(library())
"""


class Engine(NamedTuple):
    """An environment's engine.

    Attributes:
        name: what tables call it.
        python: the interpreter.
        option: what `aiodist run --engine` is given.
    """

    name: str
    python: str
    option: str


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


def engines_of(python: str) -> list[Engine]:
    """Return what an environment has."""
    said = subprocess.run(
        [python, "-c", LOOK], capture_output=True, text=True, check=True, env=environment(), timeout=60
    ).stdout.split("\n")
    found = [Engine(said[1], python, "mpi")] if said[1] else []
    return found + ([Engine("gloo", python, "gloo")] if said[0] == "True" else [])


def run(command: Sequence[str], seconds: float, act: Callable[[], None] | None = None, **variables: str) -> Ended:
    """Run a job, and act when all workers run; end it some seconds after the fault, where it has not ended."""
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(**variables), start_new_session=True
        ) as process:
            code = _wait(process, output.fileno(), seconds, act)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        return Ended(output.read().decode(errors="replace"), code, time.time())


def _wait(process: subprocess.Popen[bytes], output: int, seconds: float, act: Callable[[], None] | None) -> int | None:
    until, begun = time.monotonic() + LIMIT_SECONDS, False
    while time.monotonic() < until:
        printed = os.pread(output, 1 << 20, 0)
        if not begun and b"fault" in printed:
            until, begun = time.monotonic() + seconds, True
        if act is not None and printed.count(b"running") >= WORKERS:
            act()
            act = None
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.02)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    return None


def ours(engine: Engine, fault: str) -> str:
    """Return what aiodist's workers are told of a fault on this machine."""
    words = [engine.python, "-m", "aiodist", "run", "-n", str(WORKERS), "--engine", engine.option]
    ended = run([*words, JOB, "aiodist", fault, str(SECONDS)], LIMIT_SECONDS)
    begun = [float(at) for at in re.findall(r"^fault ([\d.]+)", ended.output, re.MULTILINE)]
    return _cell(ended, begun[0] if begun else ended.at, WORKERS - 1)


def _cell(ended: Ended, begun: float, wanted: int) -> str:
    told = re.findall(r"^told ([\d.]+) (\d) (\w+) (.*)", ended.output, re.MULTILINE)
    told = [line for line in told if int(line[1]) < wanted]  # the odd one may hear of it later, or never
    if ended.code is None:
        return "**no end**"
    if len(told) < wanted:
        return f"**told to {len(told)} of {wanted}**"
    latest = max(float(at) for at, *_ in told) - begun
    return f"{'/'.join(sorted({line[2] for line in told}))} {latest:.2f} s; end {ended.at - begun:.1f} s"


def apart(engine: Engine, fault: str) -> str:
    """Return what workers on several machines are told."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        made = stack.enter_context(machines(WORKERS, Path(folder)))
        words = [*made.enter, engine.python, "-m", "aiodist", "run", "-n", str(WORKERS), "--engine", engine.option]
        words += ["--hosts", ",".join(made.numbers), JOB, "aiodist", fault, str(SECONDS)]
        cuts: list[float] = []
        act = _cutting(made, fault, cuts) if fault.startswith("cut") else None
        ended = run(words, LIMIT_SECONDS, act, **made.variables)
    begun = cuts or [float(at) for at in re.findall(r"^fault ([\d.]+)", ended.output, re.MULTILINE)]
    wanted = WORKERS if "between" in fault else WORKERS - 1
    return _cell(ended, begun[0] if begun else ended.at, wanted)


def _cutting(made: Machines, fault: str, cuts: list[float]) -> Callable[[], None]:
    def cut() -> None:
        made.cut(*((1, 2) if "between" in fault else (0, 2)))
        cuts.append(time.time())

    return cut


def bare(engine: Engine, fault: str) -> str:
    """Return what the engine makes of a fault by itself."""
    with tempfile.TemporaryDirectory() as folder:
        if engine.option == "gloo":
            script = 'for r in 0 1 2; do "$0" "$@" $r 3 & done; wait'
            words = ["sh", "-c", script, engine.python, JOB, "gloo", fault, str(SECONDS), str(Path(folder) / "meeting")]
        else:
            mpiexec = str(Path(engine.python).with_name("mpiexec"))
            root = ["--allow-run-as-root", "--oversubscribe"] if "Open" in engine.name else []
            words = [mpiexec, *root, "-n", str(WORKERS), engine.python, JOB, "mpi", fault, str(SECONDS)]
        ended = run(words, BARE_SECONDS)
    got = len(set(re.findall(r"^got [\d.]+ (\d)", ended.output, re.MULTILINE)))
    begun = [float(at) for at in re.findall(r"^fault ([\d.]+)", ended.output, re.MULTILINE)]
    if ended.code is None:
        return f"hangs, {got} of {WORKERS} with wrong data" if got else "hangs"
    seconds = ended.at - begun[0] if begun else 0.0
    if "Error" in ended.output or "rror in" in ended.output or ended.code:
        some = f", {got} of {WORKERS} with wrong data" if got else ""
        return f"error or end of all {seconds:.1f} s{some}"
    return f"{'waits for it' if fault.startswith('blocks') else 'wrong data'} {seconds:.1f} s"


def table(
    title: str, faults: Sequence[str], engines: Sequence[Engine], cell: Callable[[Engine, str], str]
) -> list[str]:
    """Return a table with a row for each fault and a column for each engine."""
    lines = [f"| {title} | {' | '.join(engine.name for engine in engines)} |", "|---" * (1 + len(engines)) + "|"]
    for fault in faults:
        cells = []
        for engine in engines:
            cells.append(cell(engine, fault))
            print(title, "|", fault, "|", engine.name, "|", cells[-1], file=sys.stderr, flush=True)
        lines.append(f"| {fault} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    """Print the tables, or put them behind the mark on the page."""
    parser = ArgumentParser()
    parser.add_argument("--python", action="append", metavar="PATH", help="an interpreter; may be given again")
    parser.add_argument("page", nargs="?", type=Path)
    arguments = parser.parse_args()
    engines = [engine for python in arguments.python or [sys.executable] for engine in engines_of(python)]
    lines = ["## aiodist, workers on one machine", "", *table("the last of three", FAULTS, engines, ours)]
    lines += ["## aiodist, every worker on a machine of its own", ""]
    reason = why_not()
    lines += [f"Not run: {reason}.", ""] if reason else table("the last of three", APART, engines, apart)
    lines += ["## The engines alone", "", *table("the last of three", FAULTS, engines, bare)]
    text = "\n".join(lines)
    if arguments.page is None:
        print(text)
        return
    before = arguments.page.read_text(encoding="utf-8").partition("## aiodist, workers")[0]
    arguments.page.write_text(before + text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
