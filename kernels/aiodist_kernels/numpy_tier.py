# SPDX-License-Identifier: Apache-2.0
"""The NumPy tier: left folds with ufuncs, for every rule and every layout.

It serves from the first call on, and small values always: a fold in the buffers' own
dtype costs little more than its n - 1 ufunc calls. Large flat buffers are taken in blocks, which
stay in the cache from one step of the fold to the next.

A fold takes a rule, n buffers of equal shape and of the rule's dtype (in any byte order), and `out`
or None, all of them checked; it returns `out`, or an array in fresh memory.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Final, ParamSpec, TypeVar

import numpy as np

from aiodist_kernels import pool
from aiodist_kernels.arguments import Array, empty_like, flat_views, overlaps, spoils
from aiodist_kernels.rules import Finish, Rule, rounded
from aiodist_kernels.scalars import AS_ARRAY, element_fold

Fold = Callable[[Rule, Sequence[Array], Array | None], Array]

BLOCK_BYTES: Final = 256 * 1024
"""Of one buffer: with n = 4, a block of each fits into a cache of 1 to 2 MiB."""

SCRATCH_BYTES: Final = 16 * 1024
"""Up to here it costs less to fold beside `out` than to find out whether it overlaps a buffer."""

STEPPED_TO: Final = 512
"""Bytes of one buffer up to which a new array for each step costs less than writing in place."""

ELEMENT_BYTES: Final = 32
"""Of the largest element of any dtype."""


def fold_for(rule: Rule) -> Fold:
    """Return the fold that serves `rule`."""
    if rule.contiguous:
        return _fold_contiguous
    return _fold_native if rule.is_native else _fold_wide


def fold_range(rule: Rule, flat: Sequence[Array], out: Array, start: int, stop: int) -> None:
    """Reduce the elements [start, stop) of flat buffers into those of `out`, block by block.

    Args:
        rule: the rule.
        flat: n buffers of one dimension, without gaps.
        out: of one dimension, without gaps; it may be one of the buffers, but not overlap one
            otherwise.
        start: the first element.
        stop: behind the last element.
    """
    fold = _native if rule.is_native else _wide
    step = max(1, BLOCK_BYTES // rule.accumulator.itemsize)
    for low in range(start, stop, step):
        high = min(low + step, stop)
        fold(rule, [buffer[low:high] for buffer in flat], out[low:high])


def is_plain(rule: Rule) -> bool:
    """Say whether a fold is nothing but its ufunc, called from buffer to buffer, whatever the layout."""
    return rule.is_native and not rule.contiguous and rule.dtype.isnative


def fold_in_steps(ufunc: np.ufunc, buffers: Sequence[Array]) -> Array:
    """Fold at least two buffers by a plain rule's ufunc alone, into fresh memory: the way of small arrays."""
    rest = iter(buffers)
    total: Array = ufunc(next(rest), next(rest))
    for buffer in rest:
        ufunc(total, buffer, out=total)
    return total


def _fold_native(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    if len(buffers) == 2:  # ufuncs need no blocks here, and take care of an overlap
        if out is None and buffers[0].nbytes >= pool.POOLED_FROM:
            out = empty_like(buffers[0], rule.result)
        total = rule.ufunc(buffers[0], buffers[1]) if out is None else rule.ufunc(buffers[0], buffers[1], out=out)
        return total if type(total) is np.ndarray else np.asarray(total)
    if buffers[0].nbytes > BLOCK_BYTES:
        return _fold_blocks(rule, buffers, out)
    return _native(rule, buffers, out)


def _fold_wide(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    if buffers[0].nbytes > BLOCK_BYTES:
        return _fold_blocks(rule, buffers, out)
    return _wide(rule, buffers, out)


def _fold_contiguous(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    straight = [np.asarray(buffer, rule.dtype, order="C") for buffer in buffers]
    total = empty_like(straight[0], rule.result)
    flats = flat_views([*straight, total])
    if flats is not None:
        fold_range(rule, flats[:-1], flats[-1], 0, total.size)
    return _deliver(total, out)


def _fold_blocks(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    total = empty_like(buffers[0], rule.result) if out is None or spoils(out, buffers) else out
    flats = flat_views([*buffers, total])
    if flats is not None:
        fold_range(rule, flats[:-1], flats[-1], 0, total.size)
    elif rule.is_native:
        _native(rule, buffers, total)
    else:
        _wide(rule, buffers, total)
    return _deliver(total, out)


def _native(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    """Fold in the buffers' own dtype, straight into the result."""
    if len(buffers) == 1:
        return _deliver(np.array(buffers[0], rule.result), out)
    if buffers[0].nbytes <= STEPPED_TO:
        return _deliver(np.asarray(functools.reduce(rule.ufunc, buffers)), out)
    ufunc = rule.ufunc
    if out is None or len(buffers) == 2 or (buffers[0].nbytes > SCRATCH_BYTES and not overlaps(out, buffers[2:])):
        total: Array = ufunc(buffers[0], buffers[1], out=out)
        for buffer in buffers[2:]:
            ufunc(total, buffer, out=total)
        return total
    total = _native(rule, buffers[:-1], None)
    ufunc(total, buffers[-1], out=out)
    return out


def _wide(rule: Rule, buffers: Sequence[Array], out: Array | None) -> Array:
    """Fold in an accumulator beside the result, then finish and round once."""
    if buffers[0].size == 1:
        return _deliver(_element(rule, buffers), out)
    total = np.array(buffers[0], rule.accumulator)
    for buffer in buffers[1:]:
        rule.ufunc(total, buffer.astype(rule.accumulator, copy=False), out=total)
    for part in _parts(total):
        if rule.finish is Finish.SCALE:
            np.multiply(part, 1.0 / len(buffers), out=part)
        elif rule.finish is Finish.DIVIDE:
            np.divide(part, len(buffers), out=part)
    return _deliver(rounded(total, rule.result), out)


def _element(rule: Rule, buffers: Sequence[Array]) -> Array:
    """Fold arrays of one element."""
    shape = buffers[0].shape
    elements = buffers if shape == () else [buffer.reshape(()) for buffer in buffers]
    total: Array = element_fold(rule)(elements, AS_ARRAY)
    return total.reshape(shape)


def _parts(total: Array) -> tuple[Array, ...]:
    """Return what to scale: components, as a complex factor would turn infinities into NaN."""
    if total.dtype.kind != "c":
        return (total,)
    parts: tuple[Array, ...] = np.real(total), np.imag(total)
    return parts


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
