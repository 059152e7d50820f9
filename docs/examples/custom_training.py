"""The custom training loop of custom_training_tf.py on aiodist: the same steps, and the same losses.

python docs/examples/custom_training.py
"""

from __future__ import annotations

import asyncio

import numpy as np

import aiodist

REPLICAS, EPOCHS, BATCH, RATE = 4, 5, 64, 0.5
RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((256, 10)).astype(np.float32)
LABELS = (INPUTS @ RNG.standard_normal((10, 3))).argmax(axis=1)

strategy = aiodist.MirroredStrategy([f"CPU:{k}" for k in range(REPLICAS)])

with strategy.scope():
    weights = aiodist.Variable(np.zeros((10, 3), np.float32))


def compute(inputs: np.ndarray, labels: np.ndarray) -> tuple[np.floating, np.ndarray]:
    """Return this part's share of the mean loss, and its gradient."""
    logits = inputs @ weights.numpy()
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances = odds / odds.sum(axis=1, keepdims=True)
    loss = -np.log(chances[np.arange(len(labels)), labels]).sum() / BATCH
    return loss, inputs.T @ (chances - np.eye(3, dtype=np.float32)[labels]) / np.float32(BATCH)


async def train_step(batch: tuple[np.ndarray, np.ndarray]) -> np.floating:
    loss, gradient = compute(*batch)
    ctx = aiodist.get_replica_context()
    gradient = await ctx.all_reduce(aiodist.ReduceOp.SUM, gradient)
    await weights.assign_sub(np.float32(RATE) * gradient)
    return loss


async def distributed_train_step(batch: aiodist.DistributedValues) -> np.floating:
    losses = await strategy.run(train_step, args=(batch,))
    return await strategy.reduce(aiodist.ReduceOp.SUM, losses, axis=None)


async def main() -> None:
    dataset = strategy.experimental_make_numpy_dataset((INPUTS, LABELS)).batch(BATCH)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for epoch in range(EPOCHS):
        losses = [await distributed_train_step(batch) async for batch in distributed]
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}")


if __name__ == "__main__":
    asyncio.run(main())
