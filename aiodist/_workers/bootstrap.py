"""Bootstrap: the rendezvous of a strategy's workers.

The constructor of a strategy blocks until all workers have arrived. Workers simulated in one thread cannot block, so
these meet at the first use.

The launcher of the program determines the engine. A launcher that is not understood is an error, rather than many jobs
of one worker: if the sizes differ, the error says what was started, what the engine sees, and what to type.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from sys import _getframe
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._arrays.environment import TORCHRUN, Launched
from aiodist._core.call import OrderCheck
from aiodist._core.text import shown_file
from aiodist._runtime.stacks import place_of, program_frame
from aiodist._workers.admission import Address, Listener
from aiodist._workers.control import TcpControl
from aiodist._workers.engines.simulated import SimulatedCommunicator, alone
from aiodist._workers.exchange import gather_objects
from aiodist._workers.journal import Journal, noted_rendezvous
from aiodist._workers.layout import Hello, layout_of
from aiodist._workers.team import Team, warn_of_stall
from aiodist._workers.transport import Communicator, Steps, T

RENDEZVOUS_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.0005
_LOOK_SECONDS: Final = 1.0


def rendezvous(
    given: Any, devices: Sequence[str], order_check: OrderCheck, *, ordered: bool
) -> tuple[Communicator, Team | None]:
    """Meet the other workers; return their communicator, and this worker's `Team`.

    ``given`` is a communicator of mpi4py or of an engine; None means all workers that a launcher has started. The team
    is None for simulated workers, until `in_one_thread`.
    """
    launched = environment.launched()
    communicator: Communicator = given
    if not hasattr(given, "iallgatherv"):
        worker = "worker 0 of 1" if launched is None else f"worker {launched.rank} of {launched.workers}"
        folder = environment.journal_folder() if given is None else None
        with noted_rendezvous():
            communicator = _wait_for(communicator_of(given, launched), worker, folder)
        if given is None:
            check(communicator, launched)
    hello = Hello.of_this_process(devices, order_check, "ordered" if ordered else "fast")
    make = partial(Team, order_check=order_check, ordered=ordered)
    if not isinstance(communicator, SimulatedCommunicator):
        return communicator, _meet(communicator, hello, make)
    communicator.cluster.introductions[communicator.rank] = hello, make
    return communicator, None


def in_one_thread(communicator: Communicator) -> Team:
    """Return the `Team` of a simulated worker. The first call connects all, which have made their strategies."""
    assert isinstance(communicator, SimulatedCommunicator)
    cluster = communicator.cluster
    if not cluster.teams:
        cluster.connect()
    return cluster.teams[communicator.rank]


def _meet(communicator: Communicator, hello: Hello, make: Callable[..., Team]) -> Team:
    """Meet workers in other processes, and connect this one: worker 0 to all others, any other to worker 0."""
    rank, worker = communicator.rank, f"worker {communicator.rank} of {communicator.size}"
    hellos: list[Hello] = _wait_for(gather_objects(communicator, hello), worker)
    layout = layout_of(hellos).seen_from(rank)
    listener: Listener | None = None
    own: Address | str | None = None
    if rank == 0:
        try:
            listener = Listener(hellos)
            own = listener.address
        except OSError as error:
            own = str(error)  # which all raise
    address = _wait_for(gather_objects(communicator, own), worker)[0]
    if isinstance(address, str):
        raise ConnectionError(address)
    return make(layout, communicator, partial(TcpControl, hellos=hellos, endpoint=listener or address))


# Which engine.


_TO_TYPE: Final = {
    "srun": "srun --mpi=pmi2 for MPICH and srun --mpi=pmix for Open MPI (`srun --mpi=list` shows what there is), or "
    "inside of salloc `mpiexec -n {workers} python program.py`",
    TORCHRUN: "torchrun --nproc-per-node={workers} program.py",
}
_MPIEXEC: Final = "`aiodist run -n {workers} program.py`, which finds the mpiexec of the MPI that mpi4py uses"


def communicator_of(given: Any, launched: Launched | None) -> Steps[Communicator]:
    """Make the communicator of a strategy's workers."""
    mpi = sys.modules.get("mpi4py.MPI")
    if given is not None and (mpi is None or not isinstance(given, mpi.Comm)):
        kind = type(given)
        raise TypeError(
            "communicator must be an mpi4py.MPI.Intracomm, or None for all workers that a launcher has started, got "
            f"{kind.__module__}.{kind.__qualname__}: {given!r}"
        )
    if given is None and (launched is None or launched.workers <= 1):
        if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
            return alone()
        given = mpi.COMM_WORLD  # the program's own MPI may know of others
    if given is None and launched is not None and launched.by == TORCHRUN:
        from aiodist._workers.engines.torch import TorchCommunicator

        return (yield from TorchCommunicator.of_world())
    from aiodist._workers.engines.mpi import MpiCommunicator

    return (yield from (MpiCommunicator.of_world() if given is None else MpiCommunicator.of_program(given)))


def check(found: Communicator, launched: Launched | None) -> None:
    """Raise an error if the engine does not see what was started, or ``TF_CONFIG`` says otherwise."""
    if launched is not None and launched.workers > 1 and found.size != launched.workers:
        to_type = _TO_TYPE.get(launched.by, _MPIEXEC).format(workers=launched.workers)
        raise RuntimeError(
            f"{launched.by} has started {launched.workers} workers ({launched.variable}), and {found.library} knows of "
            f"{found.size}: launcher and library do not match. Type {to_type}"
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


def _wait_for(steps: Steps[T], worker: str, folder: str | None = None) -> T:
    """Block until the steps of a rendezvous are done; warn once if that takes long.

    ``folder`` has the job's journal if all its workers must arrive. If the journal says that one of them has ended, and
    a second later nothing more has come from it, none will.
    """
    begun = time.monotonic()
    warn_after = environment.stall_seconds() or RENDEZVOUS_SECONDS
    look_after, over = 0.0, set[int]()
    try:
        while True:
            request = next(steps)
            while not request.test():
                waited = time.monotonic() - begun
                if waited > RENDEZVOUS_SECONDS:
                    raise TimeoutError(
                        f"{worker} has waited {RENDEZVOUS_SECONDS:.0f} s for the others to make their "
                        "MultiWorkerMirroredStrategy; every worker must run the same program"
                    )
                if folder and waited >= look_after:
                    journal, look_after = Journal(folder), waited + _LOOK_SECONDS
                    if over & journal.over:
                        raise RuntimeError(
                            f"{worker} makes a MultiWorkerMirroredStrategy, and others have ended without making theirs"
                            f"{journal.missing()}; every worker must run the same program"
                        )
                    over = journal.over
                if waited >= warn_after:
                    warn_after = 2 * RENDEZVOUS_SECONDS
                    _warn_of_absent(worker, waited, Journal(folder).missing() if folder else "")
                time.sleep(_POLL_SECONDS)
    except StopIteration as end:
        result: T = end.value
        return result


def _warn_of_absent(worker: str, waited: float, missing: str) -> None:
    frame = _getframe()
    here = place_of(program_frame(frame) or frame)
    warn_of_stall(
        f"{worker} has waited {waited:.3g} s to make a strategy at {shown_file(here.file)}:{here.line}, which every "
        f"worker must make{missing} (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
        here.file,
        here.line,
    )
