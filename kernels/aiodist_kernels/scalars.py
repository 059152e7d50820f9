# SPDX-License-Identifier: Apache-2.0
"""Reductions of single numbers: Python's, NumPy's scalars, and arrays of no dimension.

Python's integers are exact, and its floats are added left to right. The builtin `sum` makes no float: from Python 3.12
on it compensates rounding, so its bits depend on the interpreter.

A ufunc takes 0.4 microseconds a call however little it has to do. So from three of NumPy's numbers on they are put into
one array, which takes 10 nanoseconds a number where none need be converted, and folded there by `accumulate`: that is
by definition the fold from left to right, in each of whose steps the result so far meets the next number. (`reduce`,
which adds in pairs, is not.) A few are quicker folded by the interpreter, where its floats are the accumulator.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy import array, asarray, fromiter

from aiodist_kernels.arguments import Array
from aiodist_kernels.rules import FLOAT64, DType, Finish, ReduceOp, Rule, rounded

# Python's numbers.

Number = int | float | complex


def check_number(op: ReduceOp, kind: type) -> None:
    """Check that `op` takes Python numbers of type `kind`.

    Raises:
        TypeError: SUM, MEAN and PRODUCT of bool, MIN and MAX of complex, and everything
            that is no number.
    """
    ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
    if issubclass(kind, bool):
        if not ordered:
            raise TypeError(
                f"{op.name} of bool: expected a number, got bool; cast first, e.g. int(x), "
                f"or use MIN (all) or MAX (any)"
            )
    elif issubclass(kind, complex):
        if ordered:
            raise TypeError(
                f"{op.name} of complex: expected ordered numbers, got complex ones, which have "
                f"no order; reduce abs(x), or x.real and x.imag"
            )
    elif not issubclass(kind, int | float):
        raise TypeError(
            f"{op.name} of {kind.__name__}: expected an int, float, complex or bool, "
            f"got {kind.__name__}; pass the numbers in it as an array"
        )


def reduce_numbers(op: ReduceOp, numbers: Sequence[Number]) -> Number:
    """Reduce Python numbers of one type by a left fold in their order.

    Args:
        op: the reduce op.
        numbers: at least one number, all of the type of the first (which is not compared here).

    Returns:
        SUM and PRODUCT: exact for int, rounded at each step for float and complex. MEAN: the sum
        divided by the count (by component for complex), a float for int. MIN and MAX: the first
        NaN where there is one; all and any for bool.

    Raises:
        TypeError: `op` does not take this type of number.
        ValueError: there are no numbers.
        OverflowError: the MEAN of ints is beyond the range of float.
    """
    if not numbers:
        raise ValueError("expected at least one number to reduce, got none")
    kind = type(numbers[0])
    fold = _FOLDS.get(op)
    if fold is None or not (kind is float or kind is int):
        op = ReduceOp(op)
        check_number(op, kind)
        fold = _FOLDS[op]
    result: Number = fold(numbers)
    return result


def _sum(numbers: Sequence[Any]) -> Any:
    if type(numbers[0]) is int:  # exact, in whatever order
        return sum(numbers)
    rest = iter(numbers)
    total = next(rest)
    for number in rest:
        total = total + number
    return total


def _mean(numbers: Sequence[Any]) -> Any:
    total, count = _sum(numbers), len(numbers)
    if isinstance(total, complex):
        return complex(total.real / count, total.imag / count)
    return total / count


def _product(numbers: Sequence[Any]) -> Any:
    if type(numbers[0]) is int:
        return math.prod(numbers)
    rest = iter(numbers)
    total = next(rest)
    for number in rest:
        total = total * number
    return total


def _minimum(numbers: Sequence[Any]) -> Any:
    if type(numbers[0]) is float and _is_nan(sum(numbers)):
        return next(filter(_is_nan, numbers), min(numbers))
    return min(numbers)


def _maximum(numbers: Sequence[Any]) -> Any:
    if type(numbers[0]) is float and _is_nan(sum(numbers)):
        return next(filter(_is_nan, numbers), max(numbers))
    return max(numbers)


_is_nan = math.isnan
"""If it says so of a sum, there may be a NaN in it, or two infinities; if not, there is none."""

_FOLDS = {
    ReduceOp.SUM: _sum,
    ReduceOp.MEAN: _mean,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.PRODUCT: _product,
}


# NumPy's numbers.

AS_SCALAR: Final = -1
AS_ARRAY: Final = (-1, ...)
"""How to take the last number of an array: as one of NumPy's scalars, or as an array of no dimension."""

