"""A character language model: the last few characters, embedded and put side by side, tell the next one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aiodist.demos.loss import Array, Codes, cross_entropy
from aiodist.demos.perceptron import Perceptron, Weights


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A windowed neural language model (Bengio et al. 2003).

    Attributes:
        symbols: how many different characters there are.
        context: how many characters it looks back.
        width: the size of a character's embedding.
        hidden: the sizes of the hidden layers.
    """

    symbols: int
    context: int = 8
    width: int = 32
    hidden: tuple[int, ...] = (384, 192)

    def init(self, rng: np.random.Generator) -> Weights:
        """Draw the weights: ``embedding``, float32[symbols, width], and the layers'."""
        embedding = (0.3 * rng.standard_normal((self.symbols, self.width))).astype(np.float32)
        return {"embedding": embedding, **self._layers.init(rng)}

    def logits(self, weights: Weights, inputs: Codes) -> Array:
        """Return float[n, symbols] for windows int[n, context]."""
        return self._layers.logits(weights, self._embedded(weights, inputs))

    def nats_and_gradients(
        self, weights: Weights, inputs: Codes, targets: Codes, scale: float
    ) -> tuple[Array, Weights]:
        """Return each example's nats, float[n], and the gradient of their sum times `scale` by every weight."""
        values = self._layers.forward(weights, self._embedded(weights, inputs))
        surprise, gradient = cross_entropy(values[-1], targets, scale)
        gradients, by_inputs = self._layers.backward(weights, values, gradient)
        return surprise, {"embedding": self._by_embedding(inputs, by_inputs), **gradients}

    def _embedded(self, weights: Weights, inputs: Codes) -> Array:
        return weights["embedding"].take(inputs, axis=0).reshape(len(inputs), self.context * self.width)

    def _by_embedding(self, inputs: Codes, gradient: Array) -> Array:
        """Add up the gradients of equal characters: as a product with one-hot rows, 3 times as fast as `np.add.at`."""
        one_hot = np.zeros((inputs.size, self.symbols), gradient.dtype)
        one_hot[np.arange(inputs.size), inputs.ravel()] = 1
        by_embedding: Array = one_hot.T @ gradient.reshape(-1, self.width)
        return by_embedding

    @property
    def _layers(self) -> Perceptron:
        return Perceptron((self.context * self.width, *self.hidden, self.symbols))
