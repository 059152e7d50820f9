"""How a job of `aiodist run` and its workers end: the journal of the job, and what a worker does at its exit.

The journal is a file to which the processes of a job append what the launcher must know, because an engine that waits
for a worker does not say which one is missing. Each line has a kind, a worker's process id and a number:

    started PROCESS RANK    written by the worker's agent, `aiodist._tools.agent`
    ended PROCESS CODE      likewise
    waits PROCESS 1         the worker waits for the others to make a strategy; 0: no longer
    failed PROCESS 1        its program has ended with an error; the process may wait in MPI_Finalize forever
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._core.errors import CollectiveError, WorkerLostError
from aiodist._core.report import CollectiveReport
from aiodist._core.text import error_line

_JOURNAL: Final = "journal"


def _note(kind: str, number: int) -> None:
    """Append a line on this worker, if there is a launcher."""
    if folder := environment.journal_folder():
        with suppress(OSError), open(os.path.join(folder, _JOURNAL), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
            file.write(f"{kind} {os.getpid()} {number}\n")


@contextmanager
def noted_rendezvous() -> Iterator[None]:
    """Note that this worker waits for the others inside the block."""
    _note("waits", 1)
    try:
        yield
    finally:
        _note("waits", 0)


class Journal:
    """The contents of a job's journal.

    Attributes:
        started: by process, the ranks.
        ended: by process, the exit codes, in the order in which the workers have ended.
        waiting: the processes that wait to make a strategy.
        failed: the processes whose programs have ended with an error.
    """

    def __init__(self, folder: str | None) -> None:
        numbers: defaultdict[str, dict[int, int]] = defaultdict(dict)
        with suppress(OSError), open(os.path.join(folder or "", _JOURNAL), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            for line in file.read().split("\n")[:-1]:
                kind, process, number = line.split(" ")
                numbers[kind][int(process)] = int(number)
        self.started, self.ended = numbers["started"], numbers["ended"]
        self.waiting = {process for process, waits in numbers["waits"].items() if waits}
        self.failed = numbers["failed"].keys() & self.started.keys()  # without a worker's own children

    def failure(self) -> int:
        """Return the exit code of the first worker that failed by itself; 0 if none did.

        The others fail because of it, perhaps before it has ended, with an exception and so with code 1.
        """
        codes = [code for code in self.ended.values() if code]
        return next((code for code in codes if code != 1), 1 if codes or self.failed else 0)

    def missing(self) -> str:
        """Return the workers that have not reached a rendezvous, as the end of a sentence."""
        absent = sorted((rank, process) for process, rank in self.started.items() if process not in self.waiting)
        does = ((rank, pid, ENDED if pid in self.ended else "has not arrived") for rank, pid in absent)
        workers = [f"worker {rank} (process {pid} on {platform.node()}) {what}" for rank, pid, what in does]
        return f"; {', '.join(workers)}" if workers else ""


# How a worker ends: what it tells the others, which worker shows a report, and whether MPI is finalised.


ENDED: Final = "has ended"
_POLL_SECONDS: Final = 0.1

losses: Final[list[str]] = []
"""Why other workers were lost."""

shared_reports: Final[list[CollectiveReport]] = []
"""The reports that all workers were given."""


def _last_error() -> BaseException | None:
    """Return the error that ends the program; None if none was shown, as after `sys.exit`."""
    return getattr(sys, "last_value", None)


def note_error_at_exit() -> None:
    """Tell the launcher of an error that ends this worker's program.

    If the program lets mpi4py initialise MPI, mpi4py also finalises it, after all that Python calls at exit, and may
    wait there forever for the other workers.
    """
    worker = os.getpid()

    def note() -> None:
        if os.getpid() == worker and _last_error() is not None:
            _note("failed", 1)

    atexit.register(note)


def farewell() -> str:
    """Return what this worker tells the others when its program ends."""
    error = _last_error()
    return ENDED if error is None else f"{ENDED}: {error_line(error)}"


def _is_shared(error: CollectiveError) -> bool:
    """Return whether the first worker has this error, too: a common report, or the loss of another worker."""
    if isinstance(error, WorkerLostError):
        return error.__cause__ is None and min(error.report.suspects, default=0) > 0
    return any(error.report is report for report in shared_reports)


@cache
def shorten_reports(rank: int) -> None:
    """Show an error that all workers raise in one line, except on the first worker, which shows it in full."""
    show = sys.excepthook
    if rank == 0:
        return

    def show_briefly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inner = error
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        if isinstance(inner, CollectiveError) and _is_shared(inner):
            first = str(inner).partition("\n")[0]
            line = f"{type(inner).__name__}: {first} (worker {rank}; the first worker shows more)\n"
            sys.stderr.write(line)  # at once
        else:
            show(kind, error, trace)

    sys.excepthook = show_briefly


def finalise(mpi: Any, worker: int) -> None:
    """Finalise MPI at the end of the process, because launchers treat a process that does not as failed.

    `MPI_Finalize` waits until all workers call it, which a dead one never does, so it is skipped if one is lost. A
    worker may also fail while this one is in the call, perhaps because this one ends. Then `aiodist run` waits for this
    process to end with its own exit code. So a thread calls the library's function, which, unlike mpi4py's, does not
    hold the interpreter lock.
    """
    if os.getpid() != worker or mpi.Is_finalized():  # a child that the program has forked does not finalise
        return
    if mpi.COMM_WORLD.Get_size() > 1 and (_last_error() is not None or losses):
        return
    notes, call = environment.journal_folder(), library_function(mpi, "MPI_Finalize")
    if notes is None or call is None:
        mpi.Finalize()
        return
    thread = threading.Thread(target=call, name="aiodist MPI", daemon=True)
    thread.start()
    while thread.is_alive() and not Journal(notes).failure():
        thread.join(_POLL_SECONDS)


def library_function(mpi: Any, name: str) -> Callable[..., Any] | None:
    """Return a function of the MPI library, called without the interpreter lock; None if it is not found."""
    try:
        found: Callable[..., Any] = getattr(ctypes.CDLL(mpi.__file__), name)
    except (OSError, AttributeError):  # the library was loaded in another way
        return None
    return found
