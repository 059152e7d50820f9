"""Errors outside of replicas name replicas by their ids over all workers, or in a group by those in the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiodist
from aiodist import MultiWorkerMirroredStrategy, PerReplica
from tests.workers.simulated import Job

pytestmark = pytest.mark.anyio

Operation = Callable[[MultiWorkerMirroredStrategy], Any]
ONES, TWOS = np.ones(2), np.full((2, 2), 2.0)


async def told_by_the_second(operation: Operation) -> str:
    """Return the error of an operation on a worker whose replicas are 2 and 3, while the other one does nothing."""
    job = Job(2, 2, answer_seconds=0.01)

    async def one(strategy: MultiWorkerMirroredStrategy) -> None:
        if strategy is job.strategies[1]:
            await operation(strategy)

    outcomes = await job.everywhere(one)
    assert isinstance(outcomes[1], (TypeError, ValueError)), outcomes
    return str(outcomes[1])


@pytest.mark.parametrize(
    ("operation", "told"),
    [
        (lambda s: s.reduce("SUM", PerReplica([ONES, TWOS]), None), "replica 2's is (2,), replica 3's is (2, 2)"),
        (lambda s: s.gather(PerReplica([ONES, TWOS]), 0), "replica 2's is float64[2], replica 3's is float64[2, "),
        (lambda s: s.gather(PerReplica([ONES, ONES, ONES]), 0), "expected 2 components, one for each replica, got 3"),
    ],
)
async def test_components_of_other_shapes(operation: Operation, told: str) -> None:
    assert told in await told_by_the_second(operation)


async def test_results_of_other_structures() -> None:
    async def one(strategy: MultiWorkerMirroredStrategy) -> None:
        await strategy.run(lambda: {aiodist.get_replica_context().replica_id_in_sync_group: 1})

    assert "value[2] is on replica 2 only" in str((await Job(2, 2).everywhere(one))[1])


@pytest.mark.parametrize("workers", [(4,), (2, 2)])
async def test_merge_function_of_a_group(workers: tuple[int, ...]) -> None:
    async def merged(strategy: Any, value: Any) -> Any:
        return await strategy.reduce("SUM", value, None)

    async def replica() -> None:
        ctx = aiodist.get_replica_context()
        here = ctx.replica_id_in_sync_group
        if here >= 2:
            group = ctx.new_group([2, 3])
            await group.merge_call(merged, (ONES if here == 2 else TWOS,))

    async def one(strategy: MultiWorkerMirroredStrategy) -> None:
        await strategy.run(replica)

    outcomes = await Job(*workers).everywhere(one)
    assert "replica 2's is (2,), replica 3's is (2, 2)" in str(outcomes[-1])
