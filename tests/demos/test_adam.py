"""The optimiser against the algorithm as its paper writes it, one number at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aiodist.demos.adam import Adam
from aiodist.demos.schedule import learning_rate

RNG = np.random.default_rng(7)


def by_the_book(start: float, gradients: list[float], rate: float, decay: float) -> float:
    """Return where Adam's Algorithm 1 takes one weight, with the decay of AdamW's Algorithm 2."""
    weight, first, second = start, 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        weight *= 1 - rate * decay
        weight -= rate * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return weight


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_updates_are_those_of_the_algorithm(decay: float) -> None:
    start, history = RNG.normal(size=(2, 3)), RNG.normal(size=(20, 2, 3))
    weights = {"w": start.copy()}
    optimiser = Adam(decay)
    for gradient in history:
        weights = {"w": weights["w"] - optimiser.changes(weights, {"w": gradient}, 0.01)["w"]}
    expected = [[by_the_book(start[i, j], history[:, i, j].tolist(), 0.01, decay) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(weights["w"], expected, rtol=1e-12)


def test_vectors_do_not_decay() -> None:
    assert Adam(0.5).changes({"b": np.ones(3)}, {"b": np.zeros(3)}, 0.1)["b"].tolist() == [0, 0, 0]


def test_weights_and_gradients_may_be_read_only() -> None:
    gradient, weight = RNG.normal(size=(4, 4)).astype(np.float32), np.ones((4, 4), np.float32)
    gradient.setflags(write=False)
    weight.setflags(write=False)
    assert Adam(0.1).changes({"w": weight}, {"w": gradient}, 0.1)["w"].dtype == np.float32


def test_equal_updates_leave_equal_bits() -> None:
    def trained() -> bytes:
        rng = np.random.default_rng(0)
        weight = rng.normal(size=(50, 30)).astype(np.float32)
        optimiser = Adam(0.1)
        for _ in range(10):
            gradient = rng.normal(size=(50, 30)).astype(np.float32)
            weight -= optimiser.changes({"w": weight}, {"w": gradient}, 0.01)["w"]
        return weight.tobytes()

    assert trained() == trained()


def test_rate_goes_up_and_down_in_straight_lines() -> None:
    rates = [learning_rate(step, 1000, 0.5) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[24] == pytest.approx(0.25)
    assert max(rates) == pytest.approx(0.5, rel=0.06)
    assert rates[500] == pytest.approx(0.25)
    assert 0 < rates[-1] < 0.001


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_rate_of_a_short_run_is_never_zero(steps: int) -> None:
    assert all(0 < learning_rate(step, steps, 0.5) <= 0.5 for step in range(steps))
