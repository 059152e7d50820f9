"""`aiodist run`: a program on several workers, which ends in every case, and leaves no process behind.

    aiodist run ── mpiexec ── agent ── worker     one agent and one worker a process of the job

The agent starts the worker, ends it when the job ends, and tells how it ended. When the first worker fails, the others
get some seconds to raise what they have heard of it; then everything that is left is killed. mpiexec by itself would
kill all at the first failure, and their reports be lost, or wait for all for ever. One worker needs no mpiexec: its
agent is started directly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist._arrays import environment
from aiodist._tools.launch import agent
from aiodist._tools.launch.job import follow
from aiodist._tools.launch.mpiexec import find_mpiexec
from aiodist._tools.usage import UsageError, positive

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_run(commands: _SubParsersAction[ArgumentParser]) -> None:
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
    program = [sys.executable, *_program(arguments.program, is_module=arguments.is_module), *arguments.arguments]
    return launch(arguments.workers, program, launcher=arguments.launcher)


def _program(name: str, *, is_module: bool) -> list[str]:
    if not is_module:
        if name == "-":
            raise UsageError("a program from standard input would reach only the first worker; write it to a file")
        if not Path(name).is_file():
            raise UsageError(f"there is no file {name!r}; -m takes the name of a module")
        return [name]
    top = name.partition(".")[0]
    if not all(map(str.isidentifier, name.split("."))) or not (find_spec(top) or PathFinder.find_spec(top, ["."])):
        raise UsageError(f"there is no module {name!r}; run a file without -m")
    return ["-m", name]


def launch(workers: int, program: Sequence[str], *, launcher: str | None = None) -> int:
    """Run a command on several workers; return the exit code of the first that failed, or 0."""
    start, rank = [], "none: there is one worker"
    if workers > 1 or launcher is not None:
        mpiexec = find_mpiexec(launcher)
        start, rank = mpiexec.start(workers), mpiexec.rank_variable
    _open_closed_streams()
    with _folder_of_notes() as folder:
        command = [*start, sys.executable, agent.__file__, folder, str(workers), rank, *program]
        agent.adopt_orphans()
        with subprocess.Popen(  # noqa: S603  (the user's command)
            command,
            env=environment.with_workers(workers, folder),
            start_new_session=True,
            preexec_fn=lambda: agent.die_with_parent(signal.SIGKILL),  # noqa: PLW1509  (this process has no threads)
        ) as process:
            return follow(process, folder)


def _folder_of_notes() -> tempfile.TemporaryDirectory[str]:
    """Make the folder of a job's journal, into which nobody else can look."""
    try:
        return tempfile.TemporaryDirectory(prefix="aiodist-run-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"cannot make a folder for the job's notes ({error}); set TMPDIR to a folder with free space"
        ) from None


def _open_closed_streams() -> None:
    """Give standard streams that the caller has closed to the null device: mpiexec would take others for them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
