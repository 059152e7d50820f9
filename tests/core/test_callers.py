"""Tests of the search for calls that participants have made in different orders."""

from collections.abc import Hashable

import pytest

from aiodist._core.callers import CallerOrder, mixed_hash


def noted(*calls: tuple[int, str]) -> list[int | None]:
    """Note calls, each with a letter for each participant's way, in one aspect; return what is found."""
    order = CallerOrder(256)
    return [order.note(number, [[mixed_hash(way)] for way in ways]) for number, ways in calls]


@pytest.mark.parametrize(
    ("calls", "first"),
    [
        ([(0, "aa"), (1, "bb")], None),
        ([(0, "ab"), (1, "ba")], 0),
        ([(3, "xy"), (5, "ab"), (9, "cc"), (11, "ba")], 5),
        ([(0, "abc"), (1, "bca"), (2, "cab")], 0),
        ([(0, "abc"), (1, "bca"), (2, "cba")], None),
        ([(0, "ab"), (1, "ab"), (2, "ab")], None),
    ],
)
def test_first_call_in_another_order_is_found(calls: list[tuple[int, str]], first: int | None) -> None:
    *before, last = noted(*calls)
    assert set(before) <= {None}
    assert last == first


def test_places_and_aspects_are_apart() -> None:
    order, (a, b, x) = CallerOrder(256), map(mixed_hash, "abx")
    assert order.note(0, [(a, x), (b, x)], "here") is None
    assert order.note(1, [(b, x), (a, x)], "there") is None
    assert order.note(2, [(x, b), (x, a)], "here") is None
    assert order.note(3, [(b, x), (a, x)], "here") == 0


def test_ways_that_share_a_part_are_not_the_same() -> None:
    def way(*parts: Hashable) -> list[int]:
        return [mixed_hash(parts)]

    for n in range(200):
        order = CallerOrder(256)
        assert order.note(0, [way("x", n, "a"), way("x", n, "b")]) is None
        assert order.note(1, [way("y", n, "b"), way("y", n, "a")]) is None


def test_calls_too_long_ago_are_not_found() -> None:
    a, b = map(mixed_hash, "ab")
    for last, first in ((2, 0), (3, None)):
        order = CallerOrder(3)
        assert order.note(0, [[a], [b]]) is None
        assert order.note(last, [[b], [a]]) == first
