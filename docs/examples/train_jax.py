"""Train a JAX model on four replicas, and check the loss curve against one process on the whole batches.

    python docs/examples/train_jax.py

Each replica has its own weights, on logical CPU devices, and one compiled function serves all. Gradients go into the
collective without a copy, by DLPack. The sum comes back as JAX arrays, which are immutable, so the replicas share them.
The exit code is 1 if the curves differ by more than float32 rounding, and 0 if JAX is not installed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

import aiodist

try:
    import jax
except ImportError:
    print("train_jax.py needs JAX, which is not installed: pip install jax")
    sys.exit()

REPLICAS, STEPS, BATCH, RATE, TOLERANCE = 4, 40, 30, 0.5, 1e-5
jnp = jax.numpy


def make_weights() -> dict[str, Any]:
    """Return a model's initial weights, the same at each call."""
    rng = np.random.default_rng(1)
    drawn = {"w1": rng.standard_normal((20, 64)) / 5, "b1": np.zeros(64), "w2": np.zeros((64, 5)), "b2": np.zeros(5)}
    return {name: jnp.asarray(weight, jnp.float32) for name, weight in drawn.items()}


def make_dataset() -> aiodist.NumpyDataset:
    """Return batches of 30; the last batch of each epoch has 10."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((100, 20)).astype(np.float32)
    targets = inputs[:, :5].argmax(axis=1).astype(np.int32)
    return aiodist.NumpyDataset((inputs, targets)).shuffle(seed=0).batch(BATCH).repeat()


def loss(weights: dict[str, Any], inputs: Any, targets: Any, examples: Any) -> Any:
    """Return the examples' part of the mean loss."""
    hidden = jax.nn.relu(inputs @ weights["w1"] + weights["b1"])
    logits = jax.nn.log_softmax(hidden @ weights["w2"] + weights["b2"])
    return -logits[jnp.arange(len(targets)), targets].sum() / examples


loss_and_gradients = jax.jit(jax.value_and_grad(loss))


def compute(*args: Any) -> Any:
    """Return the loss and its gradients once they are computed; meanwhile the other replicas run."""
    return jax.block_until_ready(loss_and_gradients(*args))


@jax.jit
def changed(weights: dict[str, Any], gradients: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda weight, gradient: weight - RATE * gradient, weights, gradients)


async def step(weights: dict[str, Any], batch: tuple[Any, Any]) -> tuple[float, dict[str, Any]]:
    """Take one step, in a replica; return the whole batch's loss, and the weights."""
    ctx = aiodist.get_replica_context()
    examples = await ctx.all_reduce("SUM", len(batch[1]))  # parts differ in size, so the mean is over examples
    value, gradients = await ctx.all_reduce("SUM", await ctx.run_sync(compute, weights, *batch, examples))
    return float(value), changed(weights, gradients)


async def train_on_replicas() -> list[float]:
    strategy = aiodist.MirroredStrategy([f"CPU:{k}" for k in range(REPLICAS)])
    weights: Any = make_weights()
    batches = aiter(strategy.experimental_distribute_dataset(make_dataset()))
    losses = []
    for _ in range(STEPS):
        values, weights = await strategy.run(step, (weights, await anext(batches)))
        losses.append(strategy.experimental_local_results(values)[0])
    return losses


def train_in_one_process() -> list[float]:
    weights, losses = make_weights(), []
    for (inputs, targets), _ in zip(make_dataset(), range(STEPS), strict=False):
        value, gradients = compute(weights, inputs, targets, len(targets))
        weights = changed(weights, gradients)
        losses.append(float(value))
    return losses


def main() -> int:
    together, alone = asyncio.run(train_on_replicas()), train_in_one_process()
    print(f"{'step':>4}  {REPLICAS} replicas  one process")
    for row in (0, 3, 9, 19, STEPS - 1):
        print(f"{row + 1:>4}  {together[row]:>10.7f}  {alone[row]:>11.7f}")
    difference = float(np.abs(np.subtract(together, alone)).max())
    print(f"largest difference at any step: {difference:.1e}, allowed: {TOLERANCE:.0e}")
    return int(difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
