"""The results of every kind of collective in plain NumPy, as a reference for its plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiodist_kernels as kernels
from aiodist._arrays.leaves import Spec, describe_leaf
from aiodist._collectives import kinds
from aiodist._collectives.kinds import Collective, Kind
from aiodist_kernels import ReduceOp
from tests.kernels import arrays


class Case(NamedTuple):
    """A kind of collective, with a call's arguments apart from the value."""

    kind: Kind
    op: ReduceOp | None = None
    detail: Any = None

    def __str__(self) -> str:
        return "-".join(str(getattr(part, "name", part)) for part in self if part is not None)

    def shape(self, size: int, replica: int) -> tuple[int, ...]:
        """Return the shape of a replica's array, out of ``size`` replicas."""
        if self.kind is kinds.ALL_GATHER:
            shape = [2 * size, 3, size]
            shape[self.detail] = replica % 3
            return tuple(shape)
        return (2 * size, 3 * size, size)

    def wanted(self, column: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return each replica's result for a leaf."""
        size, native = len(column), [np.asarray(x, x.dtype.newbyteorder("=")) for x in column]
        if self.kind is kinds.SCAN:
            return [kernels.reduce(self.op or ReduceOp.SUM, native[: i + 1]) for i in range(size)]
        if self.op is not None:
            total = kernels.reduce(self.op, native)
            return [total] * size if self.detail is None else np.split(total, size, axis=self.detail)
        if self.kind is kinds.ALL_GATHER:
            return [np.concatenate(native, axis=self.detail)] * size
        if self.kind is kinds.BROADCAST:
            return [native[min(self.detail, size - 1)]] * size
        split, concat = self.detail
        cut = [np.split(array, size, axis=split) for array in native]
        return [np.concatenate(parts, axis=concat) for parts in zip(*cut, strict=True)]

    def inputs(self, size: int, dtype: np.dtype, layout: str = "C", seed: int = 0) -> list[np.ndarray]:
        """Return a leaf of each replica."""
        return [
            arrays.laid_out(np.asarray(arrays.values(seed + 7 * i, self.shape(size, i), dtype)), layout, i)
            for i in range(size)
        ]

    def check(self, columns: Sequence[Sequence[np.ndarray]], found: Sequence[Any], *, single: bool) -> None:
        """Check each replica's results: read-only, and in memory of their own."""
        for leaf, column in enumerate(columns[:1] if single else columns):
            for result, expected in zip(
                (each if single else each[leaf] for each in found), self.wanted(column), strict=True
            ):
                arrays.assert_same_bits(result, expected)
                assert not any(np.shares_memory(result, array) for array in column)
                with pytest.raises(ValueError, match="WRITEABLE"):
                    result.flags.writeable = True

    def call(self, ctx: Any, value: Any) -> Any:
        """Make the call on the context of a replica or of a member of a group."""
        detail = self.detail
        if self.kind is kinds.BROADCAST:
            detail = min(detail, ctx.num_replicas_in_sync - 1)
        op = () if self.op is None else (self.op,)
        more = detail if isinstance(detail, tuple) else () if detail is None else (detail,)
        return getattr(ctx, self.kind.name)(*op, value, *more)

    def collective(self, value: Any, size: int) -> Collective:
        """Return the collective for replicas with such values: a leaf, or a list of leaves."""
        spec = spec_of(value)
        detail: Any = self.detail
        if self.kind is kinds.BROADCAST:
            detail = min(detail, size - 1)
        elif self.kind is kinds.ALL_TO_ALL:
            detail = kinds.split_axes_of(spec, *self.detail)
        elif detail is not None:
            detail = kinds.axes_of(spec, self.detail)
        if self.kind is kinds.ALL_GATHER:
            assert detail is not None
            spec = kinds.ragged(spec, detail)
        found = Collective(self.kind, self.op, detail, spec)
        found.check(size)
        return found


def spec_of(value: Any) -> Spec:
    """Describe a leaf, or a list of leaves."""
    leaves = value if isinstance(value, list) else [value]
    if not leaves:
        return Spec((), (), ())
    shapes, dtypes, marks, _ = zip(*map(describe_leaf, leaves), strict=True)
    return Spec(shapes, dtypes, marks, not isinstance(value, list))


CASES = [
    Case(kinds.ALL_REDUCE, ReduceOp.SUM),
    Case(kinds.ALL_REDUCE, ReduceOp.MEAN),
    Case(kinds.ALL_REDUCE, ReduceOp.MAX),
    Case(kinds.REDUCE_SCATTER, ReduceOp.SUM, 0),
    Case(kinds.REDUCE_SCATTER, ReduceOp.MEAN, 1),
    Case(kinds.ALL_GATHER, None, 0),
    Case(kinds.ALL_GATHER, None, 1),
    Case(kinds.BROADCAST, None, 0),
    Case(kinds.BROADCAST, None, 2),
    Case(kinds.ALL_TO_ALL, None, (0, 0)),
    Case(kinds.ALL_TO_ALL, None, (0, 2)),
    Case(kinds.ALL_TO_ALL, None, (1, 0)),
    Case(kinds.SCAN, ReduceOp.SUM),
    Case(kinds.SCAN, ReduceOp.MEAN),
]
