"""How this worker ends: what the others hear of it, who shows a report, and whether MPI is finalised."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._core.errors import CollectiveError
from aiodist._core.report import CollectiveReport
from aiodist._workers.journal import Journal

ENDED: Final = "has ended"
_LOOK_SECONDS: Final = 0.1

losses: Final[list[str]] = []
"""Why workers are lost."""

reports_of_all: Final[list[CollectiveReport]] = []
"""The reports that all workers have been given."""

_shortens: Final[list[int]] = []


def last_error() -> BaseException | None:
    """Return the error that ends the program; None where none has been shown, as of one that calls `sys.exit`."""
    return getattr(sys, "last_value", None)


def farewell_of(error: BaseException | None) -> str:
    """Return what the others hear of this worker, whose program ends with that error."""
    return ENDED if error is None else f"{ENDED}: {type(error).__name__}: {error}".partition("\n")[0]


def shorten_reports(rank: int) -> None:
    """Show a report that all workers raise as one line, where a program of a worker behind the first ends by it."""
    show = sys.excepthook

    def show_shortly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inner = error
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        if isinstance(inner, CollectiveError) and any(inner.report is report for report in reports_of_all):
            first = str(inner).partition("\n")[0]
            shown = f"{type(inner).__name__}: {first} (worker {rank}; the first worker shows the report)"
            print(shown, file=sys.stderr)  # noqa: T201  (as the interpreter shows errors)
        else:
            show(kind, error, trace)

    if rank > 0 and not _shortens:
        _shortens.append(rank)
        sys.excepthook = show_shortly


def finalise(mpi: Any, worker: int) -> None:
    """Bring MPI to its end, at that of the process: a launcher takes a process that leaves that out for failed.

    `MPI_Finalize` waits until all workers call it. With one dead it would wait for ever, so it is left out then. And
    one may fail when this one is in it already, perhaps because of this one's end: `aiodist run` waits for this process
    to end with its own exit code then. So a thread calls it, and not mpi4py's own function, which keeps the interpreter
    lock meanwhile.
    """
    if os.getpid() != worker or mpi.Is_finalized():  # a child that the program has forked ends by itself
        return
    if mpi.COMM_WORLD.Get_size() > 1 and (last_error() is not None or losses):
        return
    notes, call = environment.notes(), of_library(mpi, "MPI_Finalize")
    if notes is None or call is None:
        mpi.Finalize()
        return
    thread = threading.Thread(target=call, name="aiodist MPI", daemon=True)
    thread.start()
    while thread.is_alive() and not any(Journal(notes).ended.values()):
        thread.join(_LOOK_SECONDS)


def of_library(mpi: Any, name: str) -> Callable[..., Any] | None:
    """Return a function of the MPI library, to be called without the interpreter lock; None where it is not found."""
    try:
        found: Callable[..., Any] = getattr(ctypes.CDLL(mpi.__file__), name)
    except (OSError, AttributeError):  # it has been loaded otherwise
        return None
    return found
