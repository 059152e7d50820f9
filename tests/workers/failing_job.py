"""A program for several real workers, where calls fail on the last one, or on all, before their records are brought.

It prints what each worker's replica has found, or raises.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio
import numpy as np

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, get_replica_context
from aiodist.collective.signature import KIND
from aiodist.replica.carrying import Carrier
from tests.workers.job import say


class Planning:
    """What finds out how a call is carried out, where it lacks memory or not."""

    def __init__(self) -> None:
        self.planned = self.fails = False
        self._of = Carrier._planned
        planning = self

        def of(carrier: Carrier, meeting: Any) -> Any:
            if planning.fails and meeting.signature[KIND].name.endswith("gather"):
                raise MemoryError("no room")
            return planning._of(carrier, meeting)

        setattr(Carrier, "_planned", of)  # noqa: B010  (which no type checker takes for an error)


async def main() -> None:
    """Fail in every way, each with a strategy of its own."""
    options = CommunicationOptions(timeout_seconds=20.0)
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"], communication_options=options)
    rank, workers = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    planning = Planning()

    async def catches() -> Any:
        ctx = get_replica_context()
        found: list[Any] = []
        for step in range(3):
            await ctx.barrier()
            planning.fails = step == 1 and planning.planned
            try:
                found.append((await ctx.all_gather(np.array([10 * step + rank]), 0)).tolist())
            except MemoryError:
                found.append(None)
            planning.fails = False
        return repr(found)

    async def does_not() -> None:
        planning.fails = planning.planned
        await get_replica_context().all_gather(np.ones(2), 0)

    async def gathers(strategy: MultiWorkerMirroredStrategy) -> Any:
        planning.fails = planning.planned
        return (await strategy.gather(np.ones(2), 0)).tolist()

    for where, planning.planned in (("one", rank == workers - 1), ("all", True), ("none", False)):
        for name, operation in (
            ("catches", lambda strategy: strategy.run(catches)),
            ("raises", lambda strategy: strategy.run(does_not)),
            ("gathers", gathers),
        ):
            before = strategy
            strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"], communication_options=options)
            before.close()  # now that all have come through what they did with it
            try:
                told = repr(await operation(strategy))
            except (RuntimeError, MemoryError) as error:
                told = f"{type(error).__name__}: {error}".partition("\n")[0]
            planning.fails = False
            say(f"{where} {name} {rank}: {told}")


if __name__ == "__main__":
    anyio.run(main, backend=sys.argv[1])
