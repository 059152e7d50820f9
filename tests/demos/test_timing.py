"""How times are split, on clocks set by hand."""

from __future__ import annotations

import pytest

from aiodist.demos.timing import Clock, account


def test_last_to_arrive_tells_what_reducing_takes() -> None:
    late = Clock(computing_seconds=9.0, meetings=[1.0, 5.0])
    early = Clock(computing_seconds=5.0, meetings=[4.0, 1.0])
    times = account([late, early])
    assert times.computing == pytest.approx(7.0)
    assert times.reducing == pytest.approx(1.0 + 1.0)
    assert times.waiting == pytest.approx((0 + 3 + 4 + 0) / 2)


def test_one_replica_waits_for_nobody() -> None:
    times = account([Clock(2.0, [0.5, 0.25])])
    assert (times.computing, times.reducing, times.waiting) == (2.0, 0.75, 0.0)


def test_blocks_are_counted() -> None:
    clock = Clock()
    for _ in range(3):
        with clock.computing():
            pass
        with clock.meeting():
            pass
    assert clock.computing_seconds > 0
    assert len(clock.meetings) == 3
