"""Leaves of a reduction: what the local replicas bring, folded range by range, and results, finished range by range.

A range is small enough for the event loop and for a cache: so nothing of the size of a whole value is ever folded,
copied or rounded at one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

import aiodist_kernels as kernels
from aiodist.workers.communicator import Array
from aiodist_kernels import ReduceOp
from aiodist_kernels.pool import results as pool
from aiodist_kernels.rules import Finish, Rule, rounded

Fold = Callable[[ReduceOp, Sequence[Array], Array], object]
"""Reduces parts into an array that is none of them."""

_BLOCK_BYTES: Final = 256 * 1024


class Leaf:
    """One array of a reduction.

    Args:
        rule: how it is reduced.
        parts: the local replicas', in their order.
        scalar: the result is to be a NumPy scalar.
    """

    __slots__ = ("_rule", "_scalar", "direct", "parts", "shape", "size")

    def __init__(self, rule: Rule, parts: Sequence[Array], *, scalar: bool) -> None:
        self._rule = rule
        self._scalar = scalar
        self.direct = rule.result == rule.accumulator
        self.parts = parts
        self.shape = parts[0].shape
        self.size = parts[0].size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The accumulator's."""
        return self._rule.accumulator

    def flat(self) -> list[Array]:
        """Return the parts with one axis."""
        return [part.reshape(-1) for part in self.parts]

    def cost(self) -> int:
        """Return about how many bytes could be moved in the time that folding one element takes."""
        return kernels.cost(self._rule.op, self.parts[0].dtype, 1, len(self.parts))

    def finish(self, total: Array, replicas: int, out: Array) -> None:
        """Make a range of the result of its total.

        Args:
            total: the fold of all replicas' values; it may be ``out``, and is spoilt where that is not.
            replicas: how many they are.
            out: takes the result.
        """
        finished(self._rule, total, replicas)
        if total is not out:
            with np.errstate(all="ignore"):
                out[...] = rounded(total, self._rule.result)

    def new_result(self) -> Array:
        """Return memory for the result, with one axis."""
        return pool.empty((self.size,), self._rule.result)

    def result(self, flat: Array) -> Any:
        """Return the result in its shape, which nobody can change."""
        whole = flat.reshape(self.shape)
        whole.flags.writeable = False
        return whole[()] if self._scalar else whole


def finished(rule: Rule, total: Array, replicas: int) -> None:
    """Make a range of a result, before it is rounded, of its total."""
    if rule.finish is not Finish.NOTHING:
        with np.errstate(all="ignore"):
            for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
                if rule.finish is Finish.DIVIDE:
                    np.divide(part, replicas, out=part)
                else:
                    np.multiply(part, 1.0 / replicas, out=part)


def lies_well(array: Array) -> bool:
    """Return whether an engine takes an array as it lies: in one piece, and each number where the machine wants it."""
    flags = array.flags
    return flags.c_contiguous and flags.aligned


class Pack:
    """Leaves of one accumulator, one behind the other.

    Args:
        op: the op that folds: SUM, PRODUCT, MIN or MAX.
        leaves: the leaves.
    """

    def __init__(self, op: ReduceOp, leaves: Sequence[Leaf]) -> None:
        self._op = op
        self.leaves = leaves
        self.dtype = leaves[0].dtype
        self.size = sum(leaf.size for leaf in leaves)
        self.nbytes = self.size * self.dtype.itemsize
        self._flat: list[list[Array]] | None = None
        self._total: Array | None = None
        self._results: list[Array] = []

    def flatten(self) -> None:
        """Prepare the parts to be cut; those in another order than C's are copied."""
        self._flat = [leaf.flat() for leaf in self.leaves]

    def is_in_order(self) -> bool:
        """Whether no part need be copied for that."""
        return all(part.flags.c_contiguous for leaf in self.leaves for part in leaf.parts)

    def ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield what a range of the whole has of each leaf: the leaf, the range in it, and where that lies."""
        at = 0
        for index, leaf in enumerate(self.leaves):
            low, high = max(begin - at, 0), min(end - at, leaf.size)
            if low < high:
                yield index, low, high, at + low - begin
            at += leaf.size

    def fill(self, begin: int, end: int, out: Array, places: slice, fold: Fold) -> None:
        """Fold a range of the local replicas' parts.

        Args:
            begin: the first element.
            end: behind the last element.
            out: takes them.
            places: which of the replicas.
            fold: folds several.
        """
        if self._flat is None:
            self.flatten()
        assert self._flat is not None
        step = _BLOCK_BYTES // self.dtype.itemsize
        for index, low, high, at in self.ranges(begin, end):
            parts = self._flat[index][places]
            for a in range(low, high, step):
                b = min(a + step, high)
                target = out[at + a - low : at + b - low]
                if len(parts) == 1:
                    np.copyto(target, parts[0][a:b])
                else:
                    fold(self._op, [part[a:b].astype(self.dtype, copy=False) for part in parts], target)

    def own_memory(self, begin: int, end: int) -> Array | None:
        """Return a range of the one local replica's part as it lies in memory, where nothing need be made of it."""
        if self._flat is None:
            self.flatten()
        assert self._flat is not None
        index, low, high, _ = next(self.ranges(begin, end))
        part = self._flat[index][0]
        if len(self._flat[index]) > 1 or high - low < end - begin or part.dtype != self.dtype:
            return None
        own = part[low:high]
        if not lies_well(own):
            return None
        return own.view(self.dtype)  # there are equal dtypes of other names, of which an engine may know one

    # Results.

    def prepare_results(self) -> None:
        """Make memory for the results."""
        if all(leaf.direct for leaf in self.leaves):
            self._use(pool.empty((self.size,), self.dtype))
        else:
            self._results = [leaf.new_result() for leaf in self.leaves]

    def _use(self, memory: Array) -> None:
        """Let the totals, and so the results, lie here."""
        self._total = memory
        ends = accumulate(leaf.size for leaf in self.leaves)
        self._results = [memory[at - leaf.size : at] for at, leaf in zip(ends, self.leaves, strict=True)]

    def room_for(self, begin: int, end: int) -> Array | None:
        """Return where the total of a range may lie for its result to lie there, too."""
        return None if self._total is None else self._total[begin:end]

    def take(self, total: Array, replicas: int) -> None:
        """Make the results of the total of everything, in its memory where that may be."""
        if all(leaf.direct for leaf in self.leaves):
            self._use(total)
        else:
            self.prepare_results()
        self.finish(0, self.size, total, replicas)

    def finish(self, begin: int, end: int, total: Array, replicas: int) -> None:
        """Make a range of the results of its total, which lies in the room for it, where there is one."""
        for index, low, high, at in self.ranges(begin, end):
            part = total[at : at + high - low]
            self.leaves[index].finish(
                part, replicas, part if self._total is not None else self._results[index][low:high]
            )

    def results(self) -> list[Any]:
        """Return the leaves' results, all ranges of which are finished."""
        return [leaf.result(flat) for leaf, flat in zip(self.leaves, self._results, strict=True)]


def packed(op: ReduceOp, leaves: Sequence[Leaf]) -> tuple[list[Pack], list[int]]:
    """Return leaves in packs, and the order in which those have them."""
    order: dict[np.dtype[Any], list[int]] = {}
    for index, leaf in enumerate(leaves):
        order.setdefault(leaf.dtype, []).append(index)
    packs = [Pack(op, [leaves[index] for index in indices]) for indices in order.values()]
    return packs, [index for indices in order.values() for index in indices]
