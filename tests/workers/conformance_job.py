"""A program for real workers: each goes through all that a communicator must do, then runs the program of `job`.

python conformance_job.py           prints two digests a worker, the same on all, when everything was right
"""

from __future__ import annotations

import asyncio
import tempfile
import time

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy
from aiodist._arrays import environment
from aiodist.workers.communicator import Communicator
from aiodist.workers.engines import default_communicator
from tests.workers.conformance import CASES, go_through
from tests.workers.job import all_ordered_sums, all_values, say


def connected() -> Communicator:
    """Return the communicator of the engine, also where there is one worker, for which the local engine would do."""
    if environment.launched_workers() != 1:
        return default_communicator()
    if environment.engine_name() == "mpi":
        from aiodist.workers.mpi import MpiCommunicator

        return MpiCommunicator.of_world(1)
    from aiodist.workers.gloo import GlooCommunicator

    return GlooCommunicator.of_job(0, 1, f"{tempfile.mkdtemp()}/rendezvous")


def main() -> None:
    """Go through everything."""
    communicator = connected()
    begun = time.perf_counter()
    for case in CASES:
        go_through(case, communicator)
    say(f"{communicator.engine} conforms in {time.perf_counter() - begun:.2f} s")
    options = CommunicationOptions(timeout_seconds=30)
    strategy = MultiWorkerMirroredStrategy(duplicate(communicator), ["CPU:0", "CPU:1"], communication_options=options)
    say(f"digest {asyncio.run(all_values(strategy))}")
    say(f"ordered {all_ordered_sums(duplicate(communicator), 4 // communicator.size)}")


def duplicate(communicator: Communicator) -> Communicator:
    """Return another communicator of the same workers."""
    duplication = communicator.idup()
    communicator.wait(duplication)
    return duplication.result()


if __name__ == "__main__":
    main()
