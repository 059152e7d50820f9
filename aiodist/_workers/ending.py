"""How a job of `aiodist run` and its workers end: the journal, and what a worker does in the end.

The journal is a file to which the job's processes append what the launcher must know, because an engine that waits for
a worker does not say which one is missing. Each line is a kind, the process of a worker, and a number:

    started PROCESS RANK    written by its agent, `aiodist._tools.agent`
    ended PROCESS CODE      likewise
    waits PROCESS 1         it waits for the others to make a strategy; 0: no longer
    failed PROCESS 1        its program has ended by an error; the process may wait in MPI_Finalize for ever
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
from aiodist._core.text import brief

_NAME: Final = "journal"


def _note(kind: str, number: int) -> None:
    """Append a line for this worker, if there is a launcher."""
    if folder := environment.notes():
        with suppress(OSError), open(os.path.join(folder, _NAME), "a", encoding="utf-8") as file:  # noqa: PTH118, PTH123
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
        failed: the processes whose programs have ended by an error.
    """

    def __init__(self, folder: str | None) -> None:
        said: defaultdict[str, dict[int, int]] = defaultdict(dict)
        with suppress(OSError), open(os.path.join(folder or "", _NAME), encoding="utf-8") as file:  # noqa: PTH118, PTH123
            for line in file.read().split("\n")[:-1]:
                kind, process, number = line.split(" ")
                said[kind][int(process)] = int(number)
        self.started, self.ended = said["started"], said["ended"]
        self.waiting = {process for process, waits in said["waits"].items() if waits}
        self.failed = said["failed"].keys() & self.started.keys()  # not what a worker has started

    def failure(self) -> int:
        """Return the exit code of the first worker that failed by itself; 0 if none did.

        The others fail because of it, perhaps before it has ended, with an exception and so with code 1.
        """
        codes = [code for code in self.ended.values() if code]
        return next((code for code in codes if code != 1), 1 if codes or self.failed else 0)

    def missing(self) -> str:
        """Return the workers that have not reached a rendezvous, as the end of a sentence."""
        absent = sorted((rank, process) for process, rank in self.started.items() if process not in self.waiting)
        who = ", ".join(f"worker {rank} (process {process} on {platform.node()})" for rank, process in absent)
        return f"; {who} has not come" if who else ""


# How a worker ends: what the others hear of it, who shows a report, and whether MPI is finalised.


ENDED: Final = "has ended"
_LOOK_SECONDS: Final = 0.1

losses: Final[list[str]] = []
"""Why workers are lost."""

reports_of_all: Final[list[CollectiveReport]] = []
"""The reports that all workers have been given."""


def _last_error() -> BaseException | None:
    """Return the error that ends the program; None if none was shown, as after `sys.exit`."""
    return getattr(sys, "last_value", None)


def note_error_at_exit() -> None:
    """Let the launcher know of an error that ends this worker's program.

    Where the program has had mpi4py initialise MPI, that finalises it, too, after all that Python calls at exit, and
    waits there for workers which may never end.
    """
    worker = os.getpid()

    def note() -> None:
        if os.getpid() == worker and _last_error() is not None:
            _note("failed", 1)

    atexit.register(note)


def farewell() -> str:
    """Return the text on this worker for the others when its program ends."""
    error = _last_error()
    return ENDED if error is None else f"{ENDED}: {brief(error)}"


def _is_of_all(error: CollectiveError) -> bool:
    """Return whether the first worker has an error, too: a report that all are given, or that another one is gone."""
    if isinstance(error, WorkerLostError):
        return error.__cause__ is None and min(error.report.suspects, default=0) > 0
    return any(error.report is report for report in reports_of_all)


@cache
def shorten_reports(rank: int) -> None:
    """Shorten what all workers raise (a report, the loss of another) to one line; the first worker shows it whole."""
    show = sys.excepthook
    if rank == 0:
        return

    def show_shortly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inner = error
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        if isinstance(inner, CollectiveError) and _is_of_all(inner):
            first = str(inner).partition("\n")[0]
            sys.stderr.write(
                f"{type(inner).__name__}: {first} (worker {rank}; the first worker shows more)\n"
            )  # at once
        else:
            show(kind, error, trace)

    sys.excepthook = show_shortly


def finalise(mpi: Any, worker: int) -> None:
    """Finalise MPI at the end of the process, because a launcher treats a process that does not as failed.

    `MPI_Finalize` waits until all workers call it. If one is dead it would wait for ever, so this skips it then. A
    worker may also fail while this one is in it, perhaps because this one ends; then `aiodist run` still waits for
    this process to end with its own exit code. So a thread calls the library's function; mpi4py's would keep the
    interpreter lock meanwhile.
    """
    if os.getpid() != worker or mpi.Is_finalized():  # a child that the program has forked ends by itself
        return
    if mpi.COMM_WORLD.Get_size() > 1 and (_last_error() is not None or losses):
        return
    notes, call = environment.notes(), of_library(mpi, "MPI_Finalize")
    if notes is None or call is None:
        mpi.Finalize()
        return
    thread = threading.Thread(target=call, name="aiodist MPI", daemon=True)
    thread.start()
    while thread.is_alive() and not Journal(notes).failure():
        thread.join(_LOOK_SECONDS)


def of_library(mpi: Any, name: str) -> Callable[..., Any] | None:
    """Return a function of the MPI library that does not hold the interpreter lock; None if it is not found."""
    try:
        found: Callable[..., Any] = getattr(ctypes.CDLL(mpi.__file__), name)
    except (OSError, AttributeError):  # it has been loaded otherwise
        return None
    return found
