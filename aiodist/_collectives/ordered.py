"""Ordered folds: the same bits however the replicas are laid out over workers.

The fold is a balanced tree over positions: a node covers those from k·2^h to (k+1)·2^h, and is the fold of its two
halves, or the one that exists. A worker contributes the largest nodes that cover no positions but its own; what all
contribute goes up the rest of the tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

import aiodist_kernels as kernels
from aiodist_kernels import ReduceOp

Array = np.ndarray[Any, Any]
Tree: TypeAlias = "int | tuple[Tree, Tree]"
"""The place of an array, or two halves."""

_Node: TypeAlias = tuple[int, int]
"""The first position that a node covers, and how many."""


class Forest:
    """What each worker contributes to an ordered fold, by rank ``rows`` nodes, and how it goes up the tree."""

    def __init__(self, ids: Sequence[Sequence[int]]) -> None:
        size = sum(map(len, ids))
        nodes = [_largest_nodes(own, size) for own in ids]
        self.rows = list(map(len, nodes))
        place_of = {node: place for place, node in enumerate(chain(*nodes))}
        self._nodes, self._ids = nodes, ids
        self._top = _tree((0, _power(size)), place_of.get)

    def parts(self, rank: int) -> list[tuple[slice, Tree]]:
        """Return, for each node of a worker, which of its replicas it covers, and how they are folded."""
        own = self._ids[rank]
        found = []
        for begin, width in self._nodes[rank]:
            low, high = bisect_left(own, begin), bisect_left(own, begin + width)
            place_of = {(position, 1): place for place, position in enumerate(own[low:high])}
            tree = _tree((begin, width), place_of.get)
            assert tree is not None
            found.append((slice(low, high), tree))
        return found

    def combine(self, op: ReduceOp, rows: Sequence[Array]) -> Array:
        """Return the fold of what all workers contribute, by rank; it lies in one of these arrays."""
        assert self._top is not None
        return _up(op, self._top, rows)


@lru_cache(maxsize=256)
def forest_of(ids: tuple[tuple[int, ...], ...]) -> Forest:
    """Return what workers with replicas at these positions contribute."""
    return Forest(ids)


def fold_into(tree: Tree, op: ReduceOp, parts: Sequence[Array], out: Array) -> None:
    """Fold arrays along a tree, leaving them as they are."""
    if isinstance(tree, int):
        out[...] = parts[tree]
        return
    halves: list[Array] = []
    for half in tree:
        if isinstance(half, int):
            halves.append(parts[half])
            continue
        room = np.empty_like(out) if any(found is out for found in halves) else out
        fold_into(half, op, parts, room)
        halves.append(room)
    kernels.reduce(op, halves, out=out)


def _up(op: ReduceOp, tree: Tree, parts: Sequence[Array]) -> Array:
    """Return the fold of arrays along a tree, in the memory of the leftmost."""
    if isinstance(tree, int):
        return parts[tree]
    left, right = (_up(op, half, parts) for half in tree)
    return kernels.reduce(op, [left, right], out=left)


def _tree(node: _Node, place_of: Callable[[_Node], int | None]) -> Tree | None:
    """Return the tree below a node, down to nodes that have a place; None where it covers none."""
    place = place_of(node)
    if place is not None:
        return place
    begin, width = node
    if width == 1:
        return None
    left = _tree((begin, width // 2), place_of)
    right = _tree((begin + width // 2, width // 2), place_of)
    if left is None or right is None:
        return left if right is None else right
    return left, right


def _power(count: int) -> int:
    """Return the least power of two that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def _largest_nodes(own: Sequence[int], size: int) -> list[_Node]:
    """Return the nodes that cover these positions, and of all others only such as do not exist."""
    found: list[_Node] = []

    def visit(begin: int, width: int) -> None:
        covered = bisect_left(own, begin + width) - bisect_left(own, begin)
        if not covered:
            return
        if covered == min(begin + width, size) - begin:
            found.append((begin, width))
            return
        visit(begin, width // 2)
        visit(begin + width // 2, width // 2)

    visit(0, _power(size))
    return found
