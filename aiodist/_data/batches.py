"""Batches: how a global batch is cut, and how the batches of a step are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiodist._arrays import nests
from aiodist._arrays.values import DistributedValues, IndexedSlices, PerReplica, regroup_data


def cut(batch: Any, num_replicas: int, own: range) -> Any:
    """Cut a global batch of m examples into n parts of ceil(m/n), the last short or empty; return those of ``own``."""
    leaves, structure = nests.flatten_with_none(batch)
    length = -(-common_size(leaves, structure, "batch") // num_replicas)
    if num_replicas == 1:
        return batch

    def parts(leaf: Any) -> Any:
        each = [None if leaf is None else leaf[k * length : (k + 1) * length] for k in own]
        return each[0] if leaf is None or len(each) == 1 else PerReplica(each)

    return structure.unflatten(map(parts, leaves))


def group(batches: Sequence[Any], num_replicas: int) -> Any:
    """Group the batches of a step, of which the k-th is replica k's; the other replicas get one without rows."""
    missing = num_replicas - len(batches)
    return regroup_data([*batches, *[without_rows(batches[0]) for _ in range(missing)]], "batches")


def without_rows(batch: Any) -> Any:
    """Return a batch like this one without rows."""
    leaves, structure = nests.flatten_with_none(batch)
    common_size(leaves, structure, "batch")
    return structure.unflatten(None if leaf is None else leaf[:0] for leaf in leaves)


def common_size(leaves: Sequence[Any], structure: nests.Structure, root: str) -> int:
    """Return the common size of a nest's arrays along the first axis."""
    sizes: dict[int, int] = {}  # the first leaf of each size
    for index, leaf in enumerate(leaves):
        if leaf is None:
            continue
        shape = getattr(leaf, "shape", None)
        if not isinstance(shape, tuple) or isinstance(leaf, (DistributedValues, IndexedSlices)):
            raise TypeError(
                f"{nests.leaf_paths(structure, root)[index]} must be an array, whose rows are examples, got an object "
                f"of type {type(leaf).__qualname__}; a list of numbers becomes one with np.asarray"
            )
        if not shape:
            raise ValueError(
                f"{nests.leaf_paths(structure, root)[index]} must have a first axis, along which the examples lie, got "
                "a 0-dimensional array; is the dataset batched, e.g. with .batch(32)?"
            )
        sizes.setdefault(int(shape[0]), index)
    if len(sizes) != 1:
        paths = nests.leaf_paths(structure, root)
        found = ", ".join(f"{paths[index]} has {size}" for size, index in sizes.items())
        raise ValueError(
            f"{root} must hold arrays, all of the same size along their first axis; {found or 'there are none'}"
        )
    return next(iter(sizes))
