# SPDX-License-Identifier: Apache-2.0
"""The entry to the array reductions: check, find the plan, run it on a tier.

The path of a tiny array is one dictionary look-up, one comparison of shape and dtype a
buffer, and the ufunc calls. Floating-point warnings are off in all tiers: infinities and NaN are
values like others, and a compiled tier could not warn. NumPy keeps that switch in a context
variable, and entering a copy of a prepared context costs a tenth of `np.errstate`.
"""

import contextvars
from collections.abc import Sequence
from typing import Final

import numpy as np

from aiodist_kernels.arguments import Array, check_alike, check_arrays, check_out
from aiodist_kernels.numpy_tier import Fold, fold_for
from aiodist_kernels.reduce_op import ReduceOp
from aiodist_kernels.rules import Accumulate, DType, Rule, rule_for

_plans: Final[dict[tuple[ReduceOp, DType, Accumulate], tuple[Rule, Fold]]] = {}
_results: Final[dict[tuple[ReduceOp, DType], DType]] = {}

_quiet: Final = contextvars.Context()
_quiet.run(np.seterr, all="ignore")


def reduce(
    op: ReduceOp,
    buffers: Sequence[Array],
    *,
    out: Array | None = None,
    accumulate: Accumulate = "native",
) -> Array:
    """Reduce n buffers to one by a left fold in their order; see `rules` for what each op means.

    Args:
        op: the reduce op, or its name.
        buffers: at least one array, all of one shape and dtype, of any layout and byte order.
        out: takes the result: same shape, dtype `result_dtype(op, dtype)`, any layout; it may
            overlap the buffers.
        accumulate: "float64" accumulates inexact SUM, MEAN and PRODUCT in float64 (complex128) and
            rounds once.

    Returns:
        `out`, or an array in fresh memory, of native byte order; of no dimension where
        the buffers have none. The bits depend on nothing but the arguments (a NaN counts as any
        other NaN).

    Raises:
        TypeError: `op` is not defined for the dtype; dtypes differ; a buffer or `out` is no array,
            or `out` has the wrong dtype.
        ValueError: no buffers; shapes differ; `out` has the wrong shape or is read-only; unknown
            `op` or `accumulate`.
    """
    try:
        shape, dtype = buffers[0].shape, buffers[0].dtype
        rule, fold = _plans[op, dtype, accumulate]
    except (LookupError, AttributeError, TypeError):
        check_arrays(buffers)
        shape, dtype = buffers[0].shape, buffers[0].dtype
        rule, fold = _plan(ReduceOp(op), dtype, accumulate)
    suspicious = False
    try:
        for buffer in buffers[1:]:
            if buffer.shape != shape or buffer.dtype is not dtype:
                suspicious = True
    except AttributeError:
        suspicious = True
    if suspicious:
        check_alike(buffers, dtype, shape)
    if out is not None:
        check_out(out, rule, shape)
    return _quiet.copy().run(fold, rule, buffers, out)


def result_dtype(op: ReduceOp, dtype: DType) -> DType:
    """Return the dtype, in native byte order, that reducing buffers of `dtype` gives.

    Raises:
        TypeError: `op` is not defined for `dtype`.
        ValueError: unknown `op`.
    """
    try:
        return _results[op, dtype]
    except (KeyError, TypeError):
        dtype = np.dtype(dtype)
        result = _results[op, dtype] = rule_for(ReduceOp(op), dtype).result
        return result


def _plan(op: ReduceOp, dtype: DType, accumulate: Accumulate) -> tuple[Rule, Fold]:
    plan = _plans.get((op, dtype, accumulate))
    if plan is None:
        rule = rule_for(op, dtype, accumulate)
        plan = _plans[op, dtype, accumulate] = rule, fold_for(rule)
    return plan
