# SPDX-License-Identifier: Apache-2.0
"""The entry to the array reductions: check, find the plan, run it on a tier; and large ones cut for worker threads."""

import functools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np

from aiodist_kernels import compiled_tier, policy, pool
from aiodist_kernels.arguments import (
    Array,
    check_alike,
    check_arrays,
    check_out,
    empty_like,
    flat_views,
    plain,
    same_order,
    spoils,
)
from aiodist_kernels.numpy_tier import STEPPED_TO, TINY_COUNT, Fold, finished, fold_for, fold_range, quiet, quietly
from aiodist_kernels.policy import Plan, plan_for
from aiodist_kernels.rules import FLOAT64, Accumulate, DType, ReduceOp, rule_for

GRAIN: Final = 4096
"""Elements to whose multiples pieces are cut, so that two threads never share a cache line."""

Reduction = Callable[[Sequence[Array]], Array]


def reduce(
    op: ReduceOp,
    buffers: Sequence[Array],
    *,
    out: Array | None = None,
    accumulate: Accumulate = "native",
) -> Array:
    """Reduce n buffers to one by a left fold in their order; see `rules` for what each op means.

    Args:
        op: the reduce op.
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
            or is masked, or `out` has the wrong dtype.
        ValueError: no buffers; shapes differ; `out` has the wrong shape or is read-only; unknown
            `op` or `accumulate`.
    """
    plan = _checked(op, buffers, out, accumulate)
    return _reduce(plan, plain(buffers), out)


def reduce_alike(
    op: ReduceOp, buffers: Sequence[Array], accumulate: Accumulate = "native", among: bool = False
) -> Array:
    """Reduce as `reduce` does, for a caller that has compared the buffers: one shape, one dtype.

    With `among`, the result is one of several that come and go together; see `pool`.
    """
    return _reduce(plan_for(op, buffers[0].dtype, len(buffers), accumulate), buffers, None, among)


def reduction(
    op: ReduceOp,
    dtype: DType,
    shape: tuple[int, ...],
    count: int,
    accumulate: Accumulate = "native",
    among: bool = False,
) -> Reduction:
    """Return what reduces that many buffers of one dtype and shape, again and again; see `reduce_alike`."""
    plan = plan_for(op, dtype, count, accumulate)
    rule, ufunc = plan.rule, plan.rule.ufunc
    nbytes = dtype.itemsize * math.prod(shape)
    if nbytes >= min(_pooled_from(among), plan.pays_from):
        return partial(_reduce, plan, out=None, among=among)
    if count == 2 and shape and rule.is_native and not rule.contiguous and dtype.isnative:
        return lambda buffers: quiet.copy().run(ufunc, buffers[0], buffers[1])

    fold = fold_for(rule, nbytes, count)
    return lambda buffers: quiet.copy().run(fold, rule, buffers, None)


def nest_reduction(
    op: ReduceOp, dtypes: Sequence[DType], shapes: Sequence[tuple[int, ...]], count: int
) -> Callable[[Sequence[Sequence[Array]]], list[Array]] | None:
    """Return what reduces that many rows of tiny arrays, in each one of every dtype and shape, as `reduce` does.

    It folds row by row, not column by column: then the loops are Python's own, and NumPy's warnings are switched off
    once. None where a fold of one of the arrays is more than calls of a ufunc, each of which makes an array.
    """
    rules = [rule_for(op, dtype) for dtype in dtypes]
    nbytes = max([dtype.itemsize * math.prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True)])
    plain = all(rule.is_native and not rule.contiguous and rule.dtype == rule.result for rule in rules)
    mean = op is ReduceOp.MEAN and all(rule.accumulator == FLOAT64 for rule in rules)
    native = all(dtype.isnative for dtype in dtypes)
    if not 2 <= count < TINY_COUNT or nbytes > STEPPED_TO or not (plain or mean) or not native:
        return None
    ufunc: Any = partial(np.add, dtype=FLOAT64) if mean else rules[0].ufunc
    makes_scalars = () in shapes

    def fold(left: Sequence[Array], right: Sequence[Array]) -> list[Array]:
        return list(map(ufunc, left, right))

    def run(rows: Sequence[Any]) -> list[Array]:
        totals = functools.reduce(fold, rows)
        if makes_scalars:
            totals = list(map(np.asarray, totals))
        return [finished(rule, total, count) for rule, total in zip(rules, totals, strict=True)] if mean else totals

    return lambda rows: quiet.copy().run(run, rows)


