"""The optimiser."""

from __future__ import annotations

import math

import numpy as np

from aiodist.demos.loss import Array
from aiodist.demos.perceptron import Weights


class Adam:
    """Adam (Kingma and Ba 2015) with decoupled weight decay on matrices (Loshchilov and Hutter 2019).

    Args:
        weights: what it will update, in place.
        decay: how much of a matrix goes at each step, times the rate; vectors keep all.
        beta1: how long the mean of gradients remembers.
        beta2: how long the mean of their squares remembers.
        epsilon: what keeps a division by zero off.
    """

    def __init__(
        self, weights: Weights, *, decay: float = 0.0, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        self.decay, self.beta1, self.beta2, self.epsilon = decay, beta1, beta2, epsilon
        self.steps = 0
        self._weights = weights
        self._means = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self._squares = {name: np.zeros_like(weight) for name, weight in weights.items()}

    def update(self, gradients: Weights, rate: float) -> None:
        """Take one step of the given learning rate down the gradients, which stay as they are."""
        self.steps += 1
        for name, weight in self._weights.items():
            change = self._direction(name, gradients[name])
            change *= rate
            if weight.ndim == 2:
                np.multiply(weight, 1 - rate * self.decay, out=weight)
            np.subtract(weight, change, out=weight)

    def _direction(self, name: str, gradient: Array) -> Array:
        """Take the gradient into both means, and return their quotient, corrected for their start at zero."""
        mean, square = self._means[name], self._squares[name]
        mean += (1 - self.beta1) * (gradient - mean)
        square += (1 - self.beta2) * (gradient * gradient - square)
        divisor = np.sqrt(square)
        divisor *= 1 / math.sqrt(1 - self.beta2**self.steps)
        divisor += self.epsilon
        divisor *= 1 - self.beta1**self.steps
        return np.divide(mean, divisor, out=divisor)
