"""`aiodist run`: a program on several workers, which ends in every case, and leaves no process behind.

    aiodist run ── mpiexec ── agent ── worker     one agent and one worker a process of the job
                   starter (ssh)                  for gloo, which needs no MPI

The agent (`worker_agent`) starts the worker, ends it when the job ends, and tells how it ended. When the first worker
fails, the others get some seconds to raise what they have heard of it; then everything that is left is killed. The
launcher's own way, to kill all at the first failure, or to wait for all for ever, would lose their reports, or hang.
One worker on this machine needs no mpiexec: its agent is started directly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Sequence
from enum import Enum
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist._arrays import environment
from aiodist._tools.launch import gloo_launcher, worker_agent
from aiodist._tools.launch.following import follow
from aiodist._tools.launch.leftovers import folder_of_notes
from aiodist._tools.launch.mpi_launcher import find_launcher, flags, flavour_of
from aiodist._tools.launch.switchboard import Switchboard
from aiodist._tools.usage import UsageError, names, positive

if TYPE_CHECKING:
    from argparse import _SubParsersAction


class Engine(Enum):
    """What connects the workers."""

    MPI = "mpi"
    GLOO = "gloo"


def add_run(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the `run` command."""
    run = commands.add_parser(
        "run",
        help="run a program on several workers",
        description="Run a Python program on several workers, whose MultiWorkerMirroredStrategy then finds the others. "
        "Ends when all have ended, or some seconds after the first has failed, with its exit code.",
    )
    run.add_argument("-n", type=positive, metavar="N", required=True, help="how many workers", dest="workers")
    run.add_argument(
        "--hosts",
        type=names,
        default=(),
        metavar="NAME,NAME,...",
        help="the machines; all have the same files (default: here)",
    )
    run.add_argument("--launcher", metavar="PATH", help="the mpiexec to use (default: that of mpi4py's MPI)")
    run.add_argument(
        "--engine",
        choices=[engine.value for engine in Engine],
        default=Engine.MPI.value,
        help="what connects the workers (default: %(default)s; gloo needs PyTorch and no MPI)",
    )
    run.add_argument("-m", action="store_true", help="PROGRAM is a module's name, as for python -m", dest="is_module")
    run.add_argument("program", metavar="PROGRAM", help="a Python file, or a module")
    run.add_argument("arguments", nargs=REMAINDER, metavar="...", help="its arguments")
    run.set_defaults(command=_run, handles_interruptions=True)


def _run(arguments: Namespace) -> int:
    program = [sys.executable, *_program(arguments.program, is_module=arguments.is_module), *arguments.arguments]
    hosts, launcher, engine = arguments.hosts, arguments.launcher, Engine(arguments.engine)
    return launch(arguments.workers, program, hosts=hosts, launcher=launcher, engine=engine)


def _program(name: str, *, is_module: bool) -> list[str]:
    if not is_module:
        if name == "-":
            raise UsageError("a program from standard input would reach the first worker alone; write it to a file")
        if not Path(name).is_file():
            raise UsageError(f"there is no file {name!r}; -m takes the name of a module")
        return [name]
    top = name.partition(".")[0]
    if not all(map(str.isidentifier, name.split("."))) or not (find_spec(top) or PathFinder.find_spec(top, ["."])):
        raise UsageError(f"there is no module {name!r}; a file is run without -m")
    return ["-m", name]


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
        UsageError: there is no launcher, or it is none that is known; what the engine needs is not installed; there is
            no place for notes.
    """
    gloo = engine is Engine.GLOO
    places = gloo_launcher.places_of(workers, hosts, launcher) if gloo else []
    meeting = gloo_launcher.meeting_of(places, hosts) if gloo else None
    mpiexec = [] if gloo else _mpiexec(workers, hosts, launcher)
    _open_what_is_closed()
    with folder_of_notes() as notes:
        elsewhere = Switchboard(notes) if hosts else None
        where = elsewhere.address if elsewhere else "here"
        settings = environment.with_workers(
            workers=str(workers),
            engine=engine.value,
            rendezvous=meeting or str(notes / "rendezvous"),
            notes=str(notes),
        )
        start = gloo_launcher.start_of(places, settings) if gloo else mpiexec
        command = [*start, sys.executable, worker_agent.__file__, str(notes), str(workers), where, *program]
        worker_agent.adopt_orphans()
        with subprocess.Popen(  # noqa: S603  (the user's command)
            command,
            env=settings,
            start_new_session=True,
            preexec_fn=worker_agent.die_with_parent,  # noqa: PLW1509  (this process has no threads)
        ) as process:
            return follow([process], notes, elsewhere)


def _open_what_is_closed() -> None:
    """Give standard streams that the caller has closed to the null device: a launcher would take others for them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _mpiexec(workers: int, hosts: Sequence[str], launcher: str | None) -> list[str]:
    if workers == 1 and not hosts and launcher is None:
        return []
    path = find_launcher(launcher)
    sixes = [host for host in hosts if host.count(":") > 1]  # one comes before a count of workers
    if sixes:
        raise UsageError(
            f"MPI's launchers take no numbers of IPv6 for machines, got {', '.join(sixes)}: give each a name, in "
            "/etc/hosts say, or take --engine gloo"
        )
    return [path, *flags(flavour_of(path), workers, hosts)]
