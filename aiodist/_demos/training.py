"""Data-parallel training as a user of aiodist writes it: a distributed dataset, and the same steps on every replica.

In a step each replica computes the gradient of its part of the batch in its device's thread. A reduce_scatter adds the
gradients up and leaves each replica with its own part of the sum, of which it takes the optimiser's step; an all_gather
gives everybody all changed weights. So no part of the optimiser's work, or of its state, is there twice ("ZeRO",
Rajbhandari et al. 2020). One run of the strategy takes several steps, since starting a run costs as much as a few
collectives do.

The last batch of an epoch is short, and replicas' parts of it differ in size. So gradients are summed over examples,
and divided by the number of examples that all replicas have together.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

import aiodist
from aiodist._demos.model import Array, Codes, LanguageModel, Weights

STEPS_PER_RUN = 10
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
        weights: its weights.
        losses: the global batch's loss at every step, in nats.
        clock: where its time went.
    """

    device: str
    weights: Weights
    losses: tuple[float, ...]
    clock: Clock


async def train_on(strategy: aiodist.Strategy, plan: Plan, on_step: Callable[[float], None]) -> tuple[Trained, ...]:
    """Train on the replicas of a strategy; return what each ended with. `on_step` gets every step's loss."""
    examples = strategy.experimental_make_numpy_dataset((plan.inputs, plan.targets))
    dataset = examples.shuffle(plan.seed).batch(plan.batch).repeat().prefetch(STEPS_PER_RUN)
    batches = aiter(strategy.experimental_distribute_dataset(dataset))
    learners = strategy.experimental_distribute_values_from_function(partial(Learner, plan))

    local = strategy.experimental_local_results(learners)
    local[0].on_step = on_step

    for begin in range(0, plan.steps, STEPS_PER_RUN):
        steps = [await anext(batches) for _ in range(begin, min(begin + STEPS_PER_RUN, plan.steps))]
        await strategy.run(train_steps, (learners, steps))
    devices = strategy.extended.worker_devices
    return tuple(
        Trained(device, one.weights, tuple(one.losses), one.clock) for device, one in zip(devices, local, strict=True)
    )


async def train_steps(learner: Learner, batches: Sequence[tuple[Codes, Codes]]) -> None:
    """Take some steps, in a replica."""
    ctx = aiodist.get_replica_context()
    clock = learner.clock
    for inputs, targets in batches:
        with timed(clock.computing):
            nats, gradient = await ctx.run_sync(learner.nats_and_gradient, inputs, targets)
        with timed(clock.collectives):
            everywhere = ctx.all_reduce(aiodist.ReduceOp.SUM, np.array([nats, len(targets)]))
            part = await ctx.reduce_scatter(aiodist.ReduceOp.SUM, gradient, axis=0)
            all_nats, count = (await everywhere).tolist()
        with timed(clock.computing):
            part = learner.updated(part / np.float32(count), all_nats / count)
        with timed(clock.collectives):
            learner.set_weights(await ctx.all_gather(part, axis=0))


class Learner:
    """What one replica keeps: all weights, and the optimiser's state for its own part of them.

    Weights and gradients stand in one vector each, which is cut into equal parts, one for each replica.

    Args:
        plan: what is trained, on what, and how.
        context: which replica it is, of how many.

    Attributes:
        weights: all weights; views of their vector.
        losses: the global batch's loss at every step so far, in nats.
        on_step: gets each of them.
        clock: where the replica's time goes.
    """

    def __init__(self, plan: Plan, context: aiodist.ValueContext) -> None:
        first = plan.model.init(np.random.default_rng(plan.seed))
        self._plan = plan
        self._shapes = {name: weight.shape for name, weight in first.items()}
        size = -(-sum(weight.size for weight in first.values()) // context.num_replicas_in_sync)
        begin = context.replica_id_in_sync_group * size
        self._own = slice(begin, begin + size)
        vector, decay, self._gradient = np.zeros((3, size * context.num_replicas_in_sync), np.float32)
        for name, weight in self._views(vector).items():
            weight[...] = first[name]
        for weight in self._views(decay).values():
            weight[...] = plan.decay if weight.ndim == 2 else 0
        self._gradients = self._views(self._gradient)
        self._optimiser = Adam(decay[self._own])
        self.losses: list[float] = []
        self.on_step: Callable[[float], object] = lambda _: None
        self.clock = Clock()
        self.set_weights(vector)

    def _views(self, vector: Array) -> Weights:
        """Return the arrays that stand in a vector one after the other."""
        sizes = itertools.accumulate(map(math.prod, self._shapes.values()), initial=0)
        cuts = itertools.pairwise(sizes)
        shapes = self._shapes.items()
        return {name: vector[slice(*cut)].reshape(shape) for (name, shape), cut in zip(shapes, cuts, strict=True)}

    def set_weights(self, vector: Array) -> None:
        """Take the weights from all replicas' parts."""
        self._vector = vector
        self.weights = self._views(vector)

    def nats_and_gradient(self, inputs: Codes, targets: Codes) -> tuple[float, Array]:
        """Return the sum of the examples' nats, and its gradient."""
        return self._plan.model.nats_and_gradients(self.weights, inputs, targets, self._gradients), self._gradient

    def updated(self, gradient: Array, loss: float) -> Array:
        """Return the replica's own part of the weights, one step down the gradient."""
        self._optimiser.rate = learning_rate(len(self.losses), self._plan.steps, self._plan.rate)
        self.losses.append(loss)
        self.on_step(loss)
        weights = self._vector[self._own]
        return weights - self._optimiser.change(weights, gradient)


def learning_rate(step: int, steps: int, peak: float, warm_up: int = 50) -> float:
    """Return the rate of one step, from 0: it rises to `peak` in `warm_up` steps, and falls to 0 at the end."""
    return peak * min((step + 1) / warm_up, 1 - step / steps)


class Adam:
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019).

    Args:
        decay: how much of each weight goes at a step, times the rate.

    Attributes:
        rate: the learning rate, which may change from step to step.
    """

    def __init__(self, decay: Array) -> None:
        self._decay = decay
        self._mean, self._square = np.zeros((2, *decay.shape), decay.dtype)
        self._steps = 0
        self.rate = 0.0

    def change(self, weights: Array, gradient: Array) -> Array:
        """Take one step down the gradient; return what to subtract from the weights.

        The gradient is added to both moving averages, which are corrected for their start at zero.
        """
        self._steps += 1
        self._mean += (1 - _BETA1) * (gradient - self._mean)
        self._square += (1 - _BETA2) * (gradient * gradient - self._square)
        divisor = np.sqrt(self._square)
        divisor *= 1 / math.sqrt(1 - _BETA2**self._steps)
        divisor += 1e-8
        divisor *= 1 - _BETA1**self._steps
        change: Array = np.divide(self._mean, divisor, out=divisor)
        change += self._decay * weights
        change *= self.rate
        return change


def weights_digest(weights: Weights) -> str:
    """Return 16 hexadecimal digits that are equal where names, shapes, dtypes and all bits are (of their sha256)."""
    total = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        total.update(f"{name} {weight.dtype.str} {weight.shape}\n".encode())
        total.update(weight.tobytes())
    return total.hexdigest()[:16]


@dataclass(slots=True)
class Clock:
    """One replica's times, in seconds: of each time it computed, and of each time it waited for collectives."""

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
