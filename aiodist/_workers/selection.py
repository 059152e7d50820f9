"""Selection: which engine serves a program, by what has started it.

A launcher that is not understood is an error, never so many jobs of one worker: where the sizes differ, it says what
was started, what the engine sees, and what to type.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._arrays.environment import TORCHRUN, Launched
from aiodist._workers.engines.simulated import alone
from aiodist._workers.transport import Communicator, Steps

_TO_TYPE: Final = {
    "srun": "srun --mpi=pmi2 for MPICH and srun --mpi=pmix for Open MPI (`srun --mpi=list` shows what there is), or "
    "inside of salloc `mpiexec -n {workers} python program.py`",
    TORCHRUN: "torchrun --nproc-per-node={workers} program.py",
}
_MPIEXEC: Final = "`aiodist run -n {workers} program.py`, which finds the mpiexec of the MPI that mpi4py uses"


def communicator_of(given: Any) -> Steps[Communicator]:
    """Make the communicator of a strategy's workers.

    Args:
        given: one of mpi4py's communicators; None for the workers that a launcher has started.

    Raises:
        ImportError: the library of the engine is not installed.
        RuntimeError: the engine does not know of all workers; a worker has started this process.
        TypeError: ``given`` is no communicator.
        ValueError: it is none that this process is in, or one between two groups; ``TF_CONFIG`` is misspelled.
    """
    if given is None:
        return (yield from _of_launcher())
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(given, mpi.Comm):
        kind = type(given)
        raise TypeError(
            "communicator must be an mpi4py.MPI.Intracomm, or None for all workers that a launcher has started, got "
            f"{kind.__module__}.{kind.__qualname__}: {given!r}"
        )
    from aiodist._workers.engines.mpi import MpiCommunicator

    return (yield from MpiCommunicator.of_program(given))


def _of_launcher() -> Steps[Communicator]:
    launched = environment.launched()
    worker = environment.noted_worker()
    if launched is None or launched.workers == 1:
        found = yield from _alone()
    elif worker is not None and worker != os.getpid():  # it has a worker's variables, and two would confuse an engine
        raise RuntimeError(
            f"this process ({os.getpid()}) was started by a worker of the job (process {worker}), and is none itself; "
            f"if it is to run alone, start it without {launched.variable} in its environment"
        )
    elif launched.by == TORCHRUN:
        from aiodist._workers.engines.torch import TorchCommunicator

        found = yield from TorchCommunicator.of_world()
    else:
        from aiodist._workers.engines.mpi import MpiCommunicator

        found = yield from MpiCommunicator.of_world()
    check(found, launched)
    return found


def _alone() -> Steps[Communicator]:
    """Return a communicator of this process, unless the program's own MPI knows of others."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        from aiodist._workers.engines.mpi import MpiCommunicator

        return (yield from MpiCommunicator.of_program(mpi.COMM_WORLD))
    return alone()


def check(found: Communicator, launched: Launched | None) -> None:
    """Compare what was started with what the engine sees, and with ``TF_CONFIG``.

    Raises:
        RuntimeError: they differ.
        ValueError: ``TF_CONFIG`` is misspelled.
    """
    if launched is not None and launched.workers > 1 and found.size != launched.workers:
        to_type = _TO_TYPE.get(launched.by, _MPIEXEC).format(workers=launched.workers)
        raise RuntimeError(
            f"{launched.by} has started {launched.workers} workers ({launched.variable}), and {found.library} knows of "
            f"{found.size}: launcher and library do not belong together. Type {to_type}"
        )
    config = environment.tf_config()
    if config is None:
        return
    by = f"{launched.by} has started {found.size}" if launched is not None else "no launcher has started this process"
    if config.workers != found.size:
        raise RuntimeError(
            f"TF_CONFIG names a cluster of {config.workers} workers, and {by}. TF_CONFIG starts nothing: on one "
            f"machine type `aiodist run -n {config.workers} program.py`, on several `mpiexec -n {config.workers} "
            "--host HOST,HOST,... python program.py`; or unset it"
        )
    if config.rank != found.rank:
        raise RuntimeError(
            f"TF_CONFIG says that this process is worker {config.rank}, {config.task_type} {config.task_id}, and the "
            f"launcher that it is worker {found.rank}; give every process its own TF_CONFIG, or unset it"
        )
