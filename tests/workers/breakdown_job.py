"""A program for several real workers, the last of which lacks memory for a result: inside of a run, and outside.

It prints what each worker raises and how long that takes, and that what follows is right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np

from aiodist import CommunicationOptions, MultiWorkerMirroredStrategy, ReplicaContext, get_replica_context
from aiodist_kernels.pool import Pool

SIZE = 300_000  # three segments of float64
Operation = Callable[[MultiWorkerMirroredStrategy], Awaitable[Any]]


def say(line: str) -> None:
    """Print a line in one piece: other workers print at the same moment."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Memory:
    """Memory, which can be made to lack from now on."""

    def __init__(self) -> None:
        self.lacks = False
        self._empty = Pool.empty
        memory = self

        def empty(pool: Pool, *what: Any, **how: Any) -> Any:
            if memory.lacks:
                raise MemoryError("no room")
            return memory._empty(pool, *what, **how)

        setattr(Pool, "empty", empty)  # noqa: B010  (which no type checker takes for an error)


async def total(ctx: ReplicaContext, size: int = SIZE) -> float:
    """Return the sum of ones over all replicas, of which every element is the same."""
    found = await ctx.all_reduce("SUM", np.ones(size))
    assert (found == ctx.num_replicas_in_sync).all()
    return float(found[0])


async def attempt(strategy: MultiWorkerMirroredStrategy, memory: Memory, name: str, operation: Operation) -> None:
    """Let an operation fail on the last worker, and look at the next one."""
    rank, workers = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    memory.lacks = rank == workers - 1
    begun = time.monotonic()
    try:
        await operation(strategy)
        say(f"{name} {rank}: nothing was raised")
    except (RuntimeError, MemoryError) as error:
        took = time.monotonic() - begun
        soon = "soon" if took < 5.0 else f"{took:.1f} s"  # long before the time-out, also where a machine is busy
        text = str(error).partition("\n")[0]
        say(f"{name} {rank} {soon}: {type(error).__name__}: {text} <- {error.__cause__!r}")
    memory.lacks = False
    after = strategy.experimental_local_results(await strategy.run(lambda: total(get_replica_context())))
    one = await strategy.reduce("SUM", np.ones(SIZE), None)
    say(f"{name} {rank} after: {after[0]} {one[0]}")


async def main(verify: str) -> None:
    """Fail in every way."""
    options = CommunicationOptions(verify=verify, timeout_seconds=20.0)
    strategy = MultiWorkerMirroredStrategy(devices=["CPU:0"], communication_options=options)
    memory = Memory()

    async def in_the_midst() -> None:
        ctx = get_replica_context()
        for _ in range(3):
            await total(ctx, 10)
        await total(ctx)

    async def in_a_group() -> None:
        ctx = get_replica_context()
        group = ctx.new_group(range(ctx.num_replicas_in_sync), "all")
        await total(group)

    await attempt(strategy, memory, "run", lambda strategy: strategy.run(in_the_midst))
    await attempt(strategy, memory, "group", lambda strategy: strategy.run(in_a_group))
    await attempt(strategy, memory, "reduce", lambda strategy: strategy.reduce("SUM", np.ones(SIZE), None))


if __name__ == "__main__":
    anyio.run(main, sys.argv[2], backend=sys.argv[1])
