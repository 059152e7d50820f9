"""Bootstrap: the rendezvous of a strategy's workers.

The constructor of a strategy blocks until all workers have come; where those are simulated in one thread, the first use
does. Each says what it has (`Hello`).

What has started a program decides which engine serves it. A launcher that is not understood is an error, never so
many jobs of one worker: where the sizes differ, it says what was started, what the engine sees, and what to type.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from sys import _getframe
from types import FrameType
from typing import Any, Final

from aiodist._arrays import environment
from aiodist._arrays.environment import TORCHRUN, Launched
from aiodist._core.call import place
from aiodist._core.report import Location
from aiodist._core.text import shown_file
from aiodist._workers.control import TcpControl
from aiodist._workers.ending import missing_workers, told_to_the_launcher
from aiodist._workers.engines.simulated import SimulatedCluster, SimulatedCommunicator, alone
from aiodist._workers.exchange import gather_texts
from aiodist._workers.handshake import Address, Door, connect, failure
from aiodist._workers.layout import Hello, Layout, check_versions
from aiodist._workers.simulated_control import SimulatedControl, SimulatedSwitchboard
from aiodist._workers.team import Settings, Team, warn_of_stall
from aiodist._workers.transport import Communicator, Request, Steps, T

RENDEZVOUS_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.0005
_OURS: Final = ("aiodist._workers", "aiodist._strategy")


class WorkerRendezvous:
    """The rendezvous of a strategy's workers.

    Args:
        given: the workers: one of mpi4py's communicators; an engine's; None for all that a launcher has started.
        devices: this worker's replicas' devices.
        settings: what all workers have in common.
    """

    def __init__(self, given: Any, devices: Sequence[str], settings: Settings) -> None:
        self._settings = settings
        if hasattr(given, "iallgatherv"):
            self.communicator: Communicator = given
        else:
            with told_to_the_launcher():
                self.communicator = _communicator(given)
        hello = Hello.of_this_process(devices, _place_of_making()).to_bytes()
        self._found: tuple[Team, Sequence[Hello]] | None = None
        if isinstance(self.communicator, SimulatedCommunicator):
            self.communicator.cluster.met[self.communicator.rank] = hello, settings
        else:
            self._found = self._among_processes(hello)

    @property
    def is_in_one_thread(self) -> bool:
        """Whether all workers are in this thread, so that none may wait for others before all have been made."""
        return isinstance(self.communicator, SimulatedCommunicator)

    @property
    def team(self) -> Team:
        """This worker's part in the strategy."""
        return self._all()[0]

    @property
    def hellos(self) -> Sequence[Hello]:
        """What each worker has said of itself, by rank."""
        return self._all()[1]

    def _all(self) -> tuple[Team, Sequence[Hello]]:
        if self._found is None:
            self._found = self._in_one_thread()
        return self._found

    def _in_one_thread(self) -> tuple[Team, Sequence[Hello]]:
        communicator = self.communicator
        assert isinstance(communicator, SimulatedCommunicator)
        if len(communicator.cluster.met) < communicator.size:
            raise RuntimeError(
                f"worker {communicator.rank} of {communicator.size} simulated ones waits for others that have not "
                "got this far: make the strategies of all of them first"
            )
        hellos, switchboard = communicator.cluster.shared("teams", partial(_simulated, communicator.cluster))
        return switchboard.teams[communicator.rank], hellos

    def _among_processes(self, hello: bytes) -> tuple[Team, Sequence[Hello]]:
        """Meet the other workers, and connect this one: worker 0 to all others, these to worker 0."""
        communicator = self.communicator
        rank, size = communicator.rank, communicator.size
        hellos, layout = _understood(_blocking(gather_texts(communicator, hello), rank, size))
        check_versions(hellos)
        layout = layout.seen_from(rank)
        door, told = None, b""
        if rank == 0:
            try:
                door = Door(hellos)
                told = door.address.to_bytes()
            except OSError as error:
                told = failure(error)  # for everybody to raise
        address = Address.from_bytes(bytes(_blocking(gather_texts(communicator, told), rank, size)[0]))
        connections = door.admit_all() if door else {0: connect(address, rank)}
        connected = partial(TcpControl, hellos=hellos, connections=connections)
        return Team(layout, self._settings, communicator, connected), hellos


