"""How a worker ends: what it tells the others and the launcher, which worker shows a report, and MPI's end."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._core.errors import CollectiveError, WorkerLostError
from aiodist._core.report import CollectiveReport
from aiodist._core.terms import ReplicaState
from aiodist._core.text import error_line
from aiodist._workers.journal import ENDED, Journal, note

_POLL_SECONDS: Final = 0.1

losses: Final[list[str]] = []
"""Why other workers were lost."""

shared_reports: Final[list[tuple[CollectiveReport, int]]] = []
"""The reports that all workers were given, and the worker that shows each in full."""


def share(report: CollectiveReport, worker_of: Callable[[int], int]) -> None:
    """Have the worker of the first replica that waits show a report in full: others may be elsewhere and never do."""
    waiting = (each.replica_id for each in report.replicas if each.state is ReplicaState.WAITING)
    shared_reports.append((report, worker_of(next(waiting, 0))))


def _last_error() -> BaseException | None:
    """Return the error that ends the program; None if none was shown, as after `sys.exit`."""
    return getattr(sys, "last_value", None)


def note_the_end() -> None:
    """Note at exit that this worker's program has ended, and whether with an error.

    If the program lets mpi4py initialise MPI, mpi4py also finalises it, after all that Python calls at exit, and may
    wait there forever for the other workers.
    """
    worker = os.getpid()

    def note_it() -> None:
        if os.getpid() == worker:
            note("over", int(_last_error() is not None))

    atexit.register(note_it)


def farewell() -> str:
    """Return what this worker tells the others when its program ends."""
    error = _last_error()
    return ENDED if error is None else f"{ENDED}: {error_line(error)}"


def _shown_by(error: CollectiveError, rank: int) -> int:
    """Return the worker that shows an error of this one in full."""
    if isinstance(error, WorkerLostError):  # the first worker has it, too, unless that is the one that is lost
        return 0 if error.__cause__ is None and min(error.report.suspects, default=0) > 0 else rank
    return next((worker for report, worker in shared_reports if report is error.report), rank)


@cache
def shorten_reports(rank: int) -> None:
    """Show an error that several workers raise in one line, except on the one that shows it in full."""
    show = sys.excepthook

    def show_briefly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inner = error
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        if isinstance(inner, CollectiveError) and (other := _shown_by(inner, rank)) != rank:
            first = str(inner).partition("\n")[0]
            line = f"{type(inner).__name__}: {first} (worker {rank}; worker {other} shows more)\n"
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
    note("over", 0)
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
