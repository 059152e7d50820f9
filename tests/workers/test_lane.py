"""Lanes: what is counted, and that nothing is brought to one that waits for a verdict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from aiodist.replica.recovery import Recovery
from aiodist.workers.lane import FrozenLane, Lane
from aiodist.workers.local import LocalCommunicator
from aiodist.workers.simulated import SimulatedCluster


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


def test_record_is_read_where_it_was_brought_to_also_when_the_lane_has_been_begun_anew() -> None:
    one, other = (Lane(communicator, 0) for communicator in SimulatedCluster(2).communicators)
    steps = []
    for lane in (one, other):
        lane.begin(0, 0)
    steps.append(one.agree(bytes(16), free=0b110))
    next(steps[0])
    one.begin(0, 1)  # the next use, where the first one was left in the midst of its step
    steps.append(other.agree(bytes(16), free=0b011))
    next(steps[1])
    for step in steps:
        with pytest.raises(StopIteration) as end:
            next(step)
        assert end.value.value.opening.free() == 0b010


def test_lane_is_not_left_before_a_step_that_was_begun_on_it_earlier() -> None:
    team, lane, another = SimpleNamespace(lost=None), object(), object()
    recovery = Recovery(cast("Any", team), LocalCommunicator())
    stuck, later, elsewhere = (
        cast("Any", SimpleNamespace(lane=where, in_the_midst=midst))
        for where, midst in ((lane, True), (lane, False), (another, False))
    )
    recovery.crossings += [stuck, elsewhere, later]
    assert [recovery.is_behind(crossing) for crossing in (stuck, elsewhere, later)] == [False, False, True]
    stuck.in_the_midst = False
    assert not recovery.is_behind(later)
