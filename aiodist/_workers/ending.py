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
from aiodist._core.text import error_line
from aiodist._workers.journal import ENDED, Journal, note

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

    def note_error() -> None:
        if os.getpid() == worker and _last_error() is not None:
            note("failed", 1)

    atexit.register(note_error)


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
