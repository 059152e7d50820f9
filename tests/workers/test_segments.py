"""Bytes in segments: what is too far from the beginning of a buffer for an engine goes another way, to the same end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.workers import segments
from aiodist.workers.communicator import Communicator, Request
from aiodist.workers.simulated import SimulatedCluster
from tests.workers.conformance import go_through_together, text

counts_of_workers = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 30), min_size=size, max_size=size), min_size=size, max_size=size)
)


@given(counts=counts_of_workers, step=st.integers(1, 40), farthest=st.sampled_from([0, 20, 1 << 30]))
def test_every_byte_comes_to_its_place(counts: list[list[int]], step: int, farthest: int) -> None:
    size = len(counts)
    sizes = [sum(row) for row in counts]

    def case(c: Communicator) -> Iterator[Request]:
        own = text(c.rank, sizes[c.rank])
        own.flags.writeable = False
        for unit in (1, 16):
            whole = yield from segments.gather(c, own, sizes, unit)
            for rank, part in enumerate(segments.split(whole, sizes, unit)):
                np.testing.assert_array_equal(part, text(rank, sizes[rank]))
        for root in range(size):
            part, copy = (own, np.empty_like(own)) if root == c.rank else (np.empty(sizes[root], np.uint8), None)
            yield from segments.broadcast(c, part, root, copy)
            np.testing.assert_array_equal(part if copy is None else copy, text(root, sizes[root]))
        coming = [row[c.rank] for row in counts]
        received = yield from segments.exchange(c, own, counts[c.rank], coming, max(map(max, counts)))
        parts = [segments.split(text(rank, sizes[rank]), row)[c.rank] for rank, row in enumerate(counts)]
        np.testing.assert_array_equal(received, np.concatenate(parts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT", step)
        patch.setattr(segments, "_FARTHEST", farthest)
        go_through_together(case, SimulatedCluster(size).communicators)
