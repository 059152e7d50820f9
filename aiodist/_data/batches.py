"""How a global batch is cut into per-replica ones, how those are grouped to a step, and what can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodist._arrays import nests
from aiodist._arrays.slices import IndexedSlices
from aiodist._arrays.values import DistributedValues, PerReplica, regroup_data, split


def cut(batch: Any, num_replicas: int) -> Any:
    """Cut a global batch of m into n consecutive parts of ceil(m/n), the last ones short or empty."""
    leaves, structure = nests.flatten_with_none(batch)
    length = -(-common_size(leaves, structure, "batch") // num_replicas)
    if num_replicas == 1:
        return batch
    return structure.unflatten(_parts(leaf, length, num_replicas) for leaf in leaves)


def cut_for(mine: range, num_replicas: int, batches: Sequence[Any]) -> Any:
    """Return the parts of a step's only batch that belong to these of the replicas."""
    (batch,) = batches
    parts = cut(batch, num_replicas)
    if len(mine) == num_replicas:
        return parts
    return regroup_data([*split(parts, num_replicas)[mine.start : mine.stop]], "batches", mine)


def _parts(leaf: Any, length: int, count: int) -> PerReplica[Any] | None:
    if leaf is None:
        return None
    return PerReplica([leaf[k * length : (k + 1) * length] for k in range(count)])


def group(batches: Sequence[Any], num_replicas: int) -> Any:
    """Group the batches of one step: the k-th is replica k's; replicas that are left without one get no rows."""
    missing = num_replicas - len(batches)
    if missing:
        batches = [*batches, *[without_rows(batches[0])] * missing]
    return regroup_data(batches, "batches")


def without_rows(batch: Any) -> Any:
    """Return a batch like this one, of no rows."""
    leaves, structure = nests.flatten_with_none(batch)
    common_size(leaves, structure, "batch")
    return structure.unflatten(None if leaf is None else leaf[:0] for leaf in leaves)


def common_size(leaves: Sequence[Any], structure: nests.Structure, root: str) -> int:
    """Return the size along the first axis that all arrays of a nest have in common."""

    def path(index: int) -> str:
        return nests.leaf_paths(structure, root)[index]

    first, size = -1, 0
    for index, leaf in enumerate(leaves):
        if leaf is None:
            continue
        shape = getattr(leaf, "shape", None)
        if not isinstance(shape, tuple) or isinstance(leaf, (DistributedValues, IndexedSlices)):
            kind = type(leaf)
            raise TypeError(
                f"{path(index)} must be an array, whose rows are examples, got an object of type "
                f"{kind.__module__}.{kind.__qualname__}; a list of numbers becomes one with np.asarray"
            )
        if not shape:
            raise ValueError(
                f"{path(index)} must have a first axis, along which the examples lie, got a 0-dimensional array; "
                "is the dataset batched, e.g. with .batch(32)?"
            )
        if first < 0:
            first, size = index, int(shape[0])
        elif shape[0] != size:
            raise ValueError(
                f"the arrays of {root} must have the same size along their first axis; "
                f"{path(first)} has {size}, {path(index)} has {int(shape[0])}"
            )
    if first < 0:
        raise ValueError(f"{root} must hold at least one array, got {nests.text(structure)}")
    return size
