"""Which engine serves a program that names none: what a launcher has started, or the local one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
    with _meeting_is_noted():
        return _of_all(expected, environment.engine_name())


def _of_all(workers: int, engine: str) -> Communicator:
    if engine == "mpi":
        from aiodist.workers.mpi import MpiCommunicator

        return MpiCommunicator.of_world(workers)
    if engine == "gloo":
        from aiodist.workers.gloo import GlooCommunicator

        return GlooCommunicator.of_job(environment.worker_rank(), workers, environment.rendezvous())
    raise ValueError(f"the engine must be 'mpi' or 'gloo', got {engine!r} in AIODIST_ENGINE")


@contextmanager
def _meeting_is_noted() -> Iterator[None]:
    """Leave a note that this worker waits for the others, and then that they have met.

    An engine that waits for a worker that has ended already does so in its own code, and tells nobody: `aiodist run`
    sees it by these notes.
    """
    folder = environment.notes()
    if folder is None:
        yield
        return
    from pathlib import Path  # only a launcher's workers need it

    note = Path(folder, f"meeting.{os.getpid()}")
    with suppress(OSError):  # on another machine than the launcher's there is no such folder
        note.touch()
    try:
        yield
    except BaseException:
        with suppress(OSError):
            note.unlink()
        raise
    with suppress(OSError):
        note.rename(note.with_name(f"met.{os.getpid()}"))
