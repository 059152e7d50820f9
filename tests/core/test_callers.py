"""Tests of the search for calls that participants have made in different orders."""

from collections.abc import Hashable

from aiodist._core.callers import CallerOrder, mixed_hash


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
