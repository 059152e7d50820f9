"""Data-parallel training as a user of aiodist writes it: a distributed dataset, and the same steps on every replica.

In a step each replica computes the gradient of its part of the batch in its device's thread, and an all_reduce adds the
gradients up. The replicas of a process share the weights: the first one that gets the sum takes the optimiser's step.
That needs no lock, since all of them run in one thread. One run of the strategy takes several steps, since starting a
run costs as much as a few collectives do.

The last batch of an epoch is short, and replicas' parts of it differ in size. So gradients are summed over examples,
and divided by the number of examples that all replicas have together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

import aiodist
from aiodist._demos.language import Array, Codes, LanguageModel, Weights

STEPS_PER_RUN = 20
_BETA1, _BETA2 = 0.9, 0.999


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, on what, and how."""

    model: LanguageModel
    inputs: Codes  # the examples, int[m, context]
    targets: Codes  # the characters that follow them, int[m]
    steps: int
    seed: int  # decides the first weights and the order of the examples
    batch: int = 512  # examples in a step, over all replicas; at the end of an epoch, as many as are left
    rate: float = 0.01  # the highest learning rate
    decay: float = 0.1  # how much of each matrix goes at a step, times the rate


async def train_on(strategy: aiodist.Strategy, plan: Plan, on_step: Callable[[float], None]) -> Learner:
    """Train on the replicas of a strategy; return what they learned. `on_step` gets every loss."""
    examples = strategy.experimental_make_numpy_dataset((plan.inputs, plan.targets))
    dataset = examples.shuffle(plan.seed).batch(plan.batch).repeat()
    batches = aiter(strategy.experimental_distribute_dataset(dataset))
    learner = Learner(plan, on_step)
    gradients = strategy.experimental_distribute_values_from_function(lambda _: np.empty_like(learner.vector))
    for begin in range(0, plan.steps, STEPS_PER_RUN):
        steps = [await anext(batches) for _ in range(begin, min(begin + STEPS_PER_RUN, plan.steps))]
        await strategy.run(train_steps, (begin, steps, learner, gradients))
    return learner


async def train_steps(first: int, batches: Sequence[tuple[Codes, Codes]], learner: Learner, gradient: Array) -> None:
    """Take some steps, in a replica; `first` is the first one's number."""
    ctx = aiodist.get_replica_context()
    for step, (inputs, targets) in enumerate(batches, first):
        nats = await ctx.run_sync(learner.nats_and_gradient, inputs, targets, gradient)
        numbers, total = await ctx.all_reduce(aiodist.ReduceOp.SUM, (np.array([nats, len(targets)]), gradient))
        learner.update(step, numbers, total)


class Learner:
    """What the replicas of a process have in common: the weights, the optimiser's state, and the losses in nats.

    Weights are in one vector, and so are gradients: one array is added up, and updated, faster than several.
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
        """Return the arrays that are in a vector one after the other."""
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
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019), at a rate that may change."""

    def __init__(self, decay: Array) -> None:
        self._decay = decay
        self._mean, self._square = np.zeros((2, *decay.shape), decay.dtype)
        self._steps = 0
        self.rate = 0.0

    def change(self, weights: Array, gradient: Array) -> Array:
        """Add a gradient to both moving averages, corrected for their start at zero; return what to subtract."""
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


def one_blas_thread() -> AbstractContextManager[object]:
    """Keep BLAS to the calling thread inside the block.

    Every replica has a worker thread already. If each of them splits its matrix products over all cores once more, the
    pieces wait for each other: 2 to 8 times slower on 2 cores.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
