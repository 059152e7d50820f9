# SPDX-License-Identifier: Apache-2.0
"""Rounding in exact arithmetic, by a format's number of bits; it shares nothing with the code under test."""

import math
from fractions import Fraction

FORMATS = {  # bits of the significand, smallest normal exponent, greatest exponent
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
    exponent = abs(exact).numerator.bit_length() - exact.denominator.bit_length()
    if Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, low) - bits + 1)
    rounded = round(exact / unit) * unit  # round() of a fraction is to nearest even
    if abs(rounded) >= Fraction(2) ** (high + 1):
        return math.inf if exact > 0 else -math.inf
    return math.copysign(float(rounded), 1 if exact > 0 else -1)
