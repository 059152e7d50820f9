"""Cross-entropy between predicted logits and the class that came, in nats."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.floating[Any]]
Codes: TypeAlias = NDArray[np.intp]


def nats(logits: Array, targets: Codes) -> Array:
    """Return each example's surprise, float[n], for logits float[n, classes] and targets int[n]."""
    shifted, totals = _shifted(logits)
    chosen: Array = np.log(totals) - shifted[np.arange(len(targets)), targets]
    return chosen


def cross_entropy(logits: Array, targets: Codes, scale: float) -> tuple[float, Array]:
    """Return the sum of the examples' nats times `scale`, and its gradient by the logits.

    With ``scale = 1 / n`` that is the mean over n examples.
    """
    rows = np.arange(len(targets))
    shifted, totals = _shifted(logits)
    loss = scale * float(np.sum(np.log(totals) - shifted[rows, targets], dtype=np.float64))
    gradient: Array = np.exp(shifted)
    gradient *= (scale / totals)[:, None]
    gradient[rows, targets] -= scale
    return loss, gradient


def _shifted(logits: Array) -> tuple[Array, Array]:
    """Return logits whose row maximum is 0, so that no exponential overflows, and the rows' sums of exponentials."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted, np.exp(shifted).sum(axis=1)
