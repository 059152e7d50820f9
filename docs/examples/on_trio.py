"""Training under trio: a nursery, a deadline for the run, and a task that reports meanwhile.

    python docs/examples/on_trio.py

Replicas are tasks of a nursery that `run` opens and closes. Put a deadline around the run, not around one replica's
collective: then all replicas are cancelled together, the strategy is unaffected, and the next run works.
"""

from __future__ import annotations

import sys

import numpy as np

import aiodist

try:
    import trio
except ImportError:
    print("on_trio.py needs trio, which is not installed: pip install trio")
    sys.exit()


async def train(steps: int, seconds: float, third: trio.Event) -> float:
    """Train a weight towards 3 in a replica; each step takes `seconds`."""
    ctx = aiodist.get_replica_context()
    weight = 0.0
    for number in range(1, steps + 1):
        await trio.sleep(seconds)  # load a batch
        weight -= 0.5 * await ctx.all_reduce("MEAN", weight - 3.0 - 0.1 * ctx.replica_id_in_sync_group)
        if number == 3:
            third.set()
    return weight


async def report(third: trio.Event) -> None:
    """Print a line once three steps are done."""
    await third.wait()
    print("three steps are done, and this task runs alongside the replicas")


async def main() -> None:
    strategy = aiodist.MirroredStrategy([f"CPU:{k}" for k in range(4)])
    with trio.move_on_after(0.05) as deadline:
        await strategy.run(train, args=(100, 1.0, trio.Event()))
    print(f"the first run was cancelled by its deadline: {deadline.cancelled_caught}")
    third = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(report, third)
        weights = await strategy.run(train, args=(20, 0.002, third))
    print(f"the second ended with {np.round(strategy.experimental_local_results(weights), 3).tolist()}")


if __name__ == "__main__":
    trio.run(main)
