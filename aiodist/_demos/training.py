"""Data-parallel training as a user of aiodist writes it: a distributed dataset, and the same steps on every replica.

In a step each replica computes the gradient of its part of the batch in its device's thread, and an all_reduce adds the
gradients up. The replicas of a process share the weights: the first one that gets the sum takes the optimiser's step.
That needs no lock, since all of them run in one thread. One run of the strategy takes several steps, since starting a
run costs as much as a few collectives do.

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

import numpy as np

import aiodist
from aiodist._demos.model import Array, Codes, LanguageModel, Weights

STEPS_PER_RUN = 20
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


@dataclass(frozen=True, slots=True, repr=False)  # asyncio asks for a result's repr, which takes 20 ms for arrays
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
    learner = Learner(plan, on_step)
    gradients = strategy.experimental_distribute_values_from_function(lambda _: np.empty_like(learner.vector))
    clocks = strategy.experimental_distribute_values_from_function(lambda _: Clock())

    for begin in range(0, plan.steps, STEPS_PER_RUN):
        steps = [await anext(batches) for _ in range(begin, min(begin + STEPS_PER_RUN, plan.steps))]
        await strategy.run(train_steps, (begin, steps, learner, gradients, clocks))
    local = zip(strategy.extended.worker_devices, strategy.experimental_local_results(clocks), strict=True)
    return tuple(Trained(device, learner.weights, tuple(learner.losses), clock) for device, clock in local)


async def train_steps(
    first: int, batches: Sequence[tuple[Codes, Codes]], learner: Learner, gradient: Array, clock: Clock
) -> None:
    """Take some steps, in a replica; `first` is the first one's number."""
    ctx = aiodist.get_replica_context()
    for step, (inputs, targets) in enumerate(batches, first):
        with timed(clock.computing):
            nats = await ctx.run_sync(learner.nats_and_gradient, inputs, targets, gradient)
        with timed(clock.collectives):
            sums = await ctx.all_reduce(aiodist.ReduceOp.SUM, (np.array([nats, len(targets)]), gradient))
        with timed(clock.computing):
            learner.update(step, *sums)


class Learner:
    """What the replicas of a process have in common: the weights, and the optimiser's state.

    Weights stand in one vector, and so do gradients: one array is added up, and updated, faster than several.

    Args:
        plan: what is trained, on what, and how.
        on_step: gets every step's loss.

    Attributes:
        vector: all weights.
        weights: views of them, by name.
        losses: the global batch's loss at every step so far, in nats.
    """

    def __init__(self, plan: Plan, on_step: Callable[[float], None]) -> None:
        first = plan.model.init(np.random.default_rng(plan.seed))
        self._plan = plan
        self._on_step = on_step
        self._shapes = {name: weight.shape for name, weight in first.items()}
        self.vector = np.concatenate([weight.ravel() for weight in first.values()])
        self.weights = self._views(self.vector)
        decay = np.zeros_like(self.vector)
        for view in self._views(decay).values():
            view[...] = plan.decay if view.ndim == 2 else 0
        self._optimiser = Adam(decay)
        self.losses: list[float] = []

    def _views(self, vector: Array) -> Weights:
        """Return the arrays that stand in a vector one after the other."""
        cuts = itertools.pairwise(itertools.accumulate(map(math.prod, self._shapes.values()), initial=0))
        shapes = self._shapes.items()
        return {name: vector[slice(*cut)].reshape(shape) for (name, shape), cut in zip(shapes, cuts, strict=True)}

    def nats_and_gradient(self, inputs: Codes, targets: Codes, gradient: Array) -> float:
        """Return the sum of the examples' nats; write its gradient into a vector."""
        return self._plan.model.nats_and_gradients(self.weights, inputs, targets, self._views(gradient))

    def update(self, step: int, numbers: Array, gradient: Array) -> None:
        """Take a step down the gradient, unless another replica has taken it; `numbers`: the nats, and the examples."""
        if step < len(self.losses):
            return
        nats, count = numbers.tolist()
        self._optimiser.rate = learning_rate(step, self._plan.steps, self._plan.rate)
        self.vector -= self._optimiser.change(self.vector, gradient / np.float32(count))
        self.losses.append(nats / count)
        self._on_step(self.losses[-1])


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
        change: Array = gradient - self._mean
        change *= 1 - _BETA1
        self._mean += change
        np.multiply(gradient, gradient, out=change)
        change -= self._square
        change *= 1 - _BETA2
        self._square += change
        np.sqrt(self._square, out=change)
        change *= 1 / math.sqrt(1 - _BETA2**self._steps)
        change += 1e-8
        change *= 1 - _BETA1**self._steps
        np.divide(self._mean, change, out=change)
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
