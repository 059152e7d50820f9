"""Dense layers with rectifiers between them, forward and backward, on plain NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from aiodist.demos.loss import Array, Codes, cross_entropy

Weights: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Perceptron:
    """A stack of dense layers: float[n, sizes[0]] in, logits float[n, sizes[-1]] out.

    Layer k has the weights ``w<k>``, float32[sizes[k], sizes[k + 1]], and ``b<k>``, float32[sizes[k + 1]].
    """

    sizes: tuple[int, ...]

    def init(self, rng: np.random.Generator) -> Weights:
        """Draw weights (He et al. 2015); the last layer's are small, so that training starts near uniform."""
        weights: dict[str, Array] = {}
        for layer, (inputs, outputs) in enumerate(pairwise(self.sizes)):
            spread = np.sqrt((0.1 if layer == self._last else 2.0) / inputs)
            weights[f"w{layer}"] = (spread * rng.standard_normal((inputs, outputs))).astype(np.float32)
            weights[f"b{layer}"] = np.zeros(outputs, np.float32)
        return weights

    def logits(self, weights: Weights, inputs: Array) -> Array:
        """Return the last layer's output."""
        return self.forward(weights, inputs)[-1]

    def nats_and_gradients(
        self, weights: Weights, inputs: Array, targets: Codes, scale: float
    ) -> tuple[Array, Weights]:
        """Return each example's nats, float[n], and the gradient of their sum times `scale` by every weight."""
        values = self.forward(weights, inputs)
        surprise, gradient = cross_entropy(values[-1], targets, scale)
        gradients, _ = self.backward(weights, values, gradient)
        return surprise, gradients

    def forward(self, weights: Weights, inputs: Array) -> list[Array]:
        """Return what goes into each layer, and the logits last."""
        values = [inputs]
        for layer in range(self._last + 1):
            value = values[-1] @ weights[f"w{layer}"]
            value += weights[f"b{layer}"]
            if layer < self._last:
                np.maximum(value, 0, out=value)
            values.append(value)
        return values

    def backward(self, weights: Weights, values: list[Array], gradient: Array) -> tuple[Weights, Array]:
        """Carry the gradient by the logits back; return those by every weight, and by the inputs."""
        gradients: dict[str, Array] = {}
        for layer in range(self._last, -1, -1):
            gradients[f"w{layer}"] = values[layer].T @ gradient
            gradients[f"b{layer}"] = gradient.sum(axis=0)
            gradient = gradient @ weights[f"w{layer}"].T
            if layer:
                gradient *= values[layer] > 0
        return gradients, gradient

    @property
    def _last(self) -> int:
        return len(self.sizes) - 2