ElementFold = Callable[[Sequence[Any], Any], Any]
"""Folds at least one number of a rule's dtype, and returns the result `AS_SCALAR` or `AS_ARRAY`, as the second argument
says. Numbers are all arrays of no dimension, of any byte order, or all scalars, NumPy's or Python's."""

FEW: Final = 6
"""Up to so many of NumPy's scalars are quicker folded by operators."""

FEW_DOUBLES: Final = 12
"""Up to so many numbers are quicker turned into Python's floats one by one."""

_OPERATORS: Final[dict[ReduceOp, Callable[[Any, Any], Any]]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.MEAN: operator.add,
    ReduceOp.PRODUCT: operator.mul,
}


@functools.cache
def element_fold(rule: Rule) -> ElementFold:
    """Return the fold of single numbers that serves `rule`."""
    if rule.finish is Finish.NOTHING and rule.accumulator == rule.result:
        return _native_fold(rule)
    return _double_fold(rule) if rule.accumulator == FLOAT64 else _wide_fold(rule)


def _native_fold(rule: Rule) -> ElementFold:
    ufunc, dtype, step = rule.ufunc, rule.dtype, _OPERATORS.get(rule.op)
    accumulate = ufunc.accumulate
    if not accumulates(ufunc, dtype):
        return lambda elements, form: _taken(functools.reduce(ufunc, elements), form)

    def fold(elements: Sequence[Any], form: Any) -> Any:
        count = len(elements)
        if form is AS_SCALAR and count <= FEW and step is not None:
            return functools.reduce(step, elements)
        return accumulate(fromiter(elements, dtype, count), 0, dtype)[form]

    return fold


def _double_fold(rule: Rule) -> ElementFold:
    """Return a fold whose accumulator is also Python's own: what follows it needs no NumPy."""
    step, accumulate, finish = _OPERATORS[rule.op], rule.ufunc.accumulate, rule.finish
    gather, result = _gather(rule), rule.result
    convertible = result.isbuiltin == 1

    def fold(elements: Sequence[Any], form: Any) -> Any:
        count = len(elements)
        if count <= FEW_DOUBLES:
            total = functools.reduce(step, map(float, elements))
        else:
            total = accumulate(gather(elements)).item(-1)
        if finish is Finish.SCALE:
            total *= 1.0 / count
        elif finish is Finish.DIVIDE:
            total /= count
        return _taken(array(total, result) if convertible else rounded(array(total), result), form)

    return fold


def _wide_fold(rule: Rule) -> ElementFold:
    accumulate, gather = rule.ufunc.accumulate, _gather(rule)

    def fold(elements: Sequence[Any], form: Any) -> Any:
        total = accumulate(gather(elements))[-1]
        if rule.finish is Finish.SCALE:
            total = _each_part(operator.mul, total, 1.0 / len(elements))
        elif rule.finish is Finish.DIVIDE:
            total = _each_part(operator.truediv, total, len(elements))
        return _taken(rounded(asarray(total), rule.result), form)

    return fold


def _gather(rule: Rule) -> Callable[[Sequence[Any]], Array]:
    """Return what puts numbers into one array of the accumulator's dtype.

    To have each converted takes several times as long as all at once (but for dtypes that other libraries bring).
    """
    dtype, accumulator = rule.dtype, rule.accumulator
    if dtype == accumulator or dtype.isbuiltin != 1:
        return lambda elements: fromiter(elements, accumulator, len(elements))
    return lambda elements: fromiter(elements, dtype, len(elements)).astype(accumulator)


def _taken(total: Any, form: Any) -> Any:
    return asarray(total) if form is AS_ARRAY else total[()]


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
