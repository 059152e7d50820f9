"""Lanes: what is counted, and that nothing is brought to one that waits for a verdict."""

from __future__ import annotations

import pytest

from aiodist.workers.lane import FrozenLane, Lane
from aiodist.workers.local import LocalCommunicator


def test_a_worker_that_has_told_how_much_it_has_brought_brings_nothing_more() -> None:
    lane = Lane(LocalCommunicator(), 1)
    for _ in lane.agree(bytes(16)):
        pass
    assert lane.freeze() == 1
    with pytest.raises(FrozenLane):
        next(lane.agree(bytes(16)))
    assert lane.posted == 1
    lane.catch_up(3)
    assert lane.posted == 3
    lane.begin(2)
    next(lane.agree(bytes(16)))
