"""Checkpoints, resuming and early stopping.

    python docs/examples/checkpoints.py

The state of a job (weights, step, and whatever decides when to stop) is saved between two calls of `run`, when no
replica is running. A job that was interrupted and resumed ends with the same bits as one that was not. Early stopping
needs no vote here, because its loss is the same number on all replicas.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np

import aiodist

REPLICAS, PATIENCE, STEPS = 3, 5, 400
RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((240, 8))
TARGETS = INPUTS @ RNG.standard_normal(8) + RNG.standard_normal(240)
TRAINING, VALIDATION = slice(0, 180), slice(180, 240)


async def step(weights: aiodist.Variable, number: int) -> None:
    """Take one step on this replica's part of a batch, whose examples depend only on the step and the replica."""
    ctx = aiodist.get_replica_context()
    rng = np.random.default_rng((number, ctx.replica_id_in_sync_group))
    rows = rng.integers(TRAINING.stop, size=10)
    errors = INPUTS[rows] @ weights.read_value() - TARGETS[rows]
    await weights.assign_sub(0.02 * await ctx.all_reduce("MEAN", errors @ INPUTS[rows] / len(rows)))


def save(file: Path, **state: object) -> None:
    """Write a checkpoint, completely or not at all."""
    partly = file.with_suffix(".partly.npz")
    np.savez(partly, **state)
    partly.replace(file)


def load(file: Path) -> dict[str, np.ndarray]:
    """Return the content of a checkpoint, or the initial state if there is none."""
    if not file.exists():
        return {"weights": np.zeros(8), "step": np.array(0), "best": np.array(np.inf), "since": np.array(0)}
    with np.load(file) as saved:
        return dict(saved)


async def train(file: Path, *, interrupt_at: int = STEPS) -> tuple[int, np.ndarray]:
    """Train from the checkpoint, if there is one; return the number of the last step and the weights."""
    strategy = aiodist.MirroredStrategy([f"CPU:{k}" for k in range(REPLICAS)])
    state = load(file)
    with strategy.scope():
        weights = aiodist.Variable(state["weights"], name="weights")
    number, best, since = int(state["step"]), float(state["best"]), int(state["since"])
    while number < min(STEPS, interrupt_at) and since < PATIENCE:
        await strategy.run(step, args=(weights, number))
        number += 1
        if number % 10 == 0:
            errors = INPUTS[VALIDATION] @ weights.numpy() - TARGETS[VALIDATION]
            loss = float(errors @ errors) / len(errors)
            best, since = (loss, 0) if loss < best else (best, since + 1)
            save(file, weights=weights.numpy(), step=number, best=best, since=since)
    return number, weights.numpy()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        last, weights = await train(Path(folder) / "whole.npz")
        print(f"stopped early: {last < STEPS}, after a multiple of ten steps: {last % 10 == 0}")
        interrupted, _ = await train(Path(folder) / "resumed.npz", interrupt_at=57)
        resumed, again = await train(Path(folder) / "resumed.npz")
        print(f"interrupted after {interrupted} steps, resumed to the same step: {resumed == last}")
        print(f"the same weights in every bit: {weights.tobytes() == again.tobytes()}")


if __name__ == "__main__":
    asyncio.run(main())
