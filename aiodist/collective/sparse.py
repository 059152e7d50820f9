"""Reductions of IndexedSlices: rows combined by index, never made a dense array of.

Rows are added in the order of the replicas, and within a replica in the order in which they stand: a left fold in the
accumulator that a dense reduction of the dtype has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiodist._arrays.slices import IndexedSlices
from aiodist_kernels import Accumulate, ReduceOp
from aiodist_kernels.rules import Finish, rule_for

Array = np.ndarray[Any, Any]


def check(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Check that an op combines rows of a dtype.

    Raises:
        TypeError: it does not take the dtype.
        ValueError: it is neither SUM nor MEAN.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"IndexedSlices are reduced by SUM or MEAN, in which rows that are not there count as zeros; got {op.name}"
        )
    rule_for(op, dtype)


def combine(op: ReduceOp, slices: Sequence[IndexedSlices], accumulate: Accumulate = "native") -> IndexedSlices:
    """Return the sum of the replicas' rows by index, for MEAN divided by the number of replicas; read-only."""
    rule = rule_for(op, slices[0].dtype, accumulate)
    rows = np.concatenate([np.asarray(part.values, rule.accumulator) for part in slices])
    indices, first, place = np.unique(
        np.concatenate([part.indices for part in slices]), return_index=True, return_inverse=True
    )
    total = rows[first]
    further = np.ones(len(rows), bool)
    further[first] = False
    np.add.at(total, place[further], rows[further])
    if rule.finish is Finish.DIVIDE:
        total /= len(slices)
    elif rule.finish is Finish.SCALE:
        total *= 1 / len(slices)
    return IndexedSlices(_frozen(total.astype(rule.result, copy=False)), _frozen(indices), slices[0].dense_shape)


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
