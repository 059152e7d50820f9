"""The end of MPI, with that of the process.

`MPI_Finalize` waits until all workers call it. With a worker dead it would wait for ever, so it is left out. A worker
may also fail when this one is in it already: where the launcher's notes tell of such things, this process then ends
with its own exit code instead of being killed. Where operations in the air will never match, after a mismatch that the
program has caught, it may wait, too, though MPICH's and Open MPI's have never done so: it is given some seconds.

So a thread calls it. mpi4py's own function keeps the interpreter lock meanwhile, with which nobody could look at
anything else: the library's is called.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from aiodist._workers.launcher import another_has_failed, has_a_launcher, last_error, tell_of_leaving, tell_of_memory
from aiodist._workers.transport import Request

in_the_air: Final[deque[Request]] = deque()
"""Requests that nobody waits for any more; they keep the buffers that the engine may still read and write."""

unfinished: Final[list[str]] = []
"""What stands against an orderly end: of each strategy that has ended in trouble, why."""

WORKER_LOST: Final = "a worker is lost"
_LANDING_SECONDS: Final = 1.0
_DOUBTFUL_SECONDS: Final = 8.0
_LOOK_SECONDS: Final = 0.1


def finalise(mpi: Any, worker: int) -> None:
    """Bring MPI to its end, at that of the process, as far as it can be."""
    if os.getpid() != worker:  # a child that the program has forked ends by itself
        return
    if mpi.Is_finalized():
        return
    if last_error() is not None or WORKER_LOST in unfinished:
        tell_of_memory()
        return
    tell_of_leaving()
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
    while thread.is_alive() and time.monotonic() < give_up and not another_has_failed():
        thread.join(_LOOK_SECONDS)
    if thread.is_alive():
        tell_of_memory()


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
