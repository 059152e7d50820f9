"""A program whose last worker makes a strategy before the others do, catches the error, and goes on with them."""

from __future__ import annotations

import asyncio

from aiodist import DeadlockError, MultiWorkerMirroredStrategy, get_replica_context
from tests.workers.job import say


async def replica() -> int:
    """Meet the others."""
    return int(await get_replica_context().all_reduce("SUM", 1))


def main() -> None:
    """Do that."""
    first = MultiWorkerMirroredStrategy()
    asyncio.run(first.run(replica))
    rank = first._span[0]
    if rank > 0:
        try:
            MultiWorkerMirroredStrategy()
        except DeadlockError as error:
            say(f"worker {rank} caught: {error}")
    asyncio.run(first.run(replica))
    second = MultiWorkerMirroredStrategy()
    assert asyncio.run(second.run(replica)) == asyncio.run(first.run(replica))
    say(f"worker {rank} goes on with both")


if __name__ == "__main__":
    main()
