"""Gradients by finite differences: the reference that knows nothing of how a model carries them back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aiodist.demos.perceptron import Weights


def in_double(weights: Weights) -> Weights:
    """Return the weights in float64, where differences of 1e-6 can be told, and off the rectifiers' kinks.

    With biases of zero a unit whose inputs are all cut off stands exactly at its kink, where there is no derivative.
    """
    rng = np.random.default_rng(9)
    return {name: weight + 0.1 * rng.standard_normal(weight.shape) for name, weight in weights.items()}


def numerical_gradients(loss: Callable[[Weights], float], weights: Weights, by: float = 1e-6) -> Weights:
    """Return (loss(w + by) - loss(w - by)) / (2 by) for every element of every weight."""
    gradients = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        for index in np.ndindex(weight.shape):
            kept = weight[index]
            weight[index] = kept + by
            above = loss(weights)
            weight[index] = kept - by
            gradients[name][index] = (above - loss(weights)) / (2 * by)
            weight[index] = kept
    return gradients


def assert_close(actual: Weights, expected: Weights, tolerance: float = 1e-7) -> None:
    """Compare two sets of gradients, name by name."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=tolerance, err_msg=name)
