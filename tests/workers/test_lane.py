"""Lanes: where a record is read."""

from __future__ import annotations

import pytest

from aiodist.workers.lane import Lane
from aiodist.workers.simulated import SimulatedCluster


def test_record_is_read_where_it_was_brought_to() -> None:
    one, other = (Lane(communicator, 0) for communicator in SimulatedCluster(2).communicators)
    steps = []
    for lane, free in ((one, 0b110), (other, 0b011)):
        lane.begin(0, 0)
        steps.append(lane.agree(bytes(16), free=free))
        next(steps[-1])
    for step in steps:
        with pytest.raises(StopIteration) as end:
            next(step)
        assert end.value.value.opening.free() == 0b010
