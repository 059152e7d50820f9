"""Which examples a step takes, and which of those a replica takes: the same on every replica, from the seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.intp]


def global_batches(examples: int, size: int, steps: int, seed: int) -> Iterator[Indices]:
    """Yield `steps` batches of `size` indices below `examples`: shuffled, and anew when they are used up.

    What is left over when less than a batch remains is dropped; with fewer examples than a batch needs, a batch is all
    of them.
    """
    rng = np.random.default_rng(seed)
    size = min(size, examples)
    order, used = rng.permutation(examples), 0
    for _ in range(steps):
        if used + size > examples:
            order, used = rng.permutation(examples), 0
        yield order[used : used + size]
        used += size


def part(batch: Indices, replica: int, replicas: int) -> Indices:
    """Return one replica's part of a global batch of m: consecutive, ceil(m/n) long, the last ones short or empty."""
    length = -(-len(batch) // replicas)
    return batch[replica * length : (replica + 1) * length]
