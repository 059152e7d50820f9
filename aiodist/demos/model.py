"""What a training loop asks of a model."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from aiodist.demos.loss import Array, Codes
from aiodist.demos.perceptron import Weights


class Model(Protocol):
    """A classifier whose weights are kept outside of it."""

    def init(self, rng: np.random.Generator) -> Weights:
        """Draw the first weights."""
        ...

    def logits(self, weights: Weights, inputs: Any) -> Array:
        """Return float[n, classes]."""
        ...

    def nats_and_gradients(self, weights: Weights, inputs: Any, targets: Codes, scale: float) -> tuple[Array, Weights]:
        """Return each example's nats, float[n], and the gradient of their sum times `scale` by every weight."""
        ...
