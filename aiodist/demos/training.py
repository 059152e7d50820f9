"""Data-parallel training as a user of aiodist writes it: variables, a distributed dataset, and a step on every replica.

The last batch of an epoch is a short one, whose parts differ in size between replicas: so gradients are summed, each
divided by the number of examples that all replicas have together, and never by that of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiodist
from aiodist.demos.adam import Adam
from aiodist.demos.loss import Array, Codes, nats
from aiodist.demos.model import Model
from aiodist.demos.perceptron import Weights
from aiodist.demos.schedule import learning_rate
from aiodist.demos.timing import Clock


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, on what, and how.

    Attributes:
        model: the model.
        inputs: the examples, [m, ...].
        targets: their classes, int[m].
        batch: how many examples a step takes, over all replicas; at the end of an epoch, as many as are left.
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


@dataclass(slots=True)
class Seat:
    """What one replica keeps from step to step, beside the variables."""

    optimiser: Adam
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a replica ends with.

    Attributes:
        device: where it ran.
        weights: its components of the variables.
        losses: the global batch's loss at every step, in nats.
        clock: where its time went.
    """

    device: str
    weights: Weights
    losses: tuple[float, ...]
    clock: Clock


async def train_on(strategy: aiodist.Strategy, plan: Plan, watch: Callable[[float], None]) -> tuple[Trained, ...]:
    """Train on the replicas of a strategy; return what each ended with. `watch` hears of every step's loss."""
    with strategy.scope():
        first = plan.model.init(np.random.default_rng(plan.seed))
        variables = {name: aiodist.Variable(weight, name=name) for name, weight in first.items()}
    examples = strategy.experimental_make_numpy_dataset((plan.inputs, plan.targets))
    dataset = examples.shuffle(plan.seed).batch(plan.batch).repeat().prefetch(2)
    batches = aiter(strategy.experimental_distribute_dataset(dataset))
    seats = strategy.experimental_distribute_values_from_function(lambda _: Seat(Adam(plan.decay)))

    losses = list[float]()
    for step in range(plan.steps):
        rate = learning_rate(step, plan.steps, plan.rate)
        surprise = await strategy.run(train_step, (plan.model, variables, seats, await anext(batches), rate))
        losses.append(float(await strategy.reduce(aiodist.ReduceOp.MEAN, surprise, axis=0)))
        watch(losses[-1])
    return tuple(
        Trained(device, {name: v.values[replica] for name, v in variables.items()}, tuple(losses), seat.clock)
        for replica, (device, seat) in enumerate(
            zip(strategy.extended.worker_devices, strategy.experimental_local_results(seats), strict=True)
        )
    )


async def train_step(
    model: Model, variables: Mapping[str, aiodist.Variable], seat: Seat, batch: tuple[Any, Codes], rate: float
) -> Array:
    """Take one step, in a replica; return its examples' nats.

    The variables have no aggregation, so that they take equal changes only: replicas cannot drift apart unnoticed.
    """
    ctx = aiodist.get_replica_context()
    inputs, targets = batch
    weights = {name: variable.read_value() for name, variable in variables.items()}
    with seat.clock.meeting():
        examples = await ctx.all_reduce(aiodist.ReduceOp.SUM, len(targets))
    with seat.clock.computing():
        surprise, own = await ctx.run_sync(model.nats_and_gradients, weights, inputs, targets, 1 / examples)
    with seat.clock.meeting():
        gradients = await ctx.all_reduce(aiodist.ReduceOp.SUM, own)
    with seat.clock.computing():
        changes = await ctx.run_sync(seat.optimiser.changes, weights, gradients, rate)
    with seat.clock.meeting():
        for assignment in [variable.assign_sub(changes[name]) for name, variable in variables.items()]:
            await assignment
    return surprise


def examine(model: Model, weights: Weights, inputs: NDArray[Any], targets: Codes) -> tuple[float, float]:
    """Return the mean of the examples' nats, and the share of them that the model's first choice gets right."""
    surprise, right = 0.0, 0
    for start in range(0, len(targets), 4096):
        logits, expected = model.logits(weights, inputs[start : start + 4096]), targets[start : start + 4096]
        surprise += float(nats(logits, expected).sum(dtype=np.float64))
        right += int((logits.argmax(axis=1) == expected).sum())
    return surprise / len(targets), right / len(targets)
