"""How this worker ends.

A worker that ends while it is needed makes the others fail, and they may be gone before it is: so each tells
`aiodist run` when its error is an echo, and the job ends with the exit code of a worker whose own it was.

`MPI_Finalize` waits until all workers call it. With a worker dead it would wait for ever, so it is left out. A worker
may also fail when this one is in it already: where a launcher's journal reports such things, this process then ends
with its own exit code instead of being killed. Where operations in the air will never match, after a mismatch that the
program has caught, it may wait, too, though MPICH's and Open MPI's have never done so: it is given some seconds. So a
thread calls it. mpi4py's own function keeps the interpreter lock meanwhile, with which nobody could look at anything
else: the library's is called.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._core.errors import CollectiveError, IncompleteCollectiveError, WorkerLostError
from aiodist._core.report import CollectiveReport
from aiodist._workers.journal import Journal, has_a_launcher, note
from aiodist._workers.transport import Request

ENDED: Final = "has ended"
WORKER_LOST: Final = "a worker is lost"
_LANDING_SECONDS: Final = 1.0
_DOUBTFUL_SECONDS: Final = 8.0
_LOOK_SECONDS: Final = 0.1

in_the_air: Final[deque[Request]] = deque()
"""Requests that nobody waits for any more; they keep the buffers that the engine may still read and write."""

unfinished: Final[list[str]] = []
"""What stands against an orderly end: of each strategy that has ended in trouble, why."""

reports_of_all: Final[list[CollectiveReport]] = []
"""The reports that all workers have been given."""

_shortens: Final[list[int]] = []


# The error that ends the program.


def last_error() -> BaseException | None:
    """Return the error that ends the program; None where none has been shown, as of one that calls `sys.exit`."""
    return getattr(sys, "last_value", None)


def farewell_of(error: BaseException | None) -> str:
    """Return what the others hear of this worker, whose program ends with that error."""
    return ENDED if error is None else f"{ENDED}: {type(error).__name__}: {error}".partition("\n")[0]


def is_echo(error: BaseException | None, own: Collection[int]) -> bool:
    """Return whether an error says that replicas of other workers have ended, and none of this one's."""
    if not isinstance(error, (WorkerLostError, IncompleteCollectiveError)):
        return False
    ended = [replica.replica_id for replica in error.report.replicas if replica.state.ended]
    return bool(ended) and not any(replica_id in own for replica_id in ended)


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


# The end of MPI.


def finalise(mpi: Any, worker: int) -> None:
    """Bring MPI to its end, at that of the process, as far as it can be."""
    if os.getpid() != worker or mpi.Is_finalized():  # a child that the program has forked ends by itself
        return
    if mpi.COMM_WORLD.Get_size() == 1:
        mpi.Finalize()
        return
    if last_error() is not None or WORKER_LOST in unfinished:
        return
    note("leaving")
    doubtful = bool(unfinished) or not _all_landed()
    if not doubtful and not has_a_launcher():
        mpi.Finalize()
    else:
        _finalise_for(mpi, _DOUBTFUL_SECONDS if doubtful else float("inf"))


def _finalise_for(mpi: Any, seconds: float) -> None:
    """Let a thread do it; wait for it for so long, or until another worker has failed."""
    give_up = time.monotonic() + seconds
    thread = threading.Thread(target=_of_library(mpi), name="aiodist MPI", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12's first releases start none at their end
        mpi.Finalize()
        return
    while thread.is_alive() and time.monotonic() < give_up and not any(Journal(environment.notes()).ended.values()):
        thread.join(_LOOK_SECONDS)


def _of_library(mpi: Any) -> Callable[[], object]:
    try:
        found: Callable[[], object] = ctypes.CDLL(mpi.__file__).MPI_Finalize
    except (OSError, AttributeError):  # it has been loaded otherwise
        return mpi.Finalize  # type: ignore[no-any-return]
    return found


def _all_landed() -> bool:
    """Wait for what nobody has waited for; return whether all of it is complete."""
    give_up = time.monotonic() + _LANDING_SECONDS
    try:
        while not all(request.test() for request in list(in_the_air)):
            if time.monotonic() > give_up:
                return False
            time.sleep(0.0005)
    except Exception:  # noqa: BLE001  (of MPI's own, in what was left to it)
        return False
    return True
