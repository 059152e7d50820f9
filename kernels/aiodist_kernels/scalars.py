# SPDX-License-Identifier: Apache-2.0
"""Reductions of Python's numbers.

Integers are exact, and floats are added left to right. The builtin `sum` makes no float: from Python 3.12 on it
compensates rounding, so its bits depend on the interpreter.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from aiodist_kernels.rules import ReduceOp, check_defined

Number = int | float | complex


def check_number(op: ReduceOp, kind: type) -> None:
    """Check that `op` takes Python numbers of type `kind`.

    Raises:
        TypeError: SUM, MEAN and PRODUCT of bool, MIN and MAX of complex, and everything
            that is no number.
    """
    if not issubclass(kind, int | float | complex):
        raise TypeError(
            f"{op.name} of {kind.__name__}: expected an int, float, complex or bool, "
            f"got {kind.__name__}; pass the numbers in it as an array"
        )
    check_defined(op, np.dtype(next(known for known in (bool, int, float, complex) if issubclass(kind, known))))


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
    return functools.reduce(operator.add, numbers)


def _mean(numbers: Sequence[Any]) -> Any:
    total, count = _sum(numbers), len(numbers)
    if isinstance(total, complex):
        return complex(total.real / count, total.imag / count)
    return total / count


def _product(numbers: Sequence[Any]) -> Any:
    return functools.reduce(operator.mul, numbers)


def _minimum(numbers: Sequence[Any]) -> Any:
    return next(filter(math.isnan, numbers), min(numbers)) if _may_have_nan(numbers) else min(numbers)


def _maximum(numbers: Sequence[Any]) -> Any:
    return next(filter(math.isnan, numbers), max(numbers)) if _may_have_nan(numbers) else max(numbers)


def _may_have_nan(numbers: Sequence[Any]) -> bool:
    """Tell whether there may be a NaN: a sum is NaN for one, and for two infinities."""
    return type(numbers[0]) is float and math.isnan(sum(numbers))


_FOLDS: Final[dict[ReduceOp, Callable[[Sequence[Any]], Any]]] = {
    ReduceOp.SUM: _sum,
    ReduceOp.MEAN: _mean,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.PRODUCT: _product,
}
