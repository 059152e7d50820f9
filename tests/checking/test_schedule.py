"""Schedules as text, orders as functions of points, and the search for the fewest changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist._checking.explore import minimise
from aiodist._checking.schedule import DEFER, Change, Schedule

choices = st.one_of(st.just(DEFER), st.integers(-50, 50).filter(bool))
changes = st.dictionaries(st.integers(0, 10**6), choices, max_size=20).map(
    lambda found: tuple(Change(point, found[point]) for point in sorted(found))
)


@given(st.integers(0, 2**40), changes)
def test_text_is_read_back(seed: int, made: tuple[Change, ...]) -> None:
    schedule = Schedule(seed, made)
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    "text", ["", "7", "x/", "-1/", "0/17", "0/17:0", "0/17:-0", "0/,", "0/17-,", "0/17-;18-", "²/"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a schedule such as 0/17-,40:2"):
        Schedule.parse(text)


@given(st.integers(1, 40), st.data())
def test_minimised_items_fail_and_none_of_them_can_be_left_out(size: int, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1, max_size=3))

    def failure_of(part: Sequence[int]) -> Sequence[int] | None:
        return part if any(group <= set(part) for group in groups) else None

    found = minimise(range(size), failure_of) or range(size)
    assert failure_of(found)
    assert len(found) == 1 or not any(failure_of([x for x in found if x != one]) for one in found)
