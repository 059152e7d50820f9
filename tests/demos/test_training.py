"""The loop that every demo runs, on small models, against the same thing without replicas."""

from __future__ import annotations

from dataclasses import replace

import anyio
import numpy as np
import pytest

import aiodist
from aiodist.demos.adam import Adam
from aiodist.demos.digest import weights_digest
from aiodist.demos.loss import nats
from aiodist.demos.perceptron import Perceptron, Weights
from aiodist.demos.schedule import learning_rate
from aiodist.demos.training import Plan, Trained, examine, train_on

RNG = np.random.default_rng(11)
INPUTS = RNG.normal(size=(40, 6)).astype(np.float32)
TARGETS = INPUTS[:, :4].argmax(axis=1)
PLAN = Plan(Perceptron((6, 12, 4)), INPUTS, TARGETS, batch=15, steps=12, seed=3, rate=0.02, decay=0.1)


def trained_on(replicas: int, plan: Plan = PLAN, backend: str = "asyncio") -> tuple[tuple[Trained, ...], list[float]]:
    strategy = aiodist.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])
    heard: list[float] = []
    return anyio.run(train_on, strategy, plan, heard.append, backend=backend), heard


def trained_without_replicas(plan: Plan) -> tuple[Weights, list[float]]:
    weights, losses = dict(plan.model.init(np.random.default_rng(plan.seed))), []
    optimiser = Adam(plan.decay)
    batches = aiodist.NumpyDataset((plan.inputs, plan.targets)).shuffle(plan.seed).batch(plan.batch).repeat()
    for step, (inputs, targets) in zip(range(plan.steps), batches, strict=False):
        surprise, gradients = plan.model.nats_and_gradients(weights, inputs, targets, 1 / len(targets))
        rate = learning_rate(step, plan.steps, plan.rate)
        for name, change in optimiser.changes(weights, gradients, rate).items():
            weights[name] = weights[name] - change
        losses.append(float(surprise.mean(dtype=np.float64)))
    return weights, losses


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("replicas", [1, 2, 4, 7, 20])
def test_replicas_follow_the_run_without_them(replicas: int, backend: str) -> None:
    weights, losses = trained_without_replicas(PLAN)
    trained, heard = trained_on(replicas, backend=backend)
    assert len(trained) == replicas
    np.testing.assert_allclose(trained[0].losses, losses, rtol=1e-5)
    for name, weight in weights.items():
        np.testing.assert_allclose(trained[0].weights[name], weight, rtol=1e-3, atol=1e-4)
    assert heard == list(trained[0].losses)


@pytest.mark.parametrize("replicas", [2, 4, 7])
def test_replicas_end_with_equal_bits(replicas: int) -> None:
    trained, _ = trained_on(replicas)
    assert len({weights_digest(one.weights) for one in trained}) == 1
    assert {one.losses for one in trained} == {trained[0].losses}
    assert [one.device for one in trained] == [f"CPU:{index}" for index in range(replicas)]


def test_same_seed_gives_same_bits() -> None:
    def digest(seed: int) -> str:
        return weights_digest(trained_on(4, replace(PLAN, seed=seed))[0][0].weights)

    assert digest(3) == digest(3)
    assert digest(3) != digest(4)


def test_every_step_is_timed() -> None:
    trained, _ = trained_on(2)
    for one in trained:
        assert len(one.clock.meetings) == 3 * PLAN.steps  # the examples, the gradients, the variables
        assert one.clock.computing_seconds > 0


def test_loss_goes_down() -> None:
    trained, _ = trained_on(4, replace(PLAN, steps=200))
    assert np.mean(trained[0].losses[-20:]) < 0.3 * np.mean(trained[0].losses[:20])


def test_failing_compute_comes_out_as_itself() -> None:
    with pytest.raises(ValueError, match="matmul"):
        trained_on(2, replace(PLAN, inputs=INPUTS[:, :5]))


def test_examining_in_pieces_is_examining_at_once() -> None:
    rng = np.random.default_rng(1)
    inputs, targets = rng.normal(size=(9000, 6)), rng.integers(0, 4, 9000)
    weights = PLAN.model.init(rng)
    surprise, right = examine(PLAN.model, weights, inputs, targets)
    logits = PLAN.model.logits(weights, inputs)
    assert surprise == pytest.approx(nats(logits, targets).mean())
    assert right == pytest.approx((logits.argmax(axis=1) == targets).mean())
