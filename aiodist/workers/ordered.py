"""Ordered reductions: the same bits however the replicas are laid out over workers.

The sum is a balanced tree over replica ids: a node covers ids from k·2^h to (k+1)·2^h, and is the reduction of its two
halves, or the one that has replicas. A worker brings the largest nodes that have no replicas but its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

import aiodist_kernels as kernels
from aiodist.workers.communicator import Array
from aiodist.workers.layout import Layout
from aiodist.workers.reduction import Folding
from aiodist_kernels import ReduceOp

Node: TypeAlias = tuple[int, int]
"""The first id that a node covers, and how many."""

Tree: TypeAlias = "int | tuple[Tree, Tree]"
"""The index of a part, or two halves."""


class TreeFolding(Folding):
    """What each worker brings to an ordered reduction, and how that goes up the tree.

    Args:
        layout: the replicas' layout.
    """

    def __init__(self, layout: Layout) -> None:
        everyone = sorted(chain(*layout.places))
        nodes = [_largest_nodes(ids, everyone, layout.size) for ids in layout.places]
        super().__init__(layout.rank, list(map(len, nodes)))
        self.parts = [_part(node, layout.mine) for node in nodes[layout.rank]]
        index_of = {node: index for index, node in enumerate(chain(*nodes))}
        self._tree = _tree((0, _power(layout.size)), index_of.get)

    def fold(self, op: ReduceOp, parts: Sequence[Array]) -> Array:
        """Return the root of the tree, which lies in one of the parts."""
        assert self._tree is not None
        return _up(op, self._tree, parts)


_known: Final[WeakKeyDictionary[Layout, TreeFolding]] = WeakKeyDictionary()


def tree_of(layout: Layout) -> TreeFolding:
    """Return the tree over the replicas of a layout."""
    found = _known.get(layout)
    if found is None:
        found = _known[layout] = TreeFolding(layout)
    return found


def _part(node: Node, ids: Sequence[int]) -> tuple[slice, Callable[[ReduceOp, Sequence[Array], Array], None]]:
    """Return which of a worker's replicas a node is of, and how it is made of them."""
    begin, end = bisect_left(ids, node[0]), bisect_left(ids, node[0] + node[1])
    index_of = {(replica_id, 1): index for index, replica_id in enumerate(ids[begin:end])}
    tree = _tree(node, index_of.get)
    assert tree is not None
    return slice(begin, end), partial(_fold_into, tree)


def _tree(node: Node, index_of: Callable[[Node], int | None]) -> Tree | None:
    """Return the tree below a node, down to nodes that have an index; None where there are no replicas."""
    index = index_of(node)
    if index is not None:
        return index
    begin, width = node
    if width == 1:
        return None
    left = _tree((begin, width // 2), index_of)
    right = _tree((begin + width // 2, width // 2), index_of)
    if left is None or right is None:
        return left if right is None else right
    return left, right


def _up(op: ReduceOp, tree: Tree, parts: Sequence[Array]) -> Array:
    """Return the reduction of parts along a tree, in the memory of the leftmost."""
    if isinstance(tree, int):
        return parts[tree]
    left, right = (_up(op, half, parts) for half in tree)
    return kernels.reduce(op, [left, right], out=left)


def _fold_into(tree: Tree, op: ReduceOp, parts: Sequence[Array], out: Array) -> None:
    """Reduce parts along a tree, leaving them as they are."""
    if isinstance(tree, int):
        out[...] = parts[tree]
        return
    first, second = tree
    left = _made(first, op, parts, out)
    right = _made(second, op, parts, out if left is not out else None)
    kernels.reduce(op, [left, right], out=out)


def _made(tree: Tree, op: ReduceOp, parts: Sequence[Array], room: Array | None) -> Array:
    """Return the reduction of parts along a tree: a part as it is, or in the room."""
    if isinstance(tree, int):
        return parts[tree]
    room = np.empty_like(parts[0]) if room is None else room
    _fold_into(tree, op, parts, room)
    return room


def _power(count: int) -> int:
    """Return the least power of two that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def _largest_nodes(ids: Sequence[int], everyone: Sequence[int], size: int) -> list[Node]:
    """Return the nodes, as begin and width, that have all these replicas, and of ``everyone`` no others."""
    found: list[Node] = []

    def visit(begin: int, width: int) -> None:
        own = bisect_left(ids, begin + width) - bisect_left(ids, begin)
        if not own:
            return
        if own == bisect_left(everyone, begin + width) - bisect_left(everyone, begin):
            found.append((begin, width))
            return
        visit(begin, width // 2)
        visit(begin + width // 2, width // 2)

    visit(0, _power(size))
    return found
