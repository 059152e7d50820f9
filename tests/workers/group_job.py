"""A program for three real workers: groups and joins in one run, then two groups in opposite order."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import aiodist
from aiodist import DeadlockError, MultiWorkerMirroredStrategy
from aiodist._strategy.scope import replicas_of


def say(line: str) -> None:
    """Print a line in one piece."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def groups_and_joins() -> str:
    """Return what pairs, overlapping groups and uneven loops give."""
    ctx = aiodist.get_replica_context()
    me, n = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    found = []
    for step in range(3):
        pairs = [(a, b) for a in range(n) for b in range(a) if me in (a, b)]
        groups = [ctx.new_group(pair, f"{pair}") for pair in pairs]
        handles = [group.all_reduce("SUM", np.full(100_000, 10**me + step)) for group in groups]
        found += [int((await handle)[-1]) for handle in handles]
    half = ctx.new_group(range(me % 2, n, 2))
    found += [await half.all_reduce("SUM", 10**me) for _ in range(me // 2 + 1)]
    found.append(await half.join())
    found += [int((await ctx.all_reduce("SUM", np.full(50_000, 1)))[-1]) for _ in range(me)]
    found.append(await ctx.join())
    return str(found)


async def opposite() -> None:
    """Use two groups in another order on the first replica."""
    ctx = aiodist.get_replica_context()
    groups = (
        [ctx.new_group([0, 5], name) for name in ("rows", "columns")] if ctx.replica_id_in_sync_group % 5 == 0 else []
    )
    for group in groups[:: 1 if ctx.replica_id_in_sync_group else -1]:
        await group.barrier()
    await ctx.barrier()


async def main() -> None:
    """Print what both runs give."""
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0", "CPU:1"])
    results = strategy.experimental_local_results(await strategy.run(groups_and_joins))
    for place, result in enumerate(results):
        say(f"replica {replicas_of(strategy).share.mine.start + place}: {result}")
    try:
        await strategy.run(opposite)
    except DeadlockError as error:
        say(f"circle {str(error).splitlines()[0]}")
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0", "CPU:1"])
    say(f"again {strategy.experimental_local_results(await strategy.run(again))[0]}")


async def again() -> np.ndarray:
    """Show that another strategy works."""
    return np.asarray(await aiodist.get_replica_context().all_reduce("SUM", np.ones(1)))


if __name__ == "__main__":
    asyncio.run(main())
