"""Data-parallel training as a user of aiodist writes it: variables, a distributed dataset, and a step on every replica.

In a step each replica computes the gradients of its part of the batch in its device's thread. A merge function then
adds them up, takes the optimiser's step once for all replicas, and assigns the variables: one synchronisation a step.

The last batch of an epoch is short, and replicas' parts of it differ in size. So gradients are summed over examples,
and divided by the number of examples that all replicas have together.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import aiodist
from aiodist._demos.model import Array, Codes, LanguageModel, Weights

_BETA1, _BETA2 = 0.9, 0.999


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, on what, and how.

    Attributes:
        model: the model.
        inputs: the examples, int[m, context].
        targets: the characters that follow them, int[m].
        steps: the number of steps.
        seed: decides the first weights and the order of the examples.
        batch: the number of examples in a step, over all replicas; at the end of an epoch, as many as are left.
        rate: the highest learning rate.
        decay: the weight decay.
    """

    model: LanguageModel
    inputs: Codes
    targets: Codes
    steps: int
    seed: int
    batch: int = 512
    rate: float = 0.01
    decay: float = 0.1


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


async def train_on(strategy: aiodist.Strategy, plan: Plan, on_step: Callable[[float], None]) -> tuple[Trained, ...]:
    """Train on the replicas of a strategy; return what each ended with. `on_step` gets every step's loss."""
    with strategy.scope():
        first = plan.model.init(np.random.default_rng(plan.seed))
        variables = {name: aiodist.Variable(weight, name=name) for name, weight in first.items()}
    examples = strategy.experimental_make_numpy_dataset((plan.inputs, plan.targets))
    dataset = examples.shuffle(plan.seed).batch(plan.batch).repeat().prefetch(2)
    batches = aiter(strategy.experimental_distribute_dataset(dataset))
    optimiser = Adam(plan.decay)
    clocks = strategy.experimental_distribute_values_from_function(lambda _: Clock())

    losses = list[float]()
    for step in range(plan.steps):
        optimiser.rate = learning_rate(step, plan.steps, plan.rate)
        arguments = (plan.model, optimiser, variables, clocks, await anext(batches))
        surprise = await strategy.run(train_step, arguments)
        losses.append(float(await strategy.reduce(aiodist.ReduceOp.MEAN, surprise, axis=0)))
        on_step(losses[-1])
    local = zip(strategy.extended.worker_devices, strategy.experimental_local_results(clocks), strict=True)
    return tuple(
        Trained(device, {name: v.values[replica] for name, v in variables.items()}, tuple(losses), clock)
        for replica, (device, clock) in enumerate(local)
    )


async def train_step(
    model: LanguageModel,
    optimiser: Adam,
    variables: Mapping[str, aiodist.Variable],
    clock: Clock,
    batch: tuple[Codes, Codes],
) -> Array:
    """Take one step, in a replica; return its examples' nats."""
    ctx = aiodist.get_replica_context()
    inputs, targets = batch
    weights = {name: variable.read_value() for name, variable in variables.items()}
    with timed(clock.computing):
        surprise, gradients = await ctx.run_sync(model.nats_and_gradients, weights, inputs, targets)
    with timed(clock.collectives):
        await ctx.merge_call(apply_gradients, (optimiser, variables, gradients, len(targets)))
    return surprise


async def apply_gradients(
    strategy: aiodist.Strategy,
    optimiser: Adam,
    variables: Mapping[str, aiodist.Variable],
    gradients: Any,
    examples: Any,
) -> None:
    """Change the variables by what all replicas' examples say; once for all replicas of a worker."""
    total, count = await strategy.reduce(aiodist.ReduceOp.SUM, (gradients, examples), axis=None)
    means = {name: gradient / np.float32(count) for name, gradient in total.items()}
    weights = {name: variable.read_value() for name, variable in variables.items()}
    for name, change in optimiser.changes(weights, means).items():
        variables[name].assign_sub(change)


def learning_rate(step: int, steps: int, peak: float, warm_up: int = 50) -> float:
    """Return the rate of one step, from 0: it rises to `peak` in `warm_up` steps, and falls to 0 at the end."""
    return peak * min((step + 1) / warm_up, 1 - step / steps)


class Adam:
    """Adam (Kingma and Ba 2015) with decoupled weight decay on matrices (Loshchilov and Hutter 2019).

    Args:
        decay: how much of a matrix goes at each step, times the rate; vectors keep all.

    Attributes:
        rate: the learning rate, which may change from step to step.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.rate = 0.0
        self._steps = 0
        self._moments: dict[str, tuple[Array, Array]] = {}

    def changes(self, weights: Weights, gradients: Weights) -> Weights:
        """Take one step down the gradients; return what to subtract from the weights."""
        self._steps += 1
        changes = dict[str, Array]()
        for name, weight in weights.items():
            change = changes[name] = self._direction(name, gradients[name])
            change *= self.rate
            if weight.ndim == 2:
                change += self.rate * self._decay * weight
        return changes

    def _direction(self, name: str, gradient: Array) -> Array:
        """Add the gradient to both moving averages; return their quotient, corrected for their start at zero."""
        if name not in self._moments:
            self._moments[name] = np.zeros_like(gradient), np.zeros_like(gradient)
        mean, square = self._moments[name]
        mean += (1 - _BETA1) * (gradient - mean)
        square += (1 - _BETA2) * (gradient * gradient - square)
        divisor = np.sqrt(square)
        divisor *= 1 / math.sqrt(1 - _BETA2**self._steps)
        divisor += 1e-8
        divisor *= 1 - _BETA1**self._steps
        return np.divide(mean, divisor, out=divisor)


def weights_digest(weights: Weights) -> str:
    """Return 16 hexadecimal digits that are equal where names, shapes, dtypes and all bits are (of their sha256)."""
    total = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        total.update(f"{name} {weight.dtype.str} {weight.shape}\n".encode())
        total.update(weight.tobytes())
    return total.hexdigest()[:16]


@dataclass(slots=True)
class Clock:
    """One replica's times, in seconds: of each time it computed, and of each of its collectives."""

    computing: list[float] = field(default_factory=list)
    collectives: list[float] = field(default_factory=list)


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Note how long the block takes."""
    start = time.perf_counter()
    yield
    times.append(time.perf_counter() - start)


def mean_times(clocks: Sequence[Clock]) -> tuple[float, float, float]:
    """Return the seconds that an average replica computed, reduced, and waited for others.

    The last replica to arrive waits for nobody, so its time in a collective is the reduction's. What another one spends
    in the same collective beyond that, it waits. (Computing on fewer cores than replicas counts as computing, the time
    in the queue for a core included.)
    """
    computing = sum(sum(clock.computing) for clock in clocks) / len(clocks)
    reducing = sum(map(min, zip(*(clock.collectives for clock in clocks), strict=True)))
    in_collectives = sum(sum(clock.collectives) for clock in clocks) / len(clocks)
    return computing, reducing, in_collectives - reducing
