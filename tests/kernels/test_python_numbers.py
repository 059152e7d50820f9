# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import math
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist_kernels import ReduceOp, reduce_numbers

SUM, MEAN, MIN, MAX, PRODUCT = ReduceOp

integers = st.lists(st.integers(), min_size=1, max_size=70)
floats = st.lists(st.floats(), min_size=1, max_size=70)


@given(integers)
def test_integers_are_exact(numbers: list[int]) -> None:
    assert reduce_numbers(SUM, numbers) == sum(numbers)
    assert reduce_numbers(PRODUCT, numbers) == math.prod(numbers)
    assert reduce_numbers(MEAN, numbers) == float(Fraction(sum(numbers), len(numbers)))
    assert reduce_numbers(MIN, numbers) == min(numbers)
    assert reduce_numbers(MAX, numbers) == max(numbers)


@given(floats, st.integers(0, 69))
def test_floats_are_folded_left_to_right(numbers: list[float], place: int) -> None:
    total = functools.reduce(operator.add, numbers)
    assert repr(reduce_numbers(SUM, numbers)) == repr(total)
    assert repr(reduce_numbers(MEAN, numbers)) == repr(total / len(numbers))
    assert repr(reduce_numbers(PRODUCT, numbers)) == repr(functools.reduce(operator.mul, numbers))
    clean = [0.0 if math.isnan(number) else number for number in numbers]
    assert reduce_numbers(MIN, clean) == min(clean)
    assert reduce_numbers(MAX, clean) == max(clean)
    clean[place % len(clean)] = math.nan
    assert repr(reduce_numbers(MIN, clean)) == repr(reduce_numbers(MAX, clean)) == "nan"


@pytest.mark.parametrize(
    ("op", "numbers", "wanted"),
    [
        (MIN, [True, False], "False"),
        (MAX, [False, True, False], "True"),
        (SUM, [1.0, 1e100, 1.0, -1e100], "0.0"),  # not compensated
        (SUM, [-0.0, -0.0], "-0.0"),
        (SUM, [1 + 2j, 3 - 1j], "(4+1j)"),
        (PRODUCT, [1 + 2j, 3 - 1j], "(5+5j)"),
        (MEAN, [complex(math.inf, 1), 0j], "(inf+0.5j)"),
        *((op, [2, 4], wanted) for op, wanted in zip(ReduceOp, ["6", "3.0", "2", "4", "8"], strict=True)),
        *((op, [2.5], "2.5") for op in ReduceOp),
    ],
)
def test_numbers_and_their_types(op: ReduceOp, numbers: list[float], wanted: str) -> None:
    assert repr(reduce_numbers(op, numbers)) == wanted
