"""Global batches and the replicas' parts of them."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aiodist.demos.batches import global_batches, part


@given(size=st.integers(0, 60), replicas=st.integers(1, 20))
def test_parts_are_the_batch_cut_in_order(size: int, replicas: int) -> None:
    batch = np.arange(100, 100 + size)
    parts = [part(batch, replica, replicas) for replica in range(replicas)]
    assert np.concatenate(parts).tolist() == batch.tolist()
    full = math.ceil(size / replicas)
    lengths = [len(one) for one in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert len([length for length in lengths if 0 < length < full]) <= 1


@given(examples=st.integers(1, 50), size=st.integers(1, 60), steps=st.integers(0, 30), seed=st.integers(0, 5))
def test_batches_have_distinct_examples(examples: int, size: int, steps: int, seed: int) -> None:
    batches = list(global_batches(examples, size, steps, seed))
    assert len(batches) == steps
    for batch in batches:
        assert len(set(batch.tolist())) == len(batch) == min(size, examples)
        assert set(batch.tolist()) <= set(range(examples))


def test_an_epoch_takes_every_example_once() -> None:
    batches = list(global_batches(12, 4, 6, seed=0))
    epochs = [np.concatenate(batches[:3]), np.concatenate(batches[3:])]
    assert [sorted(epoch.tolist()) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0].tolist() != epochs[1].tolist()


def test_what_is_too_little_for_a_batch_is_dropped() -> None:
    first, second, third = global_batches(10, 4, 3, seed=0)
    assert not set(first.tolist()) & set(second.tolist())
    assert len(third) == 4


def test_same_seed_gives_same_batches() -> None:
    def drawn(seed: int) -> list[list[int]]:
        return [batch.tolist() for batch in global_batches(30, 7, 9, seed)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