def reduce_scalars(op: ReduceOp, scalars: Sequence[np.generic], accumulate: Accumulate = "native") -> Any:
    """Reduce NumPy's scalars, one or more of one type, to a scalar, as arrays of no dimension are reduced."""
    numbers: Sequence[Any] = scalars  # which have all that is asked of arrays
    return _reduce(plan_for(op, scalars[0].dtype, len(scalars), accumulate), numbers, None)[()]


def _pooled_from(among: bool) -> int:
    return pool.POOLED_AMONG_FROM if among else pool.POOLED_FROM


def _reduce(plan: Plan, buffers: Sequence[Array], out: Array | None, among: bool = False) -> Array:
    first, target = buffers[0], out
    if out is None and first.nbytes >= _pooled_from(among):
        target = empty_like(first, plan.rule.result)
    kernel = plan.kernel_for(first.nbytes)
    if kernel is not None:
        if target is None:
            target = np.empty_like(first, plan.rule.result, subok=False)
        run = compiled_tier.bind(kernel, plan.rule, buffers, target)
        if run is not None:
            run(0, target.size)
            return target
    return quiet.copy().run(_fold_of(plan, first.nbytes), plan.rule, buffers, target)


@lru_cache(maxsize=4096)
def _fold_of(plan: Plan, nbytes: int) -> Fold:
    return fold_for(plan.rule, nbytes, plan.count)


class Pieces(NamedTuple):
    """One reduction, ready to be run.

    Attributes:
        result: is complete when all `calls` have returned.
        calls: what to run, in any order and in any threads, each once.
    """

    result: Array
    calls: tuple[Callable[[], object], ...]


def cut(
    op: ReduceOp,
    buffers: Sequence[Array],
    *,
    out: Array | None = None,
    accumulate: Accumulate = "native",
    parts: int = 1,
) -> Pieces:
    """Prepare the reduction of `reduce` as pieces for worker threads; the same bits for any `parts`.

    The buffers must stay as they are until all pieces have run. There is one piece where their layouts differ.
    """
    plan = _checked(op, buffers, out, accumulate)
    buffers = plain(buffers)
    target = empty_like(buffers[0], plan.rule.result) if out is None else out
    in_one_go = plan.rule.contiguous and not buffers[0].dtype.isnative
    if in_one_go or not same_order([*buffers, target]) or spoils(target, buffers):
        return Pieces(target, (partial(_reduce, plan, buffers, target),))
    size = buffers[0].size
    step = max(GRAIN, -(-size // max(parts, 1) // GRAIN) * GRAIN)
    starts = range(0, size, step)
    return Pieces(target, tuple([partial(_piece, plan, buffers, target, i, min(i + step, size)) for i in starts]))


def _piece(plan: Plan, buffers: Sequence[Array], target: Array, start: int, stop: int) -> None:
    """Reduce the elements [start, stop), by a kernel if one is ready by now."""
    kernel = plan.kernel_for(buffers[0].nbytes)
    run = None if kernel is None else compiled_tier.bind(kernel, plan.rule, buffers, target)
    if run is not None:
        run(start, stop)
        return
    flats = flat_views([*buffers, target])
    assert flats is not None  # `cut` has seen to that
    quietly(fold_range, plan.rule, flats[:-1], flats[-1], start, stop)


def result_dtype(op: ReduceOp, dtype: DType) -> DType:
    """Return the dtype, in native byte order, that reducing buffers of `dtype` gives.

    Raises:
        TypeError: `op` is not defined for `dtype`.
    """
    return rule_for(op, np.dtype(dtype)).result


def cost(op: ReduceOp, dtype: DType, size: int, count: int, accumulate: Accumulate = "native") -> int:
    """Return how many bytes could be moved in about the time that a reduction takes.

    It is what `policy.blocks` and `policy.parts` are asked with.
    """
    plan = plan_for(op, dtype, count, accumulate)
    slowness = 1 if plan.kernel_for(size * dtype.itemsize) else policy.slowness(plan.rule)
    return size * (count * dtype.itemsize + plan.rule.result.itemsize) * slowness


def _checked(op: ReduceOp, buffers: Sequence[Array], out: Array | None, accumulate: Accumulate) -> Plan:
    if not len(buffers) or [buffer for buffer in buffers if type(buffer) is not np.ndarray]:
        check_arrays(buffers)
    shape, dtype = buffers[0].shape, buffers[0].dtype
    plan = plan_for(op if type(op) is ReduceOp else ReduceOp(op), dtype, len(buffers), accumulate)
    if [buffer for buffer in buffers if buffer.dtype is not dtype or buffer.shape != shape]:
        check_alike(buffers, dtype, shape)
    if out is not None:
        check_out(out, plan.rule, shape)
    return plan
