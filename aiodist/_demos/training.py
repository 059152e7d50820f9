"""Data-parallel training as a user of aiodist writes it: a distributed dataset, and the same steps on every replica.

In a step each replica computes the gradient of its part of the batch in its device's thread, and an all_reduce adds the
gradients up. The replicas of a process share the weights: the first one that gets the sum takes the step, of gradient
descent with momentum. That needs no lock, since all of them run in one thread. One run of the strategy takes several
steps, since starting a run costs as much as a few collectives do.

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
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, on what, and how."""

    model: LanguageModel
    inputs: Codes  # the examples, int[m, context]
    targets: Codes  # the characters that follow them, int[m]
    steps: int
    seed: int  # decides the first weights and the order of the examples
    batch: int = 512  # examples in a step, over all replicas; at the end of an epoch, as many as are left
    rate: float = 0.6  # the highest learning rate


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
    """What the replicas of a process have in common: the weights, how they move, and the losses in nats.

    Weights are in one vector, and so are gradients: one array is added up, and updated, faster than several.
    """

    def __init__(self, plan: Plan, on_step: Callable[[float], None]) -> None:
        first = plan.model.init(np.random.default_rng(plan.seed))
        self._plan = plan
        self._on_step = on_step
        self._shapes = {name: weight.shape for name, weight in first.items()}
        self.vector = np.concatenate([weight.ravel() for weight in first.values()])
        self.weights = self._views(self.vector)
        self._velocity = np.zeros_like(self.vector)
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
        self._velocity *= MOMENTUM
        self._velocity += gradient / np.float32(count)
        self.vector -= learning_rate(step, self._plan) * self._velocity
        self.losses.append(nats / count)
        self._on_step(self.losses[-1])


def learning_rate(step: int, plan: Plan) -> float:
    """Return the rate of one step, from 0: it rises to the highest in 50 steps, and falls to 0 at the end."""
    return plan.rate * min((step + 1) / 50, 1 - step / plan.steps)


def one_blas_thread() -> AbstractContextManager[object]:
    """Keep BLAS to the calling thread inside the block.

    Every replica has a worker thread already. If each of them splits its matrix products over all cores once more, the
    pieces wait for each other: 2 to 8 times slower on 2 cores.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits
