"""A program for real workers: each goes through all that a communicator must do, then runs the program of `job`.

python conformance_job.py           prints two digests a worker, the same on all, when everything was right
"""

from __future__ import annotations

import asyncio
import importlib
import time

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy
from aiodist._arrays import environment
from aiodist._workers.transport import Communicator, Steps
from tests.workers.conformance import CASES, go_through, wait
from tests.workers.job import all_ordered_sums, all_values, say


def connected() -> Communicator:
    """Return the communicator of the engine, also where there is one worker, for which the local engine would do."""
    launched = environment.launched()
    torch = launched is not None and launched.by == environment.TORCHRUN
    engine = importlib.import_module(f"aiodist._workers.engines.{'torch' if torch else 'mpi'}")
    return made((engine.TorchCommunicator if torch else engine.MpiCommunicator).of_world())


def made(steps: Steps[Communicator]) -> Communicator:
    """Return a communicator, when it is made."""
    try:
        while True:
            wait(next(steps))
    except StopIteration as end:
        found: Communicator = end.value
        return found


def main() -> None:
    """Go through everything."""
    communicator = connected()
    begun = time.perf_counter()
    for case in CASES:
        go_through(case, communicator)
    say(f"{communicator.engine} conforms in {time.perf_counter() - begun:.2f} s")
    options = CommunicationOptions(timeout_seconds=30)
    strategy = MultiWorkerMirroredStrategy(["CPU:0", "CPU:1"], duplicate(communicator), communication_options=options)
    say(f"digest {asyncio.run(all_values(strategy))}")
    say(f"ordered {all_ordered_sums(duplicate(communicator), 4 // communicator.size)}")


def duplicate(communicator: Communicator) -> Communicator:
    """Return another communicator of the same workers."""
    making = communicator.idup()
    wait(making)
    return making.result()


if __name__ == "__main__":
    main()
