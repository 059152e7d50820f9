# SPDX-License-Identifier: Apache-2.0
"""What reductions must give, element by element, in exact arithmetic and explicit roundings.

It shares nothing with the code under test: floats are folded as fractions, rounded to a format
by its number of bits after every step.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from aiodist_kernels import ReduceOp

FORMATS = {  # bits of the significand, smallest normal exponent, greatest exponent
    "float16": (11, -14, 15),
    "bfloat16": (8, -126, 127),
    "float32": (24, -126, 127),
    "float64": (53, -1022, 1023),
}


def round_to(name: str, value: Fraction | float) -> float:
    """Round to nearest even in a float format, with subnormals and overflow to infinity."""
    if isinstance(value, float) and (not math.isfinite(value) or value == 0):
        return value
    exact = Fraction(value)
    if exact == 0:
        return 0.0
    bits, low, high = FORMATS[name]
    exponent = max(_exponent(abs(exact)), low)
    unit = Fraction(2) ** (exponent - bits + 1)
    rounded = round(exact / unit) * unit  # round() of a fraction is to nearest even
    if abs(rounded) >= Fraction(2) ** (high + 1):
        return math.inf if exact > 0 else -math.inf
    return math.copysign(float(rounded), 1 if exact > 0 else -1)


def _exponent(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def add(name: str, x: float, y: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)) or (x == 0 and y == 0):
        return x + y
    return round_to(name, Fraction(x) + Fraction(y))


def multiply(name: str, x: float, y: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)) or x == 0 or y == 0:
        return x * y
    return math.copysign(round_to(name, Fraction(x) * Fraction(y)), x * y)


def divide(name: str, x: float, n: int) -> float:
    if not math.isfinite(x) or x == 0:
        return x / n
    return math.copysign(round_to(name, Fraction(x) / n), x)


def accumulator(op: ReduceOp, name: str, accumulate: str) -> str:
    if name in ("float16", "bfloat16"):
        return "float64" if accumulate == "float64" else "float32"
    return "float64" if op is ReduceOp.MEAN or accumulate == "float64" else name


def reduce_floats(op: ReduceOp, values: Sequence[float], name: str, accumulate: str = "native") -> float:
    """Reduce floats of one format; the result is a float that the format can represent."""
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        choose = min if op is ReduceOp.MIN else max
        return math.nan if any(map(math.isnan, values)) else choose(values)
    wide = accumulator(op, name, accumulate)
    step = multiply if op is ReduceOp.PRODUCT else add
    total = values[0]
    for value in values[1:]:
        total = step(wide, total, value)
    if op is ReduceOp.MEAN and wide == name:
        total = divide(wide, total, len(values))
    elif op is ReduceOp.MEAN:
        total = multiply(wide, total, round_to(wide, Fraction(1, len(values))))
    return round_to(name, total)


def reduce_complex(op: ReduceOp, values: Sequence[complex], name: str, accumulate: str = "native") -> complex:
    """SUM and MEAN of complex numbers, by component."""
    return complex(
        reduce_floats(op, [value.real for value in values], name, accumulate),
        reduce_floats(op, [value.imag for value in values], name, accumulate),
    )


def reduce_integers(op: ReduceOp, values: Sequence[int], dtype: np.dtype) -> int | float:
    """Wrap modulo the width of the dtype; MEAN in float64."""
    if op is ReduceOp.MEAN:
        return reduce_floats(op, [float(value) for value in values], "float64")
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return min(values) if op is ReduceOp.MIN else max(values)
    total = sum(values) if op is ReduceOp.SUM else math.prod(values)
    if dtype.kind == "b":
        return total
    span = 1 << (8 * dtype.itemsize)
    total %= span
    return total - span if dtype.kind == "i" and total >= span // 2 else total
