# SPDX-License-Identifier: Apache-2.0
"""Folds of single numbers: arrays of no dimension, and NumPy's scalars.

A ufunc takes 0.4 microseconds a call however little it has to do. So from three numbers on they are put into one array,
which NumPy does at 10 nanoseconds a number, and folded there by `accumulate`: that is by definition the fold from left
to right, in each of whose steps the result so far meets the next number. (`reduce`, which adds in pairs, is not.)
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from aiodist_kernels.arguments import Array
from aiodist_kernels.reduce_op import ReduceOp
from aiodist_kernels.rounding import rounded
from aiodist_kernels.rules import DType, Finish, Rule

Element = Array | np.generic

FEW: Final = 6
"""Up to so many of NumPy's scalars are quicker added by their own operators."""

_OPERATORS: Final[dict[ReduceOp, Callable[[Any, Any], Any]]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
}


def fold_elements(rule: Rule, elements: Sequence[Element]) -> Any:
    """Fold numbers of the rule's dtype.

    Args:
        rule: the rule.
        elements: at least one; all are arrays of no dimension, of any byte order, or all are NumPy's scalars.

    Returns:
        One of NumPy's scalars, of the rule's result dtype.
    """
    accumulator, ufunc = rule.accumulator, rule.ufunc
    step = _OPERATORS.get(rule.op)
    if rule.finish is not Finish.NOTHING or accumulator is not rule.result:
        return _finished(rule, elements)
    if step is None and not accumulates(ufunc, accumulator):
        return functools.reduce(ufunc, elements)
    if step is not None and len(elements) <= FEW and type(elements[0]) is not np.ndarray:
        return functools.reduce(step, elements)
    return ufunc.accumulate(np.fromiter(elements, accumulator, len(elements)), 0, accumulator)[-1]


def _finished(rule: Rule, elements: Sequence[Element]) -> Any:
    count, accumulator = len(elements), rule.accumulator
    total = rule.ufunc.accumulate(np.fromiter(elements, accumulator, count), 0, accumulator)[-1]
    if rule.finish is Finish.SCALE:
        total = _each_part(operator.mul, total, 1.0 / count)
    elif rule.finish is Finish.DIVIDE:
        total = _each_part(operator.truediv, total, count)
    return total if accumulator == rule.result else rounded(np.asarray(total), rule.result)[()]


def _each_part(step: Callable[[Any, Any], Any], total: Any, number: float) -> Any:
    """Apply a step to a number's components: a complex factor would turn infinities into NaN."""
    if total.dtype.kind != "c":
        return step(total, number)
    both: Array = np.empty((), total.dtype)
    both.real, both.imag = step(total.real, number), step(total.imag, number)
    return both[()]


@functools.cache
def accumulates(ufunc: np.ufunc, dtype: DType) -> bool:
    """Say whether `accumulate` has the bits of ufunc calls.

    It has, but that minima and maxima of 0.0 and -0.0 depend on the processor's instructions: so NumPy is asked.
    """
    if ufunc not in (np.minimum, np.maximum) or dtype.kind in "biu":
        return True
    zeros = np.where(np.random.default_rng(0).random(64) < 0.5, 0.0, -0.0).astype(dtype)
    once = ufunc.accumulate(zeros)
    again = [zeros[0]]
    for zero in zeros[1:]:
        again.append(ufunc(again[-1], zero))
    return bool((np.signbit(once) == np.signbit(again)).all())
