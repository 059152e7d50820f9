"""Data-parallel training as a user of aiodist writes it: one `strategy.run` holds the whole loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiodist
from aiodist.demos.adam import Adam
from aiodist.demos.batches import global_batches, part
from aiodist.demos.loss import Codes, nats
from aiodist.demos.model import Model
from aiodist.demos.perceptron import Weights
from aiodist.demos.schedule import learning_rate
from aiodist.demos.timing import Clock


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, on what, and how; every replica gets the same.

    Attributes:
        model: the model.
        inputs: the examples, [m, ...].
        targets: their classes, int[m].
        batch: how many examples a step takes, over all replicas.
        steps: how many steps there are.
        seed: decides the first weights and the order of the examples.
        rate: the highest learning rate.
        decay: the weight decay.
    """

    model: Model
    inputs: NDArray[Any]
    targets: Codes
    batch: int
    steps: int
    seed: int
    rate: float
    decay: float


@dataclass(frozen=True, slots=True)
class Trained:
    """What a replica ends with.

    Attributes:
        device: where it ran.
        weights: its own copy.
        losses: the global batch's loss at every step, in nats.
        clock: where its time went.
    """

    device: str
    weights: Weights
    losses: tuple[float, ...]
    clock: Clock


async def train_on(strategy: aiodist.Strategy, plan: Plan, watch: Callable[[float], None]) -> tuple[Trained, ...]:
    """Train on every replica of a strategy; return what each ended with, in their order."""
    return strategy.experimental_local_results(await strategy.run(train, (plan, watch)))


async def train(plan: Plan, watch: Callable[[float], None]) -> Trained:
    """Train one replica's copy of the model, in step with the others; `watch` hears of every step's loss once."""
    ctx = aiodist.get_replica_context()
    replica, replicas = ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync
    weights = plan.model.init(np.random.default_rng(plan.seed))
    optimiser = Adam(weights, decay=plan.decay)
    clock, losses = Clock(), list[float]()

    for step, batch in enumerate(global_batches(len(plan.targets), plan.batch, plan.steps, plan.seed)):
        mine = part(batch, replica, replicas)
        scale = replicas / len(batch)  # parts can differ in size: so the mean over replicas is that over examples
        with clock.computing():
            loss, gradients = await ctx.run_sync(
                plan.model.loss_and_gradients, weights, plan.inputs[mine], plan.targets[mine], scale
            )
        with clock.meeting():
            loss, gradients = await ctx.all_reduce(aiodist.ReduceOp.MEAN, (loss, gradients))
        with clock.computing():
            await ctx.run_sync(optimiser.update, gradients, learning_rate(step, plan.steps, plan.rate))
        losses.append(loss)
        if replica == 0:
            watch(loss)
    return Trained(ctx.devices[0], weights, tuple(losses), clock)


def examine(model: Model, weights: Weights, inputs: NDArray[Any], targets: Codes) -> tuple[float, float]:
    """Return the mean of the examples' nats, and the share of them that the model's first choice gets right."""
    surprise, right = 0.0, 0
    for start in range(0, len(targets), 4096):
        logits, expected = model.logits(weights, inputs[start : start + 4096]), targets[start : start + 4096]
        surprise += float(nats(logits, expected).sum(dtype=np.float64))
        right += int((logits.argmax(axis=1) == expected).sum())
    return surprise / len(targets), right / len(targets)
