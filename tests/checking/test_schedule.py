"""Schedules as text: what is printed can be read again, and nothing else can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.checking.schedule import ASIDE, NEVER, Change, Replayed, Schedule

choices = st.one_of(st.just(ASIDE), st.integers(-50, 50).filter(bool))
changes = st.dictionaries(st.integers(0, 10**6), choices, max_size=20).map(
    lambda found: tuple(Change(point, found[point]) for point in sorted(found))
)


@given(st.integers(0, 2**40), changes)
def test_text_is_read_back(seed: int, made: tuple[Change, ...]) -> None:
    schedule = Schedule(seed, made)
    assert Schedule.parse(str(schedule)) == schedule


def test_text_is_short() -> None:
    assert str(Schedule(7, (Change(17, ASIDE), Change(40, 2), Change(41, -1)))) == "7/17-,40:2,41:-1"
    assert str(Schedule()) == "0/"


@pytest.mark.parametrize(
    "text", ["", "7", "x/", "-1/", "0/17", "0/17:0", "0/17:-0", "0/,", "0/17-,", "0/17-;18-", "²/"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a schedule such as 0/17-,40:2"):
        Schedule.parse(text)


@given(changes, st.data())
def test_replayed_order_asks_for_its_points_alone(made: tuple[Change, ...], data: st.DataObject) -> None:
    order = Replayed(made)
    done = []
    while order.next_point < NEVER:
        point = order.next_point
        ready = data.draw(st.integers(2, 60))
        choice = order.choose(point, ready)
        assert choice == ASIDE or -ready < choice < ready
        done.append(point)
    assert done == [change.point for change in made]
