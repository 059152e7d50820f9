"""Train a PyTorch model on four replicas, and check the loss curve against one process on the whole batches.

    python docs/examples/train_pytorch.py

Each replica has its own model, on logical CPU devices. Gradients go into the collective without a copy, by DLPack. The
sum comes back as tensors over the memory that it was computed in, and becomes the gradients of the model. The exit code
is 1 if the curves differ by more than float32 rounding, and 0 if PyTorch is not installed.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np

import aiodist

try:
    import torch
except ImportError:
    print("train_pytorch.py needs PyTorch, which is not installed: pip install torch")
    sys.exit()

REPLICAS, STEPS, BATCH, TOLERANCE = 4, 40, 30, 1e-5


def make_model() -> Any:
    """Return a model with the same initial weights at each call."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5))


def make_optimiser(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_dataset() -> aiodist.NumpyDataset:
    """Return batches of 30; the last batch of each epoch has 10."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((100, 20)).astype(np.float32)
    return aiodist.NumpyDataset((inputs, inputs[:, :5].argmax(axis=1))).shuffle(seed=0).batch(BATCH).repeat()


def compute(model: Any, inputs: Any, targets: Any, examples: int) -> Any:
    """Set the gradients of the model's parameters; return the loss, the examples' part of the mean, as a tensor."""
    model.zero_grad()
    logits = model(torch.from_numpy(inputs))
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets), reduction="sum") / examples
    loss.backward()
    return loss.detach()


async def step(model: Any, optimiser: Any, batch: tuple[Any, Any]) -> float:
    """Take one step, in a replica; return the whole batch's loss."""
    ctx = aiodist.get_replica_context()
    parameters = list(model.parameters())
    examples = await ctx.all_reduce("SUM", len(batch[1]))  # parts differ in size, so the mean is over examples
    loss = await ctx.run_sync(compute, model, *batch, examples)
    loss, gradients = await ctx.all_reduce("SUM", (loss, [parameter.grad for parameter in parameters]))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimiser.step()
    return float(loss)


async def train_on_replicas() -> list[float]:
    strategy = aiodist.MirroredStrategy([f"CPU:{k}" for k in range(REPLICAS)])
    models = aiodist.PerReplica([make_model() for _ in range(REPLICAS)])
    optimisers = aiodist.PerReplica([make_optimiser(model) for model in models.values])
    batches = aiter(strategy.experimental_distribute_dataset(make_dataset()))
    losses = []
    for _ in range(STEPS):
        reduced = await strategy.run(step, (models, optimisers, await anext(batches)))
        losses.append(strategy.experimental_local_results(reduced)[0])
    return losses


def train_in_one_process() -> list[float]:
    model, losses = make_model(), []
    optimiser = make_optimiser(model)
    for (inputs, targets), _ in zip(make_dataset(), range(STEPS), strict=False):
        losses.append(float(compute(model, inputs, targets, len(targets))))
        optimiser.step()
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