def _simulated(cluster: SimulatedCluster) -> tuple[Sequence[Hello], SimulatedSwitchboard]:
    """Return what simulated workers say of themselves, and what connects their teams."""
    told = [cluster.met[rank] for rank in range(len(cluster.communicators))]
    hellos, layout = _understood([hello for hello, _ in told])
    switchboard = SimulatedSwitchboard(layout, cluster.answer_seconds)
    for communicator, (_, settings) in zip(cluster.communicators, told, strict=True):
        own = layout.seen_from(communicator.rank)
        switchboard.teams.append(Team(own, settings, communicator, partial(SimulatedControl, switchboard)))
    return hellos, switchboard


def _understood(told: Sequence[Any]) -> tuple[Sequence[Hello], Layout]:
    """Return what each worker says of itself, by rank, and the layout that this makes, as worker 0 sees it."""
    hellos = [Hello.from_bytes(bytes(each)) for each in told]
    return hellos, Layout(0, [hello.devices for hello in hellos])


def _communicator(given: Any) -> Communicator:
    """Return the communicator of the workers, when all have come."""
    launched = environment.launched()
    rank, size = (launched.rank, launched.workers) if launched is not None else (0, 1)
    found = _blocking(communicator_of(given), rank, size)
    environment.note_worker(os.getpid())
    return found


# Which engine.


_TO_TYPE: Final = {
    "srun": "srun --mpi=pmi2 for MPICH and srun --mpi=pmix for Open MPI (`srun --mpi=list` shows what there is), or "
    "inside of salloc `mpiexec -n {workers} python program.py`",
    TORCHRUN: "torchrun --nproc-per-node={workers} program.py",
}
_MPIEXEC: Final = "`aiodist run -n {workers} program.py`, which finds the mpiexec of the MPI that mpi4py uses"


def communicator_of(given: Any) -> Steps[Communicator]:
    """Make the communicator of a strategy's workers."""
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
    """Compare what was started with what the engine sees, and with ``TF_CONFIG``."""
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


# Waiting, in the constructor.


def _blocking(steps: Steps[T], rank: int, size: int) -> T:
    try:
        while True:
            _wait(next(steps), rank, size)
    except StopIteration as end:
        found: T = end.value
        return found


def _wait(request: Request, rank: int, size: int) -> None:
    """Block until a request of the rendezvous is complete; warn once meanwhile."""
    begun = time.monotonic()
    warn_at = begun + (environment.stall_seconds() or RENDEZVOUS_SECONDS)
    while not request.test():
        now = time.monotonic()
        if now > begun + RENDEZVOUS_SECONDS:
            at = _place_of_making()
            raise TimeoutError(
                f"worker {rank} of {size} has waited {RENDEZVOUS_SECONDS:.0f} s for the others to make their "
                f"MultiWorkerMirroredStrategy{f' at {at}' if at else ''}; every worker must run the same program"
            )
        here = _constructor() if now >= warn_at else None
        if here is not None:
            warn_at = begun + 2 * RENDEZVOUS_SECONDS
            warn_of_stall(
                f"worker {rank} of {size} has waited {now - begun:.3g} s to make a strategy at {_shown(here)}, which "
                f"every worker is to make{missing_workers()} (AIODIST_STALL_SECONDS sets the time, 0 turns this off)",
                here.file,
                here.line,
            )
        time.sleep(_POLL_SECONDS)


def _place_of_making() -> str:
    """Return where a strategy is being made, file and line, as text."""
    here = _constructor()
    return "" if here is None else _shown(here)


def _shown(at: Location) -> str:
    return f"{shown_file(at.file)}:{at.line}"


def _constructor() -> Location | None:
    """Return where a strategy is being made; None where no frame of a program's is."""
    frame: FrameType | None = _getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return None if frame is None else place(frame.f_code, frame.f_lasti).location
