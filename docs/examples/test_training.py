"""Tests of training code on replicas, without a cluster and without waiting.

    python -m pytest -p aiodist.testing.pytest_plugin docs/examples/test_training.py

The code under test is `train`, with a fault that can be switched on: a replica that sees a bad batch skips the step.
Each test shows one way to test such code.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiodist import CollectiveMismatchError, get_replica_context
from aiodist.testing import assert_same_collectives, explore, record_collectives, run_replicas


async def train(batches: int, *, bad: int | None = None) -> list[float]:
    """Return the weights after a step per batch; with the fault, replica 1 skips the bad batch."""
    ctx = get_replica_context()
    weights = np.zeros(2)
    for number in range(batches):
        await asyncio.sleep(1)  # a slow loader; in tests it takes no time
        if number == bad and ctx.replica_id_in_sync_group == 1:
            continue
        weights = weights + await ctx.all_reduce("MEAN", np.full(2, float(number)))
    await ctx.barrier()
    return weights.tolist()


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_weights_do_not_depend_on_the_number_of_replicas(replicas: int) -> None:
    assert run_replicas(train, replicas, args=(4,)) == ([6.0, 6.0],) * replicas


def test_any_order_of_tasks_gives_the_same_weights() -> None:
    assert explore(train, 3, schedules=30, args=(3,)).schedules == 30


def test_collectives_of_a_step() -> None:
    """A change that adds a collective to every step is found here, before it slows down a network."""
    with record_collectives() as record:
        run_replicas(train, 2, args=(2,))
    assert_same_collectives(record, ["all_reduce(MEAN, float64[2])"] * 2 + ["barrier()"])


def test_bad_batch_is_reported_with_its_line() -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        run_replicas(train, 3, args=(4,), kwargs={"bad": 2})
    assert caught.value.report.suspects == (1,)
    assert "barrier()" in str(caught.value)


@pytest.mark.replicas(4, schedules=10)
async def test_as_a_replica() -> None:
    """The test function itself is the replica function."""
    ctx = get_replica_context()
    assert await ctx.all_reduce("SUM", ctx.replica_id_in_sync_group) == 6
