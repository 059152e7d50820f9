# SPDX-License-Identifier: Apache-2.0
"""The NumPy tier: left folds with ufuncs, for every rule and every layout.

It does the first reductions, and all those of small values. Many tiny arrays are stacked and folded by `accumulate`,
which by definition folds from left to right. (`reduce` does not: it adds in pairs.)
"""

import contextvars
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

import numpy as np

from aiodist_kernels.rules import FLOAT64, Array, Finish, ReduceOp, Rule, rounded

Fold = Callable[[Rule, Sequence[Array], Array | None], Array]
"""Folds buffers of a rule's dtype and one shape; returns `out`, which may be the first buffer, or a new array."""

STEPPED_TO: Final = 512
"""Bytes of one buffer up to which a new array for each step costs half as much as writing in place."""

TINY_BYTES: Final = 64  # bytes of one buffer up to which many are stacked in one array

TINY_COUNT: Final = 12
"""The number of buffers from which stacking is quicker than ufunc calls, which take 0.3 microseconds each. Fewer single
numbers are folded most quickly by the interpreter, if its floats are the accumulator."""


def fold_for(rule: Rule, nbytes: int, count: int) -> Fold:
    """Return the fold for `count` buffers of `nbytes` each."""
    if rule.contiguous:
        return _fold_contiguous
    # Which of 0.0 and -0.0 is greater depends on the instructions in the processor's vector loops.
    exact = rule.op not in (ReduceOp.MIN, ReduceOp.MAX) or rule.dtype.kind in "biu"
    if nbytes <= TINY_BYTES and exact:
        if count >= TINY_COUNT:
            return _fold_stacked
        if not rule.is_native:
            single = nbytes == rule.dtype.itemsize and rule.accumulator == FLOAT64
            return _fold_numbers if single else _fold_stacked
    return _by_ufuncs(rule, nbytes, count)


def _by_ufuncs(rule: Rule, nbytes: int, count: int) -> Fold:
    if not rule.is_native:
        return _fold_wide
    return _fold_stepped if nbytes <= STEPPED_TO and count > 2 else _fold_native


def _fold_stepped(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    return _deliver(np.asarray(functools.reduce(rule.ufunc, buffers)), out)


def _fold_native(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    """Fold in the buffers' own dtype, directly into the result."""
    ufunc = rule.ufunc
    if len(buffers) == 1:
        return _deliver(np.array(buffers[0], rule.result), out)
    total = np.asarray(ufunc(buffers[0], buffers[1], out=out))
    for buffer in buffers[2:]:
        ufunc(total, buffer, out=total)
    return total


def _fold_wide(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    """Fold in a separate accumulator, then finish and round once."""
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
    """Fold buffers as contiguous one-dimensional arrays, copies if necessary."""
    flats = [np.asarray(buffer, rule.dtype, order="C").reshape(-1) for buffer in buffers]
    total = _by_ufuncs(rule, flats[0].nbytes, len(flats))(rule, flats, None)
    return _deliver(total.reshape(buffers[0].shape), out)


def finished(rule: Rule, total: Array, count: int) -> Array:
    """Finish a total that nothing else uses, and round it once."""
    # A complex factor would turn infinities into NaN, so each component is scaled.
    for part in (np.real(total), np.imag(total)) if total.dtype.kind == "c" else (total,):
        if rule.finish is Finish.SCALE:
            np.multiply(part, 1.0 / count, out=part)
        elif rule.finish is Finish.DIVIDE:
            np.divide(part, count, out=part)
    return rounded(total, rule.result)


def _deliver(total: Array, out: Array | None) -> Array:
    if out is None:
        return total
    np.copyto(out, total)
    return out


# NumPy's warnings, whose switch is a context variable. Entering a copy of a prepared context takes 40 nanoseconds, a
# tenth of what `np.errstate` takes, and is safe in any thread and at any depth.

P = ParamSpec("P")
T = TypeVar("T")

quiet: Final = contextvars.Context()  # run functions in a copy: a context can be entered only once at a time
quiet.run(np.seterr, all="ignore")


def quietly(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` without NumPy's warnings: infinities and NaN are ordinary values here."""
    return quiet.copy().run(function, *args, **kwargs)
