"""The buffers that replicas bring for a result with ``out=``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

Array = np.ndarray[Any, Any]


class OutBuffers(NamedTuple):
    """A replica's own buffers for a result: the leaves, NumPy arrays or `DeviceBuffer`s, and the nest they stand in."""

    leaves: list[Any]
    nest: Any


def are_entangled(columns: Sequence[Sequence[Array]], targets: Sequence[Array]) -> bool:
    """Return whether writing one leaf's result may change what another leaf is made of, or its result.

    That a leaf's result overlaps what it is itself made of does not count: the kernels know what to do then. Memory is
    compared by its bounds.

    Args:
        columns: for each leaf, what the replicas brought.
        targets: for each leaf, where its result is to be written.
    """
    if len(targets) == 1:
        return False
    spans = [(*byte_bounds(target), place, True) for place, target in enumerate(targets) if target.size]
    for place, leaves in enumerate(columns):
        spans += [(*byte_bounds(leaf), place, False) for leaf in leaves if leaf.size]
    ends: dict[int, tuple[int, int]] = {}  # by leaf, where what reaches farthest ends: anything; a target
    for start, end, place, is_target in sorted(spans):
        for other, (any_end, target_end) in ends.items():
            if other != place and start < (any_end if is_target else target_end):
                return True
        any_end, target_end = ends.get(place, (0, 0))
        ends[place] = max(any_end, end), max(target_end, end) if is_target else target_end
        ends = {place: both for place, both in ends.items() if both[0] > start}
    return False
