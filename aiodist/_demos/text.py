"""`aiodist demo text`: a character language model, trained on several replicas.

The training is written as a user of aiodist would write it: a distributed dataset, and the same steps on every replica.
In each step a replica computes the gradient of its part of the batch in its device's thread, and an all_reduce sums the
gradients. The replicas of a process share the weights: the first to get the sum takes the step, of gradient descent
with momentum. That needs no lock, since all of them run in one thread. One run of the strategy takes several steps,
since starting a run costs as much as a few collectives.

The last batch of an epoch is short, and the replicas' parts of it differ in size. So gradients are summed over
examples, and divided by the total number of examples.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

import aiodist
from aiodist._core.text import count
from aiodist._demos.language import Array, Codes, LanguageModel, Weights, load_topics, windows
from aiodist._tools.output import open_console

STEPS_PER_RUN = 20
MOMENTUM = 0.9
PROMPT = 'The "replica" statement\n***********************\n\nA replica is '
SAMPLE = 300
_LINES = 10


# The training.


@dataclass(frozen=True, slots=True)
class Plan:
    """The model, the examples and the hyperparameters."""

    model: LanguageModel
    inputs: Codes  # the examples, int[m, context]
    targets: Codes  # the characters that follow them, int[m]
    steps: int
    seed: int  # of the initial weights and the order of the examples
    batch: int = 512  # examples in a step, over all replicas; the last step of an epoch takes those that are left
    rate: float = 0.6  # the highest learning rate


async def train_on(strategy: aiodist.Strategy, plan: Plan, on_step: Callable[[float], None]) -> Learner:
    """Train on the replicas of a strategy; `on_step` is called with every loss."""
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
    """Take several steps in a replica; `first` is the number of the first."""
    ctx = aiodist.get_replica_context()
    for step, (inputs, targets) in enumerate(batches, first):
        nats = await ctx.run_sync(learner.nats_and_gradient, inputs, targets, gradient)
        numbers, total = await ctx.all_reduce(aiodist.ReduceOp.SUM, (np.array([nats, len(targets)]), gradient))
        learner.update(step, numbers, total)


class Learner:
    """The state that the replicas of a process share: the weights, their velocity, and the losses in nats.

    All weights are in one vector, and so are gradients: one array is reduced, and updated, faster than several.
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
        """Return the arrays that a vector holds one after the other."""
        cuts = itertools.pairwise(itertools.accumulate(map(math.prod, self._shapes.values()), initial=0))
        shapes = self._shapes.items()
        return {name: vector[slice(*cut)].reshape(shape) for (name, shape), cut in zip(shapes, cuts, strict=True)}

    def nats_and_gradient(self, inputs: Codes, targets: Codes, gradient: Array) -> float:
        """Return the sum of the examples' losses in nats; write its gradient into a vector."""
        return self._plan.model.nats_and_gradients(self.weights, inputs, targets, self._views(gradient))

    def update(self, step: int, numbers: Array, gradient: Array) -> None:
        """Take a step, unless another replica has taken it. `numbers` are the sum of losses and the examples."""
        if step < len(self.losses):
            return
        nats, examples = numbers.tolist()
        self._velocity *= MOMENTUM
        self._velocity += gradient / np.float32(examples)
        self.vector -= learning_rate(step, self._plan) * self._velocity
        self.losses.append(nats / examples)
        self._on_step(self.losses[-1])


def learning_rate(step: int, plan: Plan) -> float:
    """Return the rate of a step, counted from 0: it rises for 50 steps, then falls linearly to 0."""
    return plan.rate * min((step + 1) / 50, 1 - step / plan.steps)


def one_blas_thread() -> AbstractContextManager[object]:
    """Keep BLAS to the calling thread inside the block.

    Every replica has a worker thread already. If each also splits its matrix products over all cores, the pieces wait
    for each other, and training is 2 to 8 times slower on 2 cores.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits


# The demo.


def run_text(strategy: aiodist.Strategy, *, steps: int, seed: int) -> bool:
    """Train and print the results; return whether all replicas end with the same weights."""
    cluster = strategy.cluster_resolver
    console = open_console(quiet=cluster is not None and cluster.task_id > 0)
    corpus = load_topics()
    symbols = len(corpus.symbols)
    model = LanguageModel(symbols)
    plan = Plan(model, *windows(corpus.codes, model.context), steps, seed)
    _print(console, "input", f"pydoc_data.topics: {len(corpus.codes):,} characters")
    _print(console, "", f"{symbols} symbols; at random {math.log2(symbols):.2f} bits per character")
    _print(console, "plan", f"{count(steps, 'step')} of {plan.batch} characters, divided among the replicas")
    on_step = _progress(console, steps, count(strategy.num_replicas_in_sync, "replica"))
    start = time.perf_counter()
    with one_blas_thread():
        learner, digests = asyncio.run(_train(strategy, plan, on_step))
    seconds = time.perf_counter() - start
    console.print("sample", style="bold")
    prompt = np.array([corpus.symbols.index(character) for character in PROMPT], np.intp)
    sample = model.sample(learner.weights, prompt, SAMPLE, seed=seed)
    for line in (PROMPT + "".join(corpus.symbols[code] for code in sample)).rstrip().splitlines():
        console.print(textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="  "), soft_wrap=True)
    for replica, digest in enumerate(digests):
        _print(console, "" if replica else "weights", f"{digest:016x}  replica {replica}")
    equal = len(set(digests)) == 1
    _print(console, "", "equal in every bit" if equal else "DIFFERENT: replicas did not make the same updates")
    _print(console, "time", f"{seconds:.1f} s")
    return equal


async def _train(strategy: aiodist.Strategy, plan: Plan, on_step: Callable[[float], None]) -> tuple[Learner, list[int]]:
    """Train; return the learner, and the digests of all replicas' weights."""
    learner = await train_on(strategy, plan, on_step)
    digests = strategy.experimental_local_results(await strategy.run(_digests, (learner,)))
    return learner, digests[0].tolist()


async def _digests(learner: Learner) -> Any:
    """Return, in a replica, a digest of every replica's weights."""
    digest = int.from_bytes(hashlib.sha256(learner.vector.tobytes()).digest()[:8])
    return await aiodist.get_replica_context().all_gather(np.array([digest], np.uint64), 0)


def _progress(console: Console, steps: int, title: str) -> Callable[[float], None]:
    """Return a function that takes each step's loss in nats and prints about ten of them, with the first and last."""
    done, smooth, first = 0, 0.0, 0.0

    def step(loss: float) -> None:
        nonlocal done, smooth, first
        done, now = done + 1, time.perf_counter()
        smooth = 0.95 * smooth + 0.05 * loss if done > 1 else loss
        first = first or now  # the first step does not count, since it includes what is done once
        if done in {1, steps} or done % max(steps // _LINES, 1) == 0:
            rate = f", {(done - 1) / (now - first):.0f} steps/s" if done > 1 else ""
            bits = f"{smooth / math.log(2):.2f} bits/char"
            console.print(f"{title}, step {done:>{len(str(steps))}} of {steps}: {bits}{rate}", soft_wrap=True)

    return step


def _print(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<11}", "bold"), text), soft_wrap=True)
