"""Short names for weights: equal exactly where every bit of them is."""

from __future__ import annotations

import hashlib

from aiodist.demos.perceptron import Weights


def weights_digest(weights: Weights) -> str:
    """Return the first 16 hexadecimal digits of the sha256 over names, shapes, dtypes and bytes."""
    total = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        total.update(f"{name} {weight.dtype.str} {weight.shape}\n".encode())
        total.update(weight.tobytes())
    return total.hexdigest()[:16]
