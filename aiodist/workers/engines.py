"""Which engine serves a program that names none: what a launcher has started, or the local one."""

from __future__ import annotations

from aiodist.vocabulary import environment
from aiodist.workers.communicator import Communicator
from aiodist.workers.local import LocalCommunicator


def default_communicator() -> Communicator:
    """Return the workers that a launcher has started; without one, or with one worker, this process alone.

    Raises:
        ImportError: the library of the engine is not installed.
        RuntimeError: the engine does not know of all of them.
        ValueError: an unknown engine.
    """
    expected = environment.launched_workers()
    if expected is None or expected == 1:
        return LocalCommunicator()
    engine = environment.engine_name()
    if engine == "mpi":
        from aiodist.workers.mpi import MpiCommunicator

        return MpiCommunicator.of_world(expected)
    if engine == "gloo":
        from aiodist.workers.gloo import GlooCommunicator

        return GlooCommunicator.of_job(environment.worker_rank(), expected, environment.rendezvous())
    raise ValueError(f"the engine must be 'mpi' or 'gloo', got {engine!r} in AIODIST_ENGINE")
