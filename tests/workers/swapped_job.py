"""A program whose last worker makes two strategies in another order, uses them in another one, and goes on."""

from __future__ import annotations

import asyncio

from aiodist import DeadlockError, MultiWorkerMirroredStrategy, get_replica_context
from tests.workers.job import say


async def replica() -> int:
    """Meet the others."""
    return int(await get_replica_context().all_reduce("SUM", 1))


def use(rank: int, *strategies: MultiWorkerMirroredStrategy) -> None:
    """Use strategies, and say what comes of it."""
    told = set()
    for strategy in strategies:
        try:
            asyncio.run(strategy.run(replica))
        except DeadlockError as error:
            told.add(str(error))
    for text in told:
        say(f"worker {rank} caught: {text}")


def main() -> None:
    """Do that."""
    worlds = MultiWorkerMirroredStrategy()
    rank = worlds._span[0]
    if rank == 0:
        one = MultiWorkerMirroredStrategy()
        other = MultiWorkerMirroredStrategy()
    else:
        other = MultiWorkerMirroredStrategy()
        one = MultiWorkerMirroredStrategy()
    use(rank, one, other)
    first, second = (one, other) if rank == 0 else (other, one)
    use(rank, *((worlds, second) if rank == 0 else (second, worlds)))
    for strategy in (worlds, first, second):
        assert asyncio.run(strategy.run(replica)) == 2
    say(f"worker {rank} goes on with both")


if __name__ == "__main__":
    main()
