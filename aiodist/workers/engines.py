"""Which engine serves a program: what a launcher has started, the local one, or a communicator of the program's own."""

from __future__ import annotations

import os
import sys
from typing import Any

from aiodist._arrays import environment
from aiodist.workers.communicator import Communicator
from aiodist.workers.local import LocalCommunicator
from aiodist.workers.meeting import told_to_the_launcher


def communicator_of(given: Any) -> Communicator:
    """Return the workers that a program names.

    Args:
        given: an engine's communicator, which is the strategy's from then on; one of mpi4py's, which is duplicated;
            None: the default.

    Raises:
        ImportError, RuntimeError: as `default_communicator`.
        TypeError: it is something else.
        ValueError: it is none that this process is in, or one between two groups.
    """
    if given is None:
        return default_communicator()
    if hasattr(given, "iallgatherv"):
        return given  # type: ignore[no-any-return]
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(given, mpi.Comm):
        kind = type(given)
        raise TypeError(
            "communicator must be an mpi4py.MPI.Intracomm, or None for all workers that a launcher has started, got "
            f"{kind.__module__}.{kind.__qualname__}: {given!r}"
        )
    from aiodist.workers.mpi import MpiCommunicator

    found = MpiCommunicator.of_program(given)
    environment.note_worker(os.getpid())
    return found


def default_communicator() -> Communicator:
    """Return the workers that a launcher has started; without one, or with one worker, this process alone.

    Raises:
        ImportError: the library of the engine is not installed.
        RuntimeError: the engine does not know of all of them; a worker has started this process.
        ValueError: an unknown engine.
    """
    expected = environment.launched_workers()
    if expected is None or expected == 1:
        return LocalCommunicator()
    _check_that_this_is_a_worker()
    with told_to_the_launcher():
        found = _of_all(expected, environment.engine_name())
    environment.note_worker(os.getpid())
    return found


def _check_that_this_is_a_worker() -> None:
    """Refuse what a worker has started: it has a worker's variables, and two in one place confuse an engine."""
    worker = environment.noted_worker()
    if worker is not None and worker != os.getpid():
        raise RuntimeError(
            f"this process ({os.getpid()}) was started by a worker of the job (process {worker}), and is none itself; "
            f"if it is to run alone, start it without {', '.join(environment.LAUNCHED)} in its environment"
        )


def _of_all(workers: int, engine: str) -> Communicator:
    if engine == "mpi":
        from aiodist.workers.mpi import MpiCommunicator

        return MpiCommunicator.of_world(workers)
    if engine == "gloo":
        from aiodist.workers.gloo import GlooCommunicator

        return GlooCommunicator.of_job(environment.worker_rank(), workers, environment.rendezvous())
    raise ValueError(f"the engine must be 'mpi' or 'gloo', got {engine!r} in AIODIST_ENGINE")
