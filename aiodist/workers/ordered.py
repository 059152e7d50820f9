"""Ordered reductions: the same bits however the replicas are laid out over workers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

import aiodist_kernels as kernels
from aiodist.workers.communicator import Array, Communicator
from aiodist.workers.layout import Layout
from aiodist.workers.transfers import Reduction, Steps, as_bytes, gather_shares, shares_of
from aiodist_kernels import ReduceOp


class OrderedReduction(Reduction):
    """A reduction that gives the same bits however the replicas are laid out over workers.

    The sum is a balanced tree over replica ids: a node covers ids from k·2^h to (k+1)·2^h, and is the reduction of its
    two halves, or the one that has replicas. A worker brings the largest nodes that have no replicas but its own.

    Args:
        op: SUM, PRODUCT, MIN or MAX.
        layout: the replicas' layout.
        values: by array, the local replicas' parts, in their order.
    """

    def __init__(self, op: ReduceOp, layout: Layout, values: Sequence[Sequence[Array]]) -> None:
        self._layout = layout
        everyone = sorted(chain(*layout.places))
        self._nodes = [_largest_nodes(ids, everyone, layout.size) for ids in layout.places]
        own = [
            np.stack([_subtree(op, node, layout.mine, column) for node in self._nodes[layout.rank]])
            for column in values
        ]
        super().__init__(op, own)
        self.room = max(map(len, self._nodes)) * sum(array[0].nbytes for array in own)

    def from_records(self, parts: Sequence[memoryview]) -> list[Array]:
        """Return the arrays, reduced along the tree."""
        totals, at = [], [0] * len(parts)
        for pack in self._packs:
            shapes = [self._arrays[index].shape[1:] for index in pack]
            dtype = self._arrays[pack[0]].dtype
            for shape in shapes:
                nodes: dict[tuple[int, int], Array] = {}
                for worker, part in enumerate(parts):
                    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
                    for node in self._nodes[worker]:
                        data = bytearray(part[at[worker] : at[worker] + size])
                        nodes[node] = np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
                        at[worker] += size
                totals.append(self._root(nodes))
        return self._in_order(totals)

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None) -> Steps[list[Array]]:  # noqa: ARG002
        """Give each worker a share of the elements of every node, let it go up the tree, and gather the shares."""
        totals = []
        for pack in self._packs:
            for index in pack:
                stacked = self._arrays[index]
                total = yield from self._one(communicator, stacked.reshape(len(stacked), -1))
                totals.append(total.reshape(stacked.shape[1:]))
        return self._in_order(totals)

    def _one(self, communicator: Communicator, stacked: Array) -> Steps[Array]:
        shares = shares_of(stacked.shape[1], communicator.size)
        bounds = np.cumsum([0, *shares])
        send = np.concatenate([stacked[:, a:b].reshape(-1) for a, b in pairwise(bounds)])
        own, item, rank = shares[communicator.rank], stacked.itemsize, communicator.rank
        counts = [share * len(self._nodes[rank]) * item for share in shares]
        received_counts = [own * len(nodes) * item for nodes in self._nodes]
        received = np.empty(sum(received_counts) // item, stacked.dtype)
        yield communicator.ialltoallv(as_bytes(send), counts, as_bytes(received), received_counts)
        nodes = [node for worker in self._nodes for node in worker]
        total = self._root(dict(zip(nodes, received.reshape(len(nodes), own), strict=True)))
        return (yield from gather_shares(communicator, total, shares))

    def _root(self, nodes: dict[tuple[int, int], Array]) -> Array:
        return np.asarray(_up(self._op, (0, _power(self._layout.size)), nodes))

    def _in_order(self, totals: Sequence[Array]) -> list[Array]:
        order = [index for pack in self._packs for index in pack]
        found = dict(zip(order, totals, strict=True))
        return [found[index] for index in range(len(order))]


def _power(count: int) -> int:
    """Return the least power of two that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def _largest_nodes(ids: Sequence[int], everyone: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return the nodes, as begin and width, that have all these replicas, and of ``everyone`` no others."""
    found: list[tuple[int, int]] = []

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


def _subtree(op: ReduceOp, node: tuple[int, int], ids: Sequence[int], values: Sequence[Array]) -> Array:
    leaves = {(replica_id, 1): value for replica_id, value in zip(ids, values, strict=True)}
    found = _up(op, node, leaves)
    assert found is not None
    return found


def _up(op: ReduceOp, node: tuple[int, int], known: dict[tuple[int, int], Array]) -> Array | None:
    """Return the value of a node of the tree, from those of nodes below it; None where there are no replicas."""
    if node in known:
        return known[node]
    begin, width = node
    if width == 1:
        return None
    left = _up(op, (begin, width // 2), known)
    right = _up(op, (begin + width // 2, width // 2), known)
    if left is None or right is None:
        return left if right is None else right
    return kernels.reduce(op, [left, right])
