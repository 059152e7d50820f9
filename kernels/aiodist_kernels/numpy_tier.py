# SPDX-License-Identifier: Apache-2.0
"""The NumPy tier: left folds with ufuncs, for every rule and every layout.

It serves from the first call on, and small values always. Large flat buffers are taken in blocks, which stay in the
cache from one step of the fold to the next. Many tiny ones are put into one array and folded there by `accumulate`:
that is by definition the fold from left to right, in each of whose steps the result so far meets the next number.
(`reduce`, which adds in pairs, is not.)
"""

import contextvars
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

import numpy as np

from aiodist_kernels.arguments import Array, empty_like, flat_views, overlaps, spoils
from aiodist_kernels.rules import FLOAT64, Finish, ReduceOp, Rule, rounded

Fold = Callable[[Rule, Sequence[Array], Array | None], Array]
"""Folds buffers of a rule's dtype and one shape, all of them checked; returns `out`, or an array of its own."""

BLOCK_BYTES: Final = 256 * 1024
"""Of one buffer: with n = 4, a block of each fits into a cache of 1 to 2 MiB."""

STEPPED_TO: Final = 512
"""Bytes of one buffer up to which a new array for each step costs less than writing in place."""

FEW_NUMBERS: Final = 12
"""Up to so many single numbers are quickest folded by the interpreter, where its floats are the accumulator."""

TINY_BYTES: Final = 64
"""Bytes of one buffer up to which many are put into one array."""

TINY_COUNT: Final = 12
"""How many they must be to be quicker folded there than by ufunc calls, 0.3 microseconds each."""


def fold_for(rule: Rule, nbytes: int, count: int) -> Fold:
    """Return the fold that serves `count` buffers of `nbytes` each."""
    if rule.contiguous:
        return _fold_contiguous
    # Which of 0.0 and -0.0 is the greater depends on the instructions that a processor's vector loops use.
    exact = rule.op not in (ReduceOp.MIN, ReduceOp.MAX) or rule.dtype.kind in "biu"
    if nbytes <= TINY_BYTES and exact and not rule.is_native:
        few = nbytes == rule.dtype.itemsize and count <= FEW_NUMBERS
        return _fold_numbers if few and rule.accumulator == FLOAT64 else _fold_stacked
    if nbytes <= TINY_BYTES and exact and count >= TINY_COUNT:
        return _fold_stacked
    if nbytes <= BLOCK_BYTES or (rule.is_native and count <= 2):  # ufuncs go by blocks themselves
        return _whole_for(rule, nbytes, count)
    return _fold_blocks


def fold_range(rule: Rule, flat: Sequence[Array], out: Array, start: int, stop: int) -> None:
    """Reduce the elements [start, stop) of flat buffers into those of `out`, block by block.

    `out` may be one of the buffers, but not overlap one otherwise.
    """
    step = max(1, BLOCK_BYTES // rule.accumulator.itemsize)
    if rule.is_native and len(flat) <= 2:
        step = max(1, stop - start)
    for low in range(start, stop, step):
        parts = [buffer[low : min(low + step, stop)] for buffer in flat]
        _whole_for(rule, parts[0].nbytes, len(flat))(rule, parts, out[low : low + len(parts[0])])


def _whole_for(rule: Rule, nbytes: int, count: int) -> Fold:
    """Return the fold without blocks."""
    if not rule.is_native:
        return _fold_wide
    return {1: _fold_one, 2: _fold_pair}.get(count, _fold_stepped if nbytes <= STEPPED_TO else _fold_native)


def _fold_one(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    if out is None:
        return np.array(buffers[0], rule.result)
    out[...] = buffers[0]
    return out


def _fold_pair(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    return np.asarray(rule.ufunc(buffers[0], buffers[1], out=out))  # ufuncs take care of an overlap


def _fold_stepped(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    total = np.asarray(functools.reduce(rule.ufunc, buffers))
    return total if out is None else _deliver(total, out)


def _fold_native(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    """Fold in the buffers' own dtype, straight into the result."""
    ufunc, straight = rule.ufunc, None if out is None or overlaps(out, buffers[2:]) else out
    total: Array = ufunc(buffers[0], buffers[1], out=straight)
    for buffer in buffers[2:]:
        ufunc(total, buffer, out=total)
    return _deliver(total, out)


def _fold_wide(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    """Fold in an accumulator beside the result, then finish and round once."""
    total = np.array(buffers[0], rule.accumulator)
    for buffer in buffers[1:]:
        rule.ufunc(total, buffer.astype(rule.accumulator, copy=False), out=total)
    return _deliver(finished(rule, total, len(buffers)), out)


def _fold_numbers(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    """Fold a few buffers of one element in Python's floats."""
    step = operator.mul if rule.op is ReduceOp.PRODUCT else operator.add
    total = functools.reduce(step, [float(buffer.item()) for buffer in buffers])
    if rule.finish is Finish.SCALE:
        total *= 1.0 / len(buffers)
    elif rule.finish is Finish.DIVIDE:
        total /= len(buffers)
    return _deliver(rounded(np.array(total), rule.result).reshape(buffers[0].shape), out)


def _fold_stacked(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    """Fold many tiny buffers, or numbers, in one array."""
    rows = np.array(buffers, rule.dtype).astype(rule.accumulator, copy=False)
    total = np.array(rule.ufunc.accumulate(rows)[-1])
    return _deliver(finished(rule, total, len(buffers)), out)


def _fold_contiguous(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    return _fold_blocks(rule, [np.asarray(buffer, rule.dtype, order="C") for buffer in buffers], out)


def _fold_blocks(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    total = out
    if out is None or spoils(out, buffers) or (rule.contiguous and not out.flags.c_contiguous):
        total = empty_like(buffers[0], rule.result)
    assert total is not None
    flats = flat_views([*buffers, total])
    if flats is None:
        return _deliver(_whole_for(rule, total.nbytes, len(buffers))(rule, buffers, total), out)
    fold_range(rule, flats[:-1], flats[-1], 0, total.size)
    return _deliver(total, out)


def finished(rule: Rule, total: Array, count: int) -> Array:
    """Finish a total that nobody else sees, and round it once."""
    # A complex factor would turn infinities into NaN, so each component is scaled.
    for part in (np.real(total), np.imag(total)) if total.dtype.kind == "c" else (total,):
        if rule.finish is Finish.SCALE:
            np.multiply(part, 1.0 / count, out=part)
        elif rule.finish is Finish.DIVIDE:
            np.divide(part, count, out=part)
    return rounded(total, rule.result)


def _deliver(total: Array, out: Array | None) -> Array:
    if out is None or out is total:
        return total
    np.copyto(out, total)
    return out


# NumPy's warnings. NumPy keeps the switch for them in a context variable. Entering a copy of a prepared context takes
# 40 nanoseconds, a tenth of what `np.errstate` takes, and is safe in any thread and at any depth.

P = ParamSpec("P")
T = TypeVar("T")

quiet: Final = contextvars.Context()
"""To be copied, and the copy entered: a context can be entered only once at a time."""

quiet.run(np.seterr, all="ignore")


def quietly(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` with warnings off: infinities and NaN are values like others."""
    return quiet.copy().run(function, *args, **kwargs)
