"""How the learning rate goes over a run."""

from __future__ import annotations


def learning_rate(step: int, steps: int, peak: float, warm_up: int = 50) -> float:
    """Return the rate of one step, 0-based: a line up to `peak` in `warm_up` steps, and one down to 0 at the end."""
    return peak * min((step + 1) / warm_up, 1 - step / steps)
