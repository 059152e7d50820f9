"""The optimiser."""

from __future__ import annotations

import math

import numpy as np

from aiodist.demos.loss import Array
from aiodist.demos.perceptron import Weights


class Adam:
    """Adam (Kingma and Ba 2015) with decoupled weight decay on matrices (Loshchilov and Hutter 2019).

    Args:
        decay: how much of a matrix goes at each step, times the rate; vectors keep all.
        beta1: how long the mean of gradients remembers.
        beta2: how long the mean of their squares remembers.
        epsilon: what keeps a division by zero off.
    """

    def __init__(self, decay: float = 0.0, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> None:
        self.decay, self.beta1, self.beta2, self.epsilon = decay, beta1, beta2, epsilon
        self.steps = 0
        self._moments: dict[str, tuple[Array, Array]] = {}

    def changes(self, weights: Weights, gradients: Weights, rate: float) -> Weights:
        """Take one step of a learning rate down the gradients; return what to subtract from weights."""
        self.steps += 1
        return {name: self._change(name, weight, gradients[name], rate) for name, weight in weights.items()}

    def _change(self, name: str, weight: Array, gradient: Array, rate: float) -> Array:
        change = self._direction(name, gradient)
        change *= rate
        if weight.ndim == 2:
            change += rate * self.decay * weight
        return change

    def _direction(self, name: str, gradient: Array) -> Array:
        """Take the gradient into both means, and return their quotient, corrected for their start at zero."""
        mean, square = self._moments.setdefault(name, (np.zeros_like(gradient), np.zeros_like(gradient)))
        mean += (1 - self.beta1) * (gradient - mean)
        square += (1 - self.beta2) * (gradient * gradient - square)
        divisor = np.sqrt(square)
        divisor *= 1 / math.sqrt(1 - self.beta2**self.steps)
        divisor += self.epsilon
        divisor *= 1 - self.beta1**self.steps
        return np.divide(mean, divisor, out=divisor)
