# SPDX-License-Identifier: Apache-2.0
"""Entry points: reductions as a whole, or in pieces for worker threads, and reductions of Python numbers.

Callers have checked their arguments: there is at least one buffer, all have one shape and dtype, the op is defined for
it, and `out` has the shape and dtype of the result, and overlaps no buffer unless it is the first one.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from aiodist_kernels import policy, pool
from aiodist_kernels.numpy_tier import STEPPED_TO, TINY_COUNT, finished, fold_for, quiet
from aiodist_kernels.policy import Plan, plan_for
from aiodist_kernels.rules import FLOAT64, Accumulate, Array, DType, ReduceOp, rule_for

GRAIN: Final = 4096
"""The size of pieces is a multiple of this number of elements, so that two threads never share a cache line."""

FEW_MEANS: Final = 6
"""Rows of a nest from which means are quicker leaf by leaf, because here each step converts what it adds."""

Reduction = Callable[[Sequence[Array]], Array]


def reduce(
    op: ReduceOp, buffers: Sequence[Array], *, out: Array | None = None, accumulate: Accumulate = "native"
) -> Array:
    """Reduce n buffers to one by a left fold in their order; see `rules` for what each op means.

    Args:
        op: the reduce op.
        buffers: arrays or NumPy scalars of one shape and dtype, in any layout and byte order.
        out: takes the result: same shape, dtype `result_dtype(op, dtype)`, any layout; it may be the first buffer.
        accumulate: "float64" accumulates inexact SUM, MEAN and PRODUCT in float64 (complex128) and rounds once.

    Returns:
        `out`, or an array in fresh memory, of native byte order; 0-d if the buffers are. The bits depend only on the
        values (all NaNs count as one).

    Raises:
        TypeError: `op` is not defined for the dtype.
    """
    return _reduce(plan_for(op, buffers[0].dtype, len(buffers), accumulate), buffers, out)


def reduction(
    op: ReduceOp,
    dtype: DType,
    shape: tuple[int, ...],
    count: int,
    accumulate: Accumulate = "native",
    among: bool = False,
) -> Reduction:
    """Return a function that reduces that many buffers of one dtype and shape, for repeated use; see `reduce`.

    `among`: whether each result is one of several that are made and released together; see `pool`.
    """
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
    """Return a function that reduces that many rows of tiny arrays of given dtypes and shapes, as `reduce` does.

    The results are views of read-only memory, which cannot be made writeable. It folds row by row, not leaf by leaf, so
    that `map` does the loops, and NumPy's warnings are switched off once. The result is None if one of the arrays needs
    more than ufunc calls that each make an array.
    """
    rules = [rule_for(op, dtype) for dtype in dtypes]
    nbytes = max([dtype.itemsize * math.prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True)])
    plain = all(rule.is_native and not rule.contiguous for rule in rules)
    mean = op is ReduceOp.MEAN and all(rule.accumulator == FLOAT64 for rule in rules)
    native = all(dtype.isnative for dtype in dtypes)
    if not 2 <= count < (FEW_MEANS if mean else TINY_COUNT) or nbytes > STEPPED_TO or not (plain or mean) or not native:
        return None
    ufunc: Any = partial(np.add, dtype=FLOAT64) if mean else rules[0].ufunc

    def run(rows: Sequence[Any]) -> list[Array]:
        totals: list[Any] = rows[0]
        for row in rows[1:]:
            totals = list(map(ufunc, totals, row))
        if mean:
            totals = [finished(rule, np.asarray(total), count) for rule, total in zip(rules, totals, strict=True)]
        results = []
        for total in totals:
            array = total if type(total) is np.ndarray else np.asarray(total)  # ufuncs return scalars for 0-d arrays
            array.setflags(False)  # type: ignore[call-arg]  # by position: the keyword alone takes as long as the call
            results.append(array.view())
        return results

    return lambda rows: quiet.copy().run(run, rows)


def _pooled_from(among: bool) -> int:
    return pool.POOLED_AMONG_FROM if among else pool.POOLED_FROM


def _reduce(plan: Plan, buffers: Sequence[Array], out: Array | None, among: bool = False) -> Array:
    first, target = buffers[0], out
    if out is None and first.nbytes >= _pooled_from(among):
        target = pool.empty_like(first, plan.rule.result)
    if plan.kernel_for(first.nbytes) is not None:
        if target is None:
            target = np.empty_like(first, plan.rule.result, subok=False)
        run = policy.bind(plan, buffers, target)
        if run is not None:
            run(0, target.size)
            return target
    return quiet.copy().run(fold_for(plan.rule, first.nbytes, plan.count), plan.rule, buffers, target)


# In pieces, for worker threads.


class Pieces(NamedTuple):
    """One reduction, ready to be run."""

    result: Array  # complete when all calls have returned
    calls: tuple[Callable[[], object], ...]  # to be called once each, in any order and in any threads


def cut(op: ReduceOp, buffers: Sequence[Array], *, accumulate: Accumulate = "native", parts: int = 1) -> Pieces:
    """Cut the reduction of `reduce` into pieces for worker threads, with the same bits for any `parts`.

    Do not change the buffers until all pieces have run. If their layouts differ, there is one piece.
    """
    plan = plan_for(op, buffers[0].dtype, len(buffers), accumulate)
    target = pool.empty_like(buffers[0], plan.rule.result)
    arrays = [*buffers, target]
    if plan.rule.contiguous or not policy.same_order(arrays):
        return Pieces(target, (partial(_reduce, plan, buffers, target),))
    order: Any = "C" if all(array.flags.c_contiguous for array in arrays) else "F"
    flats = [array.reshape(-1, order=order) for array in arrays]
    step = max(GRAIN, -(-target.size // max(parts, 1) // GRAIN) * GRAIN)
    starts = range(0, target.size, step)
    return Pieces(target, tuple([partial(_piece, plan, flats[:-1], flats[-1], i, i + step) for i in starts]))


def _piece(plan: Plan, flats: Sequence[Array], target: Array, start: int, stop: int) -> None:
    """Reduce a range of elements, by a kernel if it is compiled by now."""
    stop = min(stop, target.size)
    run = policy.bind(plan, flats, target)
    if run is not None:
        run(start, stop)
        return
    parts = [flat[start:stop] for flat in flats]
    quiet.copy().run(fold_for(plan.rule, parts[0].nbytes, plan.count), plan.rule, parts, target[start:stop])


def result_dtype(op: ReduceOp, dtype: DType | type) -> DType:
    """Return the dtype of a reduction of buffers of `dtype`, or of numbers of a Python type; see `rule_for`."""
    return rule_for(op, np.dtype(dtype)).result


# Python numbers. Integers are exact, and floats are added left to right, but never by the builtin `sum`: from Python
# 3.12 on it compensates rounding, so its bits depend on the interpreter.

Number = int | float | complex


def reduce_numbers(op: ReduceOp, numbers: Sequence[Number]) -> Number:
    """Reduce Python numbers of one type, which `result_dtype` accepts, by a left fold in their order.

    SUM and PRODUCT are exact for int, and rounded at each step for float and complex. MEAN is the sum divided by the
    count (by component for complex), a float for int; beyond the range of float it is an OverflowError. MIN and MAX
    return the first NaN if there is one; for bool they are all and any.
    """
    return _FOLDS[op](numbers)  # type: ignore[no-any-return]


def _sum(numbers: Sequence[Any]) -> Any:
    if type(numbers[0]) is int:  # exact in any order
        return sum(numbers)
    return functools.reduce(operator.add, numbers)


def _mean(numbers: Sequence[Any]) -> Any:
    total, count = _sum(numbers), len(numbers)
    if isinstance(total, complex):
        return complex(total.real / count, total.imag / count)
    return total / count


def _extreme(choose: Callable[[Sequence[Any]], Any], numbers: Sequence[Any]) -> Any:
    # A sum is NaN if a number is, or for two infinities.
    if type(numbers[0]) is float and math.isnan(sum(numbers)):
        return next(filter(math.isnan, numbers), choose(numbers))
    return choose(numbers)


_FOLDS: Final[dict[ReduceOp, Callable[[Sequence[Any]], Any]]] = {
    ReduceOp.SUM: _sum,
    ReduceOp.MEAN: _mean,
    ReduceOp.MIN: partial(_extreme, min),
    ReduceOp.MAX: partial(_extreme, max),
    ReduceOp.PRODUCT: partial(functools.reduce, operator.mul),
}
