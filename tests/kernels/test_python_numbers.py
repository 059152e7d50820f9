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


@given(floats)
def test_floats_are_folded_left_to_right(numbers: list[float]) -> None:
    total = functools.reduce(operator.add, numbers)
    assert repr(reduce_numbers(SUM, numbers)) == repr(total)
    assert repr(reduce_numbers(MEAN, numbers)) == repr(total / len(numbers))
    assert repr(reduce_numbers(PRODUCT, numbers)) == repr(functools.reduce(operator.mul, numbers))


def test_sum_is_not_compensated() -> None:
    assert reduce_numbers(SUM, [1.0, 1e100, 1.0, -1e100]) == 0.0
    assert math.copysign(1, complex(reduce_numbers(SUM, [-0.0, -0.0])).real) == -1


@given(floats, st.integers(0, 69))
def test_nan_propagates_from_any_place(numbers: list[float], place: int) -> None:
    clean = [0.0 if math.isnan(number) else number for number in numbers]
    assert reduce_numbers(MIN, clean) == min(clean)
    assert reduce_numbers(MAX, clean) == max(clean)
    clean[place % len(clean)] = math.nan
    assert repr(reduce_numbers(MIN, clean)) == repr(reduce_numbers(MAX, clean)) == "nan"


def test_bools_have_all_and_any() -> None:
    assert reduce_numbers(MIN, [True, False]) is False
    assert reduce_numbers(MAX, [False, True, False]) is True
    assert reduce_numbers(MAX, [False]) is False


def test_complex_numbers_by_component() -> None:
    infinite = complex(math.inf, 1)
    assert reduce_numbers(SUM, [1 + 2j, 3 - 1j]) == 4 + 1j
    assert reduce_numbers(PRODUCT, [1 + 2j, 3 - 1j]) == 5 + 5j
    assert reduce_numbers(MEAN, [infinite, 0j]) == complex(math.inf, 0.5)


def test_result_types() -> None:
    assert [type(reduce_numbers(op, [2, 4])) for op in ReduceOp] == [int, float, int, int, int]
    assert {type(reduce_numbers(op, [2.0, 4.0])) for op in ReduceOp} == {float}


def test_ops_go_by_name() -> None:
    assert reduce_numbers(ReduceOp("mean"), [1, 2]) == 1.5
    assert ReduceOp("Product") is PRODUCT
    assert repr(SUM) == "<ReduceOp.SUM: 'SUM'>"


@pytest.mark.parametrize("op", ReduceOp, ids=lambda op: op.name)
def test_one_number_is_itself(op: ReduceOp) -> None:
    assert reduce_numbers(op, [2.5]) == 2.5
