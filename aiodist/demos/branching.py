"""The program of `demo mismatch`: replicas pull one guess towards their samples, and stop when it is good enough."""

from __future__ import annotations

import numpy as np

import aiodist

SAMPLES = (3.0, 5.0, 2.7, 4.0)


async def learn(limit: float) -> float:
    """Return a guess near the samples' mean. This program is wrong, on purpose."""
    ctx = aiodist.get_replica_context()
    sample = SAMPLES[ctx.replica_id_in_sync_group]
    guess = np.zeros(1)
    for _ in range(20):
        error = sample - guess
        if abs(error[0]) < limit:  # its own error: the other replicas have others
            await ctx.barrier()
            break
        guess = guess + 0.5 * await ctx.all_reduce(aiodist.ReduceOp.MEAN, error)
    return float(guess[0])


async def learn_together(limit: float) -> float:
    """Return the same guess. The condition is reduced first, so that all replicas take the same branch."""
    ctx = aiodist.get_replica_context()
    sample = SAMPLES[ctx.replica_id_in_sync_group]
    guess = np.zeros(1)
    for _ in range(20):
        error = await ctx.all_reduce(aiodist.ReduceOp.MEAN, sample - guess)
        if abs(error[0]) < limit:
            await ctx.barrier()
            break
        guess = guess + 0.5 * error
    return float(guess[0])
