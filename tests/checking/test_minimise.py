"""Delta debugging finds what is needed, and nothing can be left out of what it finds."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from aiodist.checking.minimise import minimise


@given(st.integers(1, 80), st.data())
def test_what_is_needed_is_found(size: int, data: st.DataObject) -> None:
    needed = data.draw(st.sets(st.integers(0, size - 1), max_size=6))
    found = minimise(range(size), lambda part: needed <= set(part))
    assert needed <= set(found)
    assert len(found) <= max(1, len(needed))


@given(st.integers(1, 40), st.data())
def test_nothing_can_be_left_out(size: int, data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1, max_size=3))

    def fails(part: Sequence[int]) -> bool:
        return any(group <= set(part) for group in groups)

    found = minimise(range(size), fails)
    assert fails(found)
    assert not any(fails([x for x in found if x != one]) for one in found) or len(found) == 1


def test_search_that_is_stopped_returns_what_it_has() -> None:
    asked = 0

    def fails(part: Sequence[int]) -> bool:
        nonlocal asked
        asked += 1
        if asked > 3:
            raise StopIteration
        return 7 in part

    assert 7 in minimise(range(100), fails)
    assert len(minimise(range(100), fails)) == 100
