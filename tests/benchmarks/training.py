"""Training on replicas beside a plain NumPy loop and a hand-written threaded loop that compute the same.

    python -m tests.benchmarks.training

Every variant trains the model of `aiodist demo text` on the same batches, in turn, in one process, for several rounds.
Rates and ratios are medians over the rounds; a ratio is of two variants in one round, for on a shared machine one round
may take half as long again as the next. BLAS uses one thread.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial, reduce

import numpy as np

import aiodist
from aiodist._core.text import count
from aiodist._demos.language import LanguageModel, Weights, load_topics, windows
from aiodist._demos.text import MOMENTUM, Plan, learning_rate, one_blas_thread, train_on
from tests.benchmarks.timing import cpus, in_turn, ratio, show, versions

STEPS, ROUNDS = 60, 15
PLAIN = "plain NumPy loop"


def threaded(plan: Plan, count: int) -> tuple[Weights, list[float]]:
    """Train with threads that share the weights: each computes its part's gradients, the first takes the step.

    Returns:
        The weights, and the losses.
    """
    weights = dict(plan.model.init(np.random.default_rng(plan.seed)))
    velocity = {name: np.zeros_like(weight) for name, weight in weights.items()}
    batches = aiodist.NumpyDataset((plan.inputs, plan.targets)).shuffle(plan.seed).batch(plan.batch).repeat()
    drawn, meeting = iter(batches), threading.Barrier(count)
    parts = [{name: np.empty_like(weight) for name, weight in weights.items()} for _ in range(count)]
    nats, losses = [0.0] * count, list[float]()
    inputs, targets = plan.inputs, plan.targets

    def work(thread: int) -> None:
        nonlocal inputs, targets
        for step in range(plan.steps):
            if thread == 0:
                inputs, targets = next(drawn)
            meeting.wait()
            own = slice(thread * len(inputs) // count, (thread + 1) * len(inputs) // count)
            nats[thread] = plan.model.nats_and_gradients(weights, inputs[own], targets[own], parts[thread])
            meeting.wait()
            if thread == 0:
                for name, weight in weights.items():
                    mean = reduce(np.add, [part[name] for part in parts]) / np.float32(len(targets))
                    velocity[name] = MOMENTUM * velocity[name] + mean
                    weights[name] = weight - learning_rate(step, plan) * velocity[name]
                losses.append(sum(nats) / len(targets))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, count)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    return weights, losses


def replicas(plan: Plan, count: int) -> None:
    asyncio.run(train_on(cpus(count), plan, lambda _: None))


def rate(train: Callable[[Plan], object], plan: Plan) -> float:
    begin = time.perf_counter()
    train(plan)
    return plan.steps / (time.perf_counter() - begin)


def main() -> None:
    corpus = load_topics()
    model = LanguageModel(len(corpus.symbols))
    plan = Plan(model, *windows(corpus.codes, model.context), steps=STEPS, seed=0)
    variants: dict[str, Callable[[Plan], object]] = {PLAIN: partial(threaded, count=1)}
    variants |= {f"NumPy, {n} threads by hand": partial(threaded, count=n) for n in (2, 4)}
    variants |= {f"aiodist, {count(n, 'replica')}": partial(replicas, count=n) for n in (1, 2, 4)}
    with one_blas_thread():
        rates = in_turn({name: partial(rate, train, plan) for name, train in variants.items()}, ROUNDS)
    print(f"{versions()}\n{STEPS} steps of {plan.batch} examples, {ROUNDS} rounds")
    medians = {name: f"{statistics.median(found):.0f}" for name, found in rates.items()}
    rows = [(name, median, f"{ratio(rates, name, PLAIN):.2f}") for name, median in medians.items()]
    show(("", "steps a second", "of the plain loop's"), rows)
    for n in (2, 4):
        by_hand = ratio(rates, f"aiodist, {n} replicas", f"NumPy, {n} threads by hand")
        alone = ratio(rates, f"aiodist, {n} replicas", "aiodist, 1 replica")
        print(f"{n} replicas: {by_hand:.2f} of {n} threads by hand, {alone:.2f} of one replica")


if __name__ == "__main__":
    main()
