# SPDX-License-Identifier: Apache-2.0
"""Reductions of Python's own numbers: exact integers, and floats added left to right.

The builtin `sum` is not used: from Python 3.12 on it compensates float rounding, so its bits
depend on the interpreter.
"""

import math
from collections.abc import Sequence

from aiodist_kernels.reduce_op import ReduceOp

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
    if type(numbers[0]) is not float:
        op = ReduceOp(op)
        check_number(op, type(numbers[0]))
    if op is ReduceOp.SUM:
        return _sum(numbers)
    return _FOLDS[ReduceOp(op)](numbers)


def _sum(numbers: Sequence[Number]) -> Number:
    rest = iter(numbers)
    total = next(rest)
    for number in rest:
        total = total + number
    return total


def _mean(numbers: Sequence[Number]) -> Number:
    total, count = _sum(numbers), len(numbers)
    if isinstance(total, complex):
        return complex(total.real / count, total.imag / count)
    return total / count


def _product(numbers: Sequence[Number]) -> Number:
    rest = iter(numbers)
    total = next(rest)
    for number in rest:
        total = total * number
    return total


def _minimum(numbers: Sequence[Number]) -> Number:
    return _first_nan(numbers) or min(_real(numbers))


def _maximum(numbers: Sequence[Number]) -> Number:
    return _first_nan(numbers) or max(_real(numbers))


def _first_nan(numbers: Sequence[Number]) -> Number | None:
    """Return the first NaN, which is true as a condition, or None."""
    if not isinstance(numbers[0], float):
        return None
    return next((number for number in _real(numbers) if math.isnan(number)), None)


def _real(numbers: Sequence[Number]) -> Sequence[float]:
    return numbers  # type: ignore[return-value]  # check_number has refused complex numbers


_FOLDS = {
    ReduceOp.SUM: _sum,
    ReduceOp.MEAN: _mean,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.PRODUCT: _product,
}
