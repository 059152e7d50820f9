"""Reductions of one leaf, from all replicas, through a kernel, in replica order; and what they accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import aiodist_kernels as kernels
from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark, LeafType
from aiodist.collective import sparse
from aiodist.collective.signature import DTYPES, OP, STRUCTURE, TYPES, Signature, leaf_fields
from aiodist.collective.warming import ask_for
from aiodist_kernels import Accumulate, ReduceOp


def check(signature: Signature, size: int) -> None:
    """Check that the op takes every leaf.

    Raises:
        TypeError: it does not take a leaf's dtype.
        ValueError: it does not combine IndexedSlices.
    """
    op, dtypes = signature[OP], signature[DTYPES]
    if signature[TYPES] is None:  # arrays throughout
        for dtype in (dtypes,) if signature[STRUCTURE] is None else dtypes:
            kernels.result_dtype(op, dtype)
        return
    for _, dtype, leaf_type in leaf_fields(signature):
        if leaf_type is LeafType.PYTHON_NUMBER:
            kernels.check_number(op, dtype)
        elif leaf_type is LeafType.INDEXED_SLICES:
            sparse.check(op, dtype)
        else:
            kernels.result_dtype(op, dtype)


def in_native_order(value: Any) -> Any:
    """Return what a replica brought, a leaf or a list of leaves, with its arrays in this machine's byte order."""
    if isinstance(value, list):
        return [in_native_order(leaf) for leaf in value]
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value


def reduce_arrays(op: ReduceOp, leaves: Sequence[Any], accumulate: Accumulate, among: bool = False) -> Any:
    """Return one array, reduced, read-only. This is the way of small values, which no compiled kernel would pay for."""
    result = kernels.reduce_alike(op, leaves, accumulate, among)
    result.setflags(False)  # type: ignore[call-arg]  # by position: the keyword alone takes as long as the call
    return result


def reduce_leaf(
    op: ReduceOp,
    leaves: Sequence[Any],
    leaf_type: LeafMark,
    accumulate: Accumulate = "native",
    among: bool = False,
) -> Any:
    """Return one leaf, reduced, of the type that the leaves have; arrays are read-only, foreign ones NumPy's still.

    Args:
        op: the reduce op.
        leaves: what the replicas brought, in replica order.
        leaf_type: their type.
        accumulate: as in `aiodist_kernels.reduce`.
        among: the leaf is one of a nest.
    """
    if leaf_type is LeafType.NUMPY_ARRAY or isinstance(leaf_type, HostType):
        first = leaves[0]
        ask_for(op, first.dtype, len(leaves), first.nbytes, accumulate)
        return reduce_arrays(op, leaves, accumulate, among)
    if leaf_type is LeafType.PYTHON_NUMBER:
        return kernels.reduce_numbers(op, leaves)
    if leaf_type is LeafType.INDEXED_SLICES:
        return sparse.combine(op, leaves, accumulate)
    return kernels.reduce_scalars(op, leaves, accumulate)
