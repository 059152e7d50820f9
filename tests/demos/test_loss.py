"""Cross-entropy against its definition, and its gradient against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aiodist.demos.loss import cross_entropy, nats
from tests.demos.differences import assert_close, numerical_gradients

RNG = np.random.default_rng(5)
LOGITS = RNG.normal(size=(7, 5))
TARGETS = RNG.integers(0, 5, 7)


def test_nats_are_minus_the_logarithm_of_the_softmax() -> None:
    for row, target, surprise in zip(LOGITS.tolist(), TARGETS.tolist(), nats(LOGITS, TARGETS).tolist(), strict=True):
        assert surprise == pytest.approx(-math.log(math.exp(row[target]) / sum(map(math.exp, row))))


def test_equal_logits_mean_uniform() -> None:
    assert nats(np.zeros((2, 8)), np.array([0, 7])).tolist() == pytest.approx([math.log(8)] * 2)


def test_cross_entropy_gives_each_examples_nats() -> None:
    surprise, _ = cross_entropy(LOGITS, TARGETS, 0.3)
    assert surprise.tolist() == nats(LOGITS, TARGETS).tolist()


def test_gradient_is_that_of_finite_differences() -> None:
    _, gradient = cross_entropy(LOGITS, TARGETS, 0.3)
    expected = numerical_gradients(lambda w: 0.3 * float(nats(w["logits"], TARGETS).sum()), {"logits": LOGITS.copy()})
    assert_close({"logits": gradient}, expected)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, 0.0], [-1e4, 1e4]], np.float32)
    surprise, gradient = cross_entropy(logits, np.array([0, 0]), 1.0)
    assert surprise.tolist() == pytest.approx([0, 2e4])
    assert gradient.tolist() == [[0, 0], [-1, 1]]


def test_logits_stay_as_they_are() -> None:
    logits = LOGITS.copy()
    cross_entropy(logits, TARGETS, 1.0)
    assert np.array_equal(logits, LOGITS)


def test_no_examples_give_no_nats_and_no_gradient() -> None:
    surprise, gradient = cross_entropy(np.zeros((0, 5), np.float32), np.zeros(0, np.intp), 1.0)
    assert surprise.shape == (0,)
    assert gradient.shape == (0, 5)
