"""Both models: gradients against finite differences, and parts of a batch against the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiodist.demos.language_model import LanguageModel
from aiodist.demos.loss import nats
from aiodist.demos.model import Model
from aiodist.demos.perceptron import Perceptron, Weights
from tests.demos.differences import assert_close, in_double, numerical_gradients

RNG = np.random.default_rng(2)
CASES: dict[str, tuple[Model, Any, Any]] = {
    "one layer": (Perceptron((4, 3)), RNG.normal(size=(6, 4)), RNG.integers(0, 3, 6)),
    "three layers": (Perceptron((4, 6, 5, 3)), RNG.normal(size=(6, 4)), RNG.integers(0, 3, 6)),
    "language": (
        LanguageModel(symbols=5, context=3, width=2, hidden=(6, 4)),
        RNG.integers(0, 5, (9, 3)),
        RNG.integers(0, 5, 9),
    ),
}
every_model = pytest.mark.parametrize(("model", "inputs", "targets"), CASES.values(), ids=CASES)


@every_model
def test_gradients_are_those_of_finite_differences(model: Model, inputs: Any, targets: Any) -> None:
    weights = in_double(model.init(np.random.default_rng(0)))
    surprise, gradients = model.nats_and_gradients(weights, inputs, targets, 0.3)
    assert surprise.tolist() == pytest.approx(nats(model.logits(weights, inputs), targets).tolist())

    def total(changed: Weights) -> float:
        return 0.3 * float(nats(model.logits(changed, inputs), targets).sum())

    assert_close(gradients, numerical_gradients(total, weights))


@every_model
@pytest.mark.parametrize("replicas", [1, 2, 4, 5, 12])
def test_sum_over_parts_is_that_over_examples(model: Model, inputs: Any, targets: Any, replicas: int) -> None:
    weights = in_double(model.init(np.random.default_rng(0)))
    surprise, whole = model.nats_and_gradients(weights, inputs, targets, 0.3)
    parts = [
        model.nats_and_gradients(weights, inputs[mine], targets[mine], 0.3)
        for mine in np.array_split(np.arange(len(targets)), replicas)  # more replicas than examples: some have none
    ]
    np.testing.assert_allclose(np.concatenate([one for one, _ in parts]), surprise)
    assert_close({name: np.sum([one[name] for _, one in parts], axis=0) for name in whole}, whole, 1e-12)


@every_model
def test_first_weights_are_float32_near_uniform_and_of_the_seed(model: Model, inputs: Any, targets: Any) -> None:
    weights, again = (model.init(np.random.default_rng(1)) for _ in range(2))
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    surprise, _ = model.nats_and_gradients(weights, inputs, targets, 0.3)
    assert surprise.mean() == pytest.approx(np.log(model.logits(weights, inputs).shape[1]), rel=0.3)


def test_language_model_sees_the_order_of_characters() -> None:
    model = LanguageModel(symbols=5, context=3)
    weights = model.init(np.random.default_rng(0))
    forth, back = model.logits(weights, np.array([[0, 1, 2], [2, 1, 0]]))
    assert not np.allclose(forth, back)
