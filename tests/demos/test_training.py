"""The loop that `demo text` runs, on a small model, against the same loop without replicas."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import anyio
import numpy as np
import pytest

import aiodist
from aiodist._demos.model import LanguageModel, Weights
from aiodist._demos.text import one_blas_thread
from aiodist._demos.training import (
    Adam,
    Clock,
    Plan,
    Trained,
    learning_rate,
    mean_times,
    train_on,
    weights_digest,
)

RNG = np.random.default_rng(11)
INPUTS = RNG.integers(0, 6, (40, 3))
MODEL = LanguageModel(symbols=6, context=3, width=4, hidden=(12,))
PLAN = Plan(MODEL, INPUTS, INPUTS[:, 0], steps=12, seed=3, batch=15, rate=0.02)


def trained_on(replicas: int, plan: Plan = PLAN) -> tuple[Trained, ...]:
    losses: list[float] = []
    strategy = aiodist.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    trained = anyio.run(train_on, strategy, plan, losses.append)
    assert {one.losses for one in trained} == {tuple(losses)}
    return trained


def trained_without_replicas(plan: Plan) -> tuple[Weights, list[float]]:
    weights, losses = dict(plan.model.init(np.random.default_rng(plan.seed))), []
    gradients = {name: np.empty_like(weight) for name, weight in weights.items()}
    optimisers = {name: Adam(np.full(w.shape, plan.decay * (w.ndim == 2), w.dtype)) for name, w in weights.items()}
    batches = aiodist.NumpyDataset((plan.inputs, plan.targets)).shuffle(plan.seed).batch(plan.batch).repeat()
    for step, (inputs, targets) in zip(range(plan.steps), batches, strict=False):
        nats = plan.model.nats_and_gradients(weights, inputs, targets, gradients)
        for name, optimiser in optimisers.items():
            optimiser.rate = learning_rate(step, plan.steps, plan.rate)
            weights[name] = weights[name] - optimiser.change(weights[name], gradients[name] / np.float32(len(targets)))
        losses.append(nats / len(targets))
    return weights, losses


@pytest.mark.parametrize("replicas", [1, 4, 20])
def test_replicas_follow_the_run_without_them_and_end_with_equal_bits(replicas: int) -> None:
    weights, losses = trained_without_replicas(PLAN)
    trained = trained_on(replicas)
    np.testing.assert_allclose(trained[0].losses, losses, rtol=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(trained[0].weights[name], weight, rtol=1e-3, atol=1e-4)
    assert len({weights_digest(one.weights) for one in trained}) == 1
    assert [one.device for one in trained] == [f"CPU:{index}" for index in range(replicas)]
    for one in trained:
        assert len(one.clock.collectives) == PLAN.steps
        assert sum(one.clock.computing) > 0


def test_loss_goes_down() -> None:
    losses = trained_on(2, replace(PLAN, steps=150))[0].losses
    assert np.mean(losses[-20:]) < 0.3 * np.mean(losses[:20])


def test_failing_compute_comes_out_as_itself() -> None:
    with pytest.raises(ValueError, match="reshape"):
        trained_on(2, replace(PLAN, inputs=INPUTS[:, :2]))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_adam_is_the_algorithm_of_its_paper(decay: float) -> None:
    """Adam's Algorithm 1, with the decay of AdamW's Algorithm 2, one number at a time."""
    start, history = RNG.normal(), RNG.normal(size=20).tolist()
    optimiser, weights = Adam(np.array([decay])), np.array([start])
    optimiser.rate = 0.01
    weight, first, second = start, 0.0, 0.0
    for step, gradient in enumerate(history, 1):
        weights = weights - optimiser.change(weights, np.array([gradient]))
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        weight *= 1 - 0.01 * decay
        weight -= 0.01 * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.999**step)) + 1e-8)
    assert weights.item() == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
def test_rate_goes_up_and_down_in_straight_lines_and_is_never_zero(steps: int) -> None:
    rates = [learning_rate(step, steps, 0.5) for step in range(steps)]
    assert all(0 < rate <= 0.5 for rate in rates)
    if steps == 1000:
        assert [rates[step] for step in (0, 24, 500)] == pytest.approx([0.01, 0.25, 0.25])


def test_last_to_arrive_tells_what_reducing_takes() -> None:
    late, early = Clock([9.0], [1.0, 5.0]), Clock([2.0, 3.0], [4.0, 1.0])
    assert mean_times([late, early]) == pytest.approx((7.0, 1.0 + 1.0, (0 + 3 + 4 + 0) / 2))
    assert mean_times([Clock([2.0], [0.5, 0.25])]) == (2.0, 0.75, 0.0)


def test_equal_digests_mean_equal_bits() -> None:
    a, b = np.ones((2, 3), np.float32), np.zeros(3, np.float32)
    others: list[Weights] = [{"a": a, "b": -b}, {"a": a, "c": b}, {"a": a.T, "b": b}, {"a": a}]
    digest = weights_digest({"a": a, "b": b})
    assert digest == weights_digest({"b": b.copy(), "a": a.copy()})
    assert digest not in {weights_digest(other) for other in others}


def test_matrix_products_keep_to_one_thread_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def threads() -> set[int]:
        assert (np.ones((2, 2)) @ np.ones((2, 2))).sum() == 8  # BLAS is loaded
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    before = threads()
    with one_blas_thread():
        assert threads() <= {1}
    assert threads() == before
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "threadpoolctl", None)
        with one_blas_thread():
            pass
