"""Cross-entropy between predicted logits and the class that came, in nats."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.floating[Any]]
Codes: TypeAlias = NDArray[np.intp]


def nats(logits: Array, targets: Codes) -> Array:
    """Return each example's surprise, float[n], for logits float[n, classes] and targets int[n]."""
    return _surprise(*_shifted(logits), targets)


def cross_entropy(logits: Array, targets: Codes, scale: float) -> tuple[Array, Array]:
    """Return each example's nats, float[n], and the gradient of their sum times `scale` by the logits."""
    shifted, totals = _shifted(logits)
    gradient: Array = np.exp(shifted)
    gradient *= (scale / totals)[:, None]
    gradient[np.arange(len(targets)), targets] -= scale
    return _surprise(shifted, totals, targets), gradient


def _surprise(shifted: Array, totals: Array, targets: Codes) -> Array:
    chosen: Array = np.log(totals) - shifted[np.arange(len(targets)), targets]
    return chosen


def _shifted(logits: Array) -> tuple[Array, Array]:
    """Return logits whose row maximum is 0, so that no exponential overflows, and the rows' sums of exponentials."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted, np.exp(shifted).sum(axis=1)
