"""Small reductions: one array that travels in the record, the shortest way. What they give is what others give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import aiodist_kernels as kernels
from aiodist.workers.communicator import Array, Communicator
from aiodist.workers.leaves import Leaf
from aiodist.workers.reduction import Folding, Reduction
from aiodist.workers.transfers import Hands, OfFixedSize, Steps
from aiodist_kernels import ReduceOp
from aiodist_kernels.rules import Finish, Rule


class SmallReduction(OfFixedSize):
    """An array to be reduced over the workers.

    Args:
        op: the reduce op.
        rule: how it is reduced.
        parts: the local replicas', in the rule's dtype.
        replicas: how many replicas there are over all workers.
    """

    __slots__ = ("_fold", "_parts", "_replicas", "_rule", "room")

    def __init__(self, op: ReduceOp, rule: Rule, parts: Sequence[Array], replicas: int) -> None:
        self._fold = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self._rule = rule
        self._parts = parts
        self._replicas = replicas
        self.room = parts[0].size * rule.accumulator.itemsize

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return whether it fits, which is the same on every worker."""
        return self.room <= room

    @property
    def data(self) -> Array:
        """What the local replicas' come to."""
        parts = [np.ascontiguousarray(part, self._rule.accumulator) for part in self._parts]
        total = parts[0] if len(parts) == 1 else kernels.reduce_alike(self._fold, parts)
        return total.reshape(-1).view(np.uint8)

    def from_records(self, parts: Sequence[memoryview]) -> list[Array]:
        """Return the result, of what stands in all workers' records."""
        accumulator = self._rule.accumulator
        rows = [np.frombuffer(part, accumulator) for part in parts]
        total = kernels.reduce_alike(self._fold, rows) if len(rows) > 1 else rows[0].copy()
        out = total
        if self._rule.finish is not Finish.NOTHING or self._rule.result is not accumulator:
            out = total if self._rule.result == accumulator else np.empty(total.size, self._rule.result)
            self._leaf().finish(total, self._replicas, out)
        out = out.reshape(self._parts[0].shape)
        out.flags.writeable = False
        return [out]

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None, hands: Hands) -> Steps[list[Any]]:
        """Reduce it as a large one, where workers wanted several accumulators."""
        folding = Folding(communicator.rank, [1] * communicator.size)
        reduction = Reduction(self._fold, [self._leaf()], self._replicas, folding)
        return (yield from reduction.carry_out(communicator, lengths, hands))

    def _leaf(self) -> Leaf:
        return Leaf(self._rule, self._parts, scalar=False)
