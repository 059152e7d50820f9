"""Train a perceptron to read digits on 1, 2, 4 and 8 replicas, and compare the loss curves.

    python docs/examples/train_digits.py

The weights are variables, the model is plain NumPy, and every step takes the same 128 images, divided among the
replicas. A different number of replicas groups the sums of a step differently, so curves differ by float32 rounding.
The exit code is 1 if they differ by more, or if replicas of one run end with different weights. It is 0 if
scikit-learn, which provides the images, is not installed.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import aiodist

try:
    from sklearn.datasets import load_digits
except ImportError:
    print("train_digits.py needs scikit-learn, which is not installed: pip install scikit-learn")
    sys.exit()

REPLICAS, STEPS, BATCH, RATE, TOLERANCE = (1, 2, 4, 8), 40, 128, 0.5, 1e-5


def make_weights() -> dict[str, aiodist.Variable]:
    """Return a model's initial weights, the same at each call; called in a strategy's scope."""
    rng = np.random.default_rng(1)
    drawn = {"w1": rng.standard_normal((64, 64)) / 8, "b1": np.zeros(64), "w2": np.zeros((64, 10)), "b2": np.zeros(10)}
    return {name: aiodist.Variable(weight.astype(np.float32), name=name) for name, weight in drawn.items()}


def make_dataset() -> aiodist.NumpyDataset:
    """Return batches of 128 of the 1797 images of 8 by 8 pixels; the last batch of each epoch has 5."""
    pixels, digits = load_digits(return_X_y=True)
    return aiodist.NumpyDataset(((pixels / 16).astype(np.float32), digits)).shuffle(seed=0).batch(BATCH).repeat()


def compute(weights, inputs, targets, examples):
    """Return the images' part of the mean loss, and its gradients."""
    hidden = np.maximum(inputs @ weights["w1"] + weights["b1"], 0)
    logits = hidden @ weights["w2"] + weights["b2"]
    logits -= logits.max(axis=1, keepdims=True, initial=-np.inf)
    chosen = np.arange(len(targets)), targets
    log_sums = np.log(np.exp(logits).sum(axis=1))
    loss = (log_sums - logits[chosen]).sum() / examples
    by_logits = np.exp(logits - log_sums[:, None])
    by_logits[chosen] -= 1
    by_logits /= np.float32(examples)
    by_hidden = by_logits @ weights["w2"].T * (hidden > 0)
    gradients = {"w1": inputs.T @ by_hidden, "b1": by_hidden.sum(axis=0)}
    return loss, gradients | {"w2": hidden.T @ by_logits, "b2": by_logits.sum(axis=0)}


async def step(weights, batch):
    """Take one step, in a replica; return the whole batch's loss."""
    ctx = aiodist.get_replica_context()
    inputs, targets = batch
    examples = await ctx.all_reduce("SUM", len(targets))  # parts differ in size, so the mean is over examples
    read = {name: weight.read_value() for name, weight in weights.items()}
    loss, gradients = await ctx.all_reduce("SUM", await ctx.run_sync(compute, read, inputs, targets, examples))
    for name, weight in weights.items():
        await weight.assign_sub(np.float32(RATE) * gradients[name])
    return float(loss)


async def train(replicas: int) -> tuple[list[float], bool]:
    """Return the losses of a run, and whether all replicas ended with the same weights, bit for bit."""
    strategy = aiodist.MirroredStrategy([f"CPU:{k}" for k in range(replicas)])
    with strategy.scope():
        weights = make_weights()
    batches = aiter(strategy.experimental_distribute_dataset(make_dataset()))
    losses = []
    for _ in range(STEPS):
        values = await strategy.run(step, (weights, await anext(batches)))
        losses.append(strategy.experimental_local_results(values)[0])
    equal = all(len({value.tobytes() for value in weight.values}) == 1 for weight in weights.values())
    return losses, equal


def main() -> int:
    curves, equal = zip(*(asyncio.run(train(replicas)) for replicas in REPLICAS), strict=True)
    print("step", *(f"{replicas} replica{'s'[: replicas > 1]}" for replicas in REPLICAS), sep="  ")
    for row in (0, 3, 9, 19, STEPS - 1):
        print(f"{row + 1:>4}", *(f"{curve[row]:>9.7f}" for curve in curves), sep="  ")
    difference = float(np.ptp(curves, axis=0).max())
    print(f"weights of a run's replicas: {'equal in every bit' if all(equal) else 'DIFFERENT'}")
    print(f"largest difference at any step: {difference:.1e}, allowed: {TOLERANCE:.0e}")
    return int(difference > TOLERANCE or not all(equal))


if __name__ == "__main__":
    sys.exit(main())
