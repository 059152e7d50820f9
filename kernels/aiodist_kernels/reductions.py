# SPDX-License-Identifier: Apache-2.0
"""The entry to the array reductions: check, find the plan, run it on a tier; and large ones cut for worker threads.

The path of a tiny array is one dictionary look-up, one comparison of shape and dtype a buffer, and the ufunc calls.
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy import asarray, ndarray

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
from aiodist_kernels.numpy_tier import (
    BLOCK_BYTES,
    ELEMENT_BYTES,
    STEPPED_TO,
    fold_in_steps,
    fold_range,
    quiet,
    quietly,
)
from aiodist_kernels.policy import Plan, find_plan
from aiodist_kernels.rules import Accumulate, DType, ReduceOp, is_half, rule_for
from aiodist_kernels.scalars import AS_ARRAY, AS_SCALAR

GRAIN: Final = 4096
"""Elements to whose multiples pieces are cut, so that two threads never share a cache line."""

_known: Final = policy.known
_native: Final = _known["native"]
_run: Final = quiet.copy().run
"""Runs without warnings what is over soon: one thread at a time. (To copy the context each time is half as dear as all
that is done here beside the ufunc.)"""

_results: Final[dict[tuple[ReduceOp, DType], DType]] = {}


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
    buffers = plain(buffers)
    return reduce_alike(plan.rule.op, buffers, accumulate) if out is None else _reduce(plan, buffers, out)


def reduce_alike(  # noqa: C901, PLR0911  (a call more would cost as much as some of these ways take)
    op: ReduceOp, buffers: Sequence[Array], accumulate: Accumulate = "native", among: bool = False
) -> Array:
    """Reduce as `reduce` does, for a caller that has compared the buffers: one shape, one dtype.

    Args:
        op: the reduce op, defined for the dtype.
        buffers: as in `reduce`.
        accumulate: as in `reduce`.
        among: the result is one of several that live as long as each other; see `pool`.

    Returns:
        An array in fresh memory, as `reduce`.
    """
    first = buffers[0]
    try:
        plan = (_native if accumulate == "native" else _known[accumulate])[op][first.dtype]
    except KeyError:
        plan = find_plan(op, first.dtype, accumulate)
    nbytes = first.nbytes
    if among and nbytes >= pool.POOLED_AMONG_FROM:
        return _reduce(plan, buffers, empty_like(first, plan.rule.result, among=True))
    if nbytes < plan.plain_below:
        count = len(buffers)
        try:
            if count == 2:  # a ufunc needs no help
                total = _run(plan.ufunc, first, buffers[1])
                return total if type(total) is ndarray else asarray(total)
            if count > 2:
                if STEPPED_TO < nbytes <= BLOCK_BYTES:
                    if nbytes < plan.compiled_from or not plan.kernel(count, nbytes):
                        return _run(fold_in_steps, plan.ufunc, buffers)
                elif nbytes <= ELEMENT_BYTES and first.shape == ():
                    return _run(plan.elements, buffers, AS_ARRAY)
                elif nbytes <= STEPPED_TO:
                    return _run(functools.reduce, plan.ufunc, buffers)
        except RuntimeError:  # another thread is in that context
            pass
    elif nbytes <= ELEMENT_BYTES and first.shape == () and not plan.rule.contiguous:
        return quiet.copy().run(plan.elements, buffers, AS_ARRAY)
    return _reduce(plan, buffers, None)


def reduction(
    op: ReduceOp,
    dtype: DType,
    shape: Sequence[int],
    count: int,
    accumulate: Accumulate = "native",
    among: bool = False,
) -> Callable[[Sequence[Array]], Array]:
    """Return what `reduce_alike` does with that many buffers of one dtype and shape.

    Where they are tiny, all that can be is decided here, once.
    """
    plan = find_plan(op, dtype, accumulate)
    ufunc, nbytes = plan.ufunc, dtype.itemsize * math.prod(shape)
    if nbytes >= plan.plain_below or nbytes > STEPPED_TO or not shape or count < 2:
        return lambda buffers: reduce_alike(op, buffers, accumulate, among)

    def reduce_two(buffers: Sequence[Array]) -> Array:
        try:
            total: Array = _run(ufunc, buffers[0], buffers[1])
        except RuntimeError:  # another thread is in that context
            return _reduce(plan, buffers, None)
        return total

    def reduce_several(buffers: Sequence[Array]) -> Array:
        try:
            return _run(functools.reduce, ufunc, buffers)
        except RuntimeError:
            return _reduce(plan, buffers, None)

    return reduce_two if count == 2 else reduce_several


def reduce_scalars(op: ReduceOp, scalars: Sequence[np.generic], accumulate: Accumulate = "native") -> Any:
    """Reduce NumPy's scalars, all of one type, as arrays of no dimension are reduced.

    Args:
        op: the reduce op.
        scalars: at least one.
        accumulate: as in `reduce`.

    Returns:
        A scalar, of the dtype `result_dtype(op, dtype)`.

    Raises:
        TypeError: `op` is not defined for the dtype.
    """
    first = scalars[0]
    try:
        plan = _known[accumulate][op][first.dtype]
    except KeyError:
        plan = find_plan(op, first.dtype, accumulate)
    if plan.rule.contiguous:
        return _reduce(plan, [asarray(scalar) for scalar in scalars], None)[()]
    return quiet.copy().run(plan.elements, scalars, AS_SCALAR)


def _reduce(plan: Plan, buffers: Sequence[Array], out: Array | None) -> Array:
    first = buffers[0]
    if plan.compiled_from <= first.nbytes:
        kernel = plan.kernel(len(buffers), first.nbytes)
        if kernel is not None:
            target = empty_like(first, plan.rule.result) if out is None else out
            run = compiled_tier.bind(kernel, plan.rule, buffers, target, fresh=out is None)
            if run is not None:
                run(0, target.size)
                return target
    return quiet.copy().run(plan.fold, plan.rule, buffers, out)


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

    The buffers must stay as they are until all pieces have run.

    Args:
        op: as in `reduce`.
        buffers: as in `reduce`.
        out: as in `reduce`.
        accumulate: as in `reduce`.
        parts: how many pieces at most; there is one where the buffers' layouts differ.

    Returns:
        The result's memory, and the calls that fill it.

    Raises:
        TypeError: as in `reduce`.
        ValueError: as in `reduce`.
    """
    plan = _checked(op, buffers, out, accumulate)
    buffers = plain(buffers)
    target = empty_like(buffers[0], plan.rule.result) if out is None else out
    in_one_go = plan.rule.contiguous and not buffers[0].dtype.isnative
    if in_one_go or not same_order([*buffers, target]) or spoils(target, buffers):
        return Pieces(target, (lambda: quietly(plan.fold, plan.rule, buffers, target),))
    size = buffers[0].size
    step = max(GRAIN, -(-size // max(parts, 1) // GRAIN) * GRAIN)
    starts = range(0, size, step)
    return Pieces(target, tuple([partial(_piece, plan, buffers, target, i, min(i + step, size)) for i in starts]))


def _piece(plan: Plan, buffers: Sequence[Array], target: Array, start: int, stop: int) -> None:
    """Reduce the elements [start, stop), by a kernel if one is ready by now."""
    kernel = plan.kernel(len(buffers), buffers[0].nbytes)
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
        ValueError: unknown `op`.
    """
    try:
        return _results[op, dtype]
    except (KeyError, TypeError):
        dtype = np.dtype(dtype)
        result = _results[op, dtype] = rule_for(ReduceOp(op), dtype).result
        return result


def bytes_moved(op: ReduceOp, dtype: DType, size: int, count: int) -> int:
    """Return the bytes that reducing `count` buffers of `size` elements reads and writes."""
    return size * (count * dtype.itemsize + result_dtype(op, dtype).itemsize)


def cost(op: ReduceOp, dtype: DType, size: int, count: int, accumulate: Accumulate = "native") -> int:
    """Return how many bytes could be moved in about the time that a reduction takes.

    It is what `policy.blocks` and `policy.parts` are asked with.
    """
    moved = bytes_moved(op, dtype, size, count)
    plan = find_plan(op, dtype, accumulate)
    if plan.kernel(count, size * dtype.itemsize) is not None:
        return moved
    if is_half(plan.rule.dtype):
        return moved * policy.SLOWNESS_OF_HALF_FLOATS
    return moved if plan.rule.is_native else moved * policy.SLOWNESS_OF_WIDE_FOLDS


def _checked(op: ReduceOp, buffers: Sequence[Array], out: Array | None, accumulate: Accumulate) -> Plan:
    try:
        shape, dtype = buffers[0].shape, buffers[0].dtype
        plan = _known[accumulate][op][dtype]
    except (LookupError, AttributeError, TypeError):
        check_arrays(buffers)
        shape, dtype = buffers[0].shape, buffers[0].dtype
        plan = find_plan(ReduceOp(op), dtype, accumulate)
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
        check_out(out, plan.rule, shape)
    return plan
