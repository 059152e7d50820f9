"""The model and the training of `demo text`, against finite differences and the same loop without replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio
import numpy as np
import pytest
import threadpoolctl  # type: ignore[import-untyped]

import aiodist
from aiodist._demos.language import LanguageModel, Weights
from aiodist._demos.text import Learner, Plan, one_blas_thread, train_on
from tests.benchmarks.training import threaded


def numerical_gradients(loss: Callable[[], float], weights: Weights, by: float = 1e-6) -> Weights:
    """Return (loss(w + by) - loss(w - by)) / (2 by) for every element of every weight."""
    gradients = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        for index in np.ndindex(weight.shape):
            kept = weight[index]
            weight[index] = kept + by
            above = loss()
            weight[index] = kept - by
            gradients[name][index] = (above - loss()) / (2 * by)
            weight[index] = kept
    return gradients


def test_gradients_equal_finite_differences() -> None:
    """In float64, which resolves differences of 1e-6.

    Weights are perturbed because a rectifier with zero bias and zero inputs is exactly at its kink, where it has no
    derivative.
    """
    rng = np.random.default_rng(9)
    model = LanguageModel(symbols=5, context=3, width=2, hidden=(6, 4))
    inputs, targets = rng.integers(0, 5, (9, 3)), rng.integers(0, 5, 9)
    first = model.init(np.random.default_rng(0))
    weights = {name: weight + 0.1 * rng.standard_normal(weight.shape) for name, weight in first.items()}
    gradients, others = ({name: np.empty_like(weight) for name, weight in weights.items()} for _ in range(2))
    model.nats_and_gradients(weights, inputs, targets, gradients)
    expected = numerical_gradients(lambda: model.nats_and_gradients(weights, inputs, targets, others), weights)
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


INPUTS = np.random.default_rng(11).integers(0, 6, (40, 3))
MODEL = LanguageModel(symbols=6, context=3, width=4, hidden=(12,))
PLAN = Plan(MODEL, INPUTS, INPUTS[:, 0], steps=12, seed=3, batch=15, rate=0.1)


def trained_on(replicas: int, plan: Plan = PLAN) -> Learner:
    losses: list[float] = []
    learner = anyio.run(train_on, aiodist.MirroredStrategy(replicas), plan, losses.append)
    assert learner.losses == losses
    return learner


@pytest.mark.parametrize(("replicas", "threads"), [(1, 1), (4, 2), (20, 1)])
def test_replicas_train_like_the_threads_of_the_benchmark(replicas: int, threads: int) -> None:
    weights, losses = threaded(PLAN, threads)
    learner = trained_on(replicas)
    np.testing.assert_allclose(learner.losses, losses, rtol=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(learner.weights[name], weight, rtol=1e-3, atol=1e-4)


def test_loss_goes_down() -> None:
    losses = trained_on(2, replace(PLAN, steps=150)).losses
    assert np.mean(losses[-20:]) < 0.3 * np.mean(losses[:20])


def test_matrix_products_keep_to_one_thread_inside_the_block() -> None:
    def threads() -> set[int]:
        assert (np.ones((2, 2)) @ np.ones((2, 2))).sum() == 8  # BLAS is loaded
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    before = threads()
    with one_blas_thread():
        assert threads() <= {1}
    assert threads() == before
