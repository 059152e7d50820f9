"""`aiodist run`: a program on several workers, which ends in every case, and leaves no process behind.

    aiodist run ── mpiexec ── agent ── worker     one agent and one worker a process of the job

The agent starts the worker, ends it when the job ends, and tells how it ended. When the first worker fails, the others
get some seconds to raise what they have heard of it; then everything that is left is killed. mpiexec by itself would
kill all at the first failure, and their reports be lost, or wait for all for ever. One worker needs no mpiexec: its
agent is started directly.

A job ends when all its processes have; or some seconds after the first worker has failed, in which the others may tell
of it; or some seconds after the user has asked for it, in which the workers may end by themselves. A second Ctrl-C ends
it at once. It ends, too, when workers wait to make a strategy with one that has ended: MPI would let them wait on. No
process of it is left on this machine then, and no memory of MPI's.

Its exit code is that of the first worker that has failed by itself. One that ends while others need it makes them fail,
too, and may come to its end after them: these say that they are echoes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiodist._arrays import environment
from aiodist._tools.launch import agent
from aiodist._tools.launch.mpiexec import find_mpiexec
from aiodist._tools.usage import UsageError, positive
from aiodist._workers.journal import Journal, shared_memory

if TYPE_CHECKING:
    from argparse import _SubParsersAction

LAST_WORDS_SECONDS: Final = 3.5
ENDING_SECONDS: Final = 4.0
_POLL_SECONDS: Final = 0.05
_FAREWELL_SECONDS: Final = 1.0


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
            return _follow(process, folder)


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


# A job, followed to its end.


def _follow(process: subprocess.Popen[bytes], folder: str) -> int:
    """Wait for the end of a job, or bring it about; return the exit code of the worker that failed first, or 0.

    ``folder`` is that of its journal.
    """
    with _noted_signals() as signals:
        job = _Job(process, folder, signals)
        try:
            while process.poll() is None and not job.is_over():
                _wait(process, _POLL_SECONDS)
            failure = Journal(folder).first_failure()  # before those that are left are killed
        finally:
            job.end()
        if signal.SIGINT in signals:
            raise KeyboardInterrupt
        if signals:
            return 128 + signals[0]
        if job.complaint:
            print(f"Error: {job.complaint}", file=sys.stderr)
            return 1
        code = process.wait()
        return failure or Journal(folder).first_failure() or (code if code >= 0 else 128 - code)


@contextmanager
def _noted_signals() -> Iterator[Sequence[int]]:
    """Note the signals that ask for the end (Ctrl-C, SIGTERM, the end of the terminal) instead of ending."""
    received: list[int] = []
    names = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        names.append(signal.SIGHUP)
    before = {name: signal.signal(name, lambda number, _: received.append(number)) for name in names}
    try:
        yield received
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


class _Job:
    """The processes of a job.

    Attributes:
        complaint: why the job has been ended though no worker has failed.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: str, signals: Sequence[int]) -> None:
        self._process = process
        self._folder = folder
        self._signals = signals
        self._passed_on = 0
        self._memory: set[str] = set()
        self._over_at: float | None = None
        self._in_vain_since: float | None = None
        self.complaint: str | None = None

    def is_over(self) -> bool:
        """Return whether the time has come to kill what still runs; look at what has happened since."""
        now, journal = time.monotonic(), Journal(self._folder)
        if len(self._signals) > self._passed_on:
            self._over_at = now if self._passed_on else now + ENDING_SECONDS
            self._passed_on = len(self._signals)
            self._look_at_memory(journal)
            first = self._signals[0]
            _signal_agents(journal, signal.SIGTERM if first == signal.SIGHUP else first)  # SIGHUP would give no time
        if self._over_at is None and journal.first_failure():
            self._over_at = now + LAST_WORDS_SECONDS
            self._look_at_memory(journal)
        if self._over_at is None and (complaint := self._waits_in_vain(journal, now)):
            self.complaint, self._over_at = complaint, now
        return self._over_at is not None and now >= self._over_at

    def end(self) -> None:
        """End what is left: workers, what they have started, and mpiexec; remove the shared memory of all.

        When the agents have ended, mpiexec ends by itself, and removes its own files.
        """
        journal = Journal(self._folder)
        self._look_at_memory(journal)
        for end in (partial(_signal_agents, journal, signal.SIGHUP), self._process.terminate, self._process.kill):
            end()
            _wait(self._process, _FAREWELL_SECONDS)
        agent.kill_descendants()
        for path in self._memory | Journal(self._folder).maps:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108

    def _look_at_memory(self, journal: Journal) -> None:
        """Note the shared memory of workers that may not have got to noting it themselves.

        An MPI removes it when it is finalised, which a killed worker never does; in a container, where there is little
        of it, some failed jobs would use up all.
        """
        for worker, _ in journal.running():
            self._memory |= shared_memory(worker)

    def _waits_in_vain(self, journal: Journal, now: float) -> str | None:
        """Return what is to be said where workers wait to meet one that has ended; None where none does."""
        made, text = journal.waiting_in_vain() or (0, None)
        self._in_vain_since = (self._in_vain_since or now) if text else None
        if made and now - (self._in_vain_since or now) < LAST_WORDS_SECONDS:
            return None  # those that have an earlier strategy know by that, and raise it themselves
        return text


def _signal_agents(journal: Journal, number: int) -> None:
    for _, its_agent in journal.running():
        with suppress(ProcessLookupError):
            os.kill(its_agent, number)
