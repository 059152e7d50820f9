"""Python's integers, reduced by the engine: exact, however large, though engines know only numbers of 64 bits.

This is for more workers than all receive everything of. A sum goes in limbs of 31 bits, so that some thousand million
workers do not overflow one; an integer beyond 123 bits says so, and then all are gathered after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import aiodist_kernels as kernels
from aiodist.workers.communicator import Array, Communicator
from aiodist.workers.leaves import Leaf
from aiodist.workers.objects import Gathering
from aiodist.workers.reduction import Folding, Reduction
from aiodist.workers.transfers import Hands, OfFixedSize, Steps
from aiodist_kernels import ReduceOp
from aiodist_kernels.rules import rule_for

_LIMB_BITS: Final = 31
_LIMBS: Final = 4
_MOST_BITS: Final = {ReduceOp.SUM: 123, ReduceOp.MIN: 63, ReduceOp.MAX: 63}
_TOO_LARGE: Final = {ReduceOp.SUM: 1, ReduceOp.MIN: -1, ReduceOp.MAX: 1}


class IntegerReduction(OfFixedSize):
    """Integers to be reduced over the workers.

    Args:
        op: SUM, MIN or MAX.
        columns: by integer, what the local replicas bring.
    """

    room = 0
    data = np.empty(0, np.uint8)

    def __init__(self, op: ReduceOp, columns: Sequence[Sequence[int]]) -> None:
        self._op = op
        self._own = [int(kernels.reduce_numbers(op, column).real) for column in columns]

    def fits(self, room: int, lengths: Sequence[int]) -> bool:  # noqa: ARG002
        """Return that it does not: it is for workers that do not receive all records."""
        return False

    def from_records(self, parts: Sequence[memoryview]) -> list[int]:
        """Never called: see `fits`."""
        raise NotImplementedError

    def carry_out(self, communicator: Communicator, lengths: Sequence[int] | None, hands: Hands) -> Steps[list[int]]:  # noqa: ARG002
        """Reduce; return the integers."""
        too_large = any(number.bit_length() > _MOST_BITS[self._op] for number in self._own)
        width = _LIMBS if self._op is ReduceOp.SUM else 1
        flat = np.zeros(len(self._own) * width + 1, np.int64)
        if too_large:
            flat[-1] = _TOO_LARGE[self._op]
        else:
            flat[:-1] = np.ravel([self._limbs(number) for number in self._own])
        leaf = Leaf(rule_for(self._op, flat.dtype), [flat], scalar=False)
        reduction = Reduction(self._op, [leaf], communicator.size, Folding(communicator.rank, [1] * communicator.size))
        (total,) = yield from reduction.carry_out(communicator, None, hands)
        if total[-1]:
            everyone: list[Any] = yield from Gathering(self._own).carry_out(communicator, None, hands)
            return [int(kernels.reduce_numbers(self._op, column).real) for column in zip(*everyone, strict=True)]
        return [_whole(limbs) for limbs in total[:-1].reshape(-1, width)]

    def _limbs(self, number: int) -> list[int]:
        if self._op is not ReduceOp.SUM:
            return [number]
        low = [(number >> (_LIMB_BITS * place)) & ((1 << _LIMB_BITS) - 1) for place in range(_LIMBS - 1)]
        return [*low, number >> (_LIMB_BITS * (_LIMBS - 1))]


def _whole(limbs: Array) -> int:
    return sum(limb << (_LIMB_BITS * place) for place, limb in enumerate(limbs.tolist()))
